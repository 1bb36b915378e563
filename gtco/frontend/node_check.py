"""Checks one node against ONNX's own rules before TVM's importer sees it, and describes it in
errors.

TVM trusts a node's types, ranks and attributes. If one is wrong, TVM fails with words of its own,
gives a wrong shape, or ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import onnx
import onnx.defs
import onnx.shape_inference
from onnx import TypeProto, helper, numpy_helper

from gtco.frontend.size_rules import broken_rule, negative_size
from gtco.support.errors import GtcoError, ModelError, UnsupportedError
from gtco.support.onnx_messages import nodes
from gtco.tensor.stage import ITEM_BYTES

_POOLS = ("AveragePool", "LpPool", "MaxPool")
_STANDARD = ("", "ai.onnx")
_SPELT = {"float": "float32", "double": "float64"}  # ONNX's names and gtco's, if they differ
DTYPES: Mapping[int, str] = {
    number: _SPELT.get(name.lower(), name.lower())
    for name, number in onnx.TensorProto.DataType.items()
}
"""gtco's name of each ONNX element type, also of types that it does not support."""
NUMBERS: Mapping[str, int] = {DTYPES[n]: n for n in DTYPES if DTYPES[n] in ITEM_BYTES}
_SHOWN = 8  # elements of an attribute that messages show


@dataclass(frozen=True)
class Node:
    """A node, with the types of its inputs and the values of small constants."""

    proto: onnx.NodeProto
    types: Mapping[str, TypeProto] = field(default_factory=dict)
    values: Mapping[str, numpy.ndarray] = field(default_factory=dict)

    def __str__(self) -> str:
        domain = "" if self.proto.domain in _STANDARD else f"{self.proto.domain}."
        name = self.proto.name or next(iter(self.proto.output), "")
        return f"node '{name}' ({domain}{self.proto.op_type})"

    def described(self) -> str:
        """The node's inputs with their types and shapes, and its attributes."""
        inputs = [
            f"{name} {spell(self.types[name]) if name in self.types else '(type unknown)'}"
            if name
            else "(left out)"
            for name in self.proto.input
        ]
        attributes = [f"{a.name}={_value(a)}" for a in self.proto.attribute]
        given = {"inputs": inputs, "attributes": attributes}
        return "; ".join(f"{kind}: {', '.join(parts)}" for kind, parts in given.items() if parts)

    def infer(self, opsets: Sequence[onnx.OperatorSetIdProto]) -> dict[str, TypeProto]:
        """The types of the outputs by ONNX's rules; {} if ONNX has no rules for the operator, or
        does not know the types of all inputs. Raises :class:`ModelError` if the node breaks the
        rules.
        """
        domain = "" if self.proto.domain in _STANDARD else self.proto.domain
        opset = next((o.version for o in opsets if _same(o.domain, domain)), 1)
        if not onnx.defs.has(self.proto.op_type, opset, domain):
            return {}
        if any(name and name not in self.types for name in self.proto.input):
            return {}
        pools = self.proto.op_type in _POOLS
        if pools and any(a.name == "ceil_mode" for a in self.proto.attribute):
            # until then ONNX's rule counts a window that begins in the padding; engines do not
            opset = max(opset, 22)
        schema = onnx.defs.get_schema(self.proto.op_type, opset, domain)
        if left_out := _left_out(schema, self.proto):
            raise self._broken(f"its required input {left_out} is left out")
        values = {name: numpy_helper.from_array(v, name) for name, v in self.values.items()}
        try:
            made = onnx.shape_inference.infer_node_outputs(
                schema, self.proto, dict(self.types), values, opset_imports=list(opsets)
            )
        except Exception as error:  # it has several types, such as ValueError
            said = " ".join(str(error).split()).removeprefix("[ShapeInferenceError] ")
            raise self._broken(said.removeprefix("[TypeInferenceError] ")) from error
        # ONNX does not compare the numbers of elements.
        if self.proto.op_type == "Reshape" and not domain:
            before, after = (
                _elements(t) for t in (self.types[self.proto.input[0]], *made.values())
            )
            if None not in (before, after) and before != after:
                raise self._broken(f"its input has {before} elements and its output {after}")
        shapes = [sizes_of(self.types[name]) if name else None for name in self.proto.input]
        if rule := broken_rule(self.proto, shapes, self.values):
            raise self._broken(rule)
        self.check_sizes(made)
        return dict(made)

    def check_sizes(self, made: Mapping[str, TypeProto]) -> None:
        """Raises :class:`ModelError` for an output with a negative size."""
        for name, kind in made.items():
            if rule := negative_size(name, sizes_of(kind) or ()):
                raise self._broken(rule)

    def _broken(self, rule: str) -> ModelError:
        return ModelError(
            f"{self} breaks a rule of ONNX: {rule} ({self.described() or 'no inputs'}). Export the "
            "model again, or check the sizes given with --shape or --dim"
        )

    def refused(self, reason: str = "") -> GtcoError:
        """The error for a node that is valid and cannot be compiled; ``reason`` says why. Without
        one it may be an input that has no shape.
        """
        tensors = {n: t for n, t in self.types.items() if n and t.HasField("tensor_type")}
        shapeless = [n for n, t in tensors.items() if not t.tensor_type.HasField("shape")]
        if not reason and shapeless:
            reason = f"the shape of its input '{shapeless[0]}' is known only when the model runs"
        return UnsupportedError(
            f"{self} is not supported as it stands{': ' if reason else ''}{reason} "
            f"({self.described() or 'no inputs'}). Write it with other operators, types or "
            "attributes, or cut the graph before it (onnx.utils.extract_model)"
        )


def check_splits(model: onnx.ModelProto) -> None:
    """Raises :class:`ModelError` for a Split whose ``num_outputs`` is not the number of its
    outputs. If it has more outputs than that, ONNX's shape inference ends the process.
    """
    for node in nodes(model.graph):
        for attribute in node.attribute if node.op_type == "Split" else ():
            if attribute.name == "num_outputs" and attribute.i != len(node.output):
                raise Node(node)._broken(f"it has {len(node.output)} outputs")


def _left_out(schema: onnx.defs.OpSchema, node: onnx.NodeProto) -> str:
    """ONNX's name of the first required input that is left out; "" if there is none."""
    for place, name in enumerate(node.input):
        parameter = schema.inputs[min(place, len(schema.inputs) - 1)] if schema.inputs else None
        if not name and parameter is not None:
            if parameter.option != onnx.defs.OpSchema.FormalParameterOption.Optional:
                return str(parameter.name)
    return ""


def spell(kind: TypeProto) -> str:
    """The type as text: ``float32[1, 3, ?]``."""
    if not kind.HasField("tensor_type"):
        return str(kind.WhichOneof("value") or "(type unknown)").removesuffix("_type")
    tensor = kind.tensor_type
    dtype = DTYPES.get(tensor.elem_type, f"type {tensor.elem_type}")
    if not tensor.HasField("shape"):
        return dtype
    dims = [str(d.dim_value) if d.HasField("dim_value") else "?" for d in tensor.shape.dim]
    return f"{dtype}[{', '.join(dims)}]"


def sizes_of(kind: TypeProto) -> tuple[int, ...] | None:
    """The shape; None if it is not known."""
    dims = kind.tensor_type.shape.dim
    known = kind.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims)
    return tuple(d.dim_value for d in dims) if known else None


def _elements(kind: TypeProto) -> int | None:
    sizes = sizes_of(kind)
    return None if sizes is None else math.prod(sizes)


def differ(made: TypeProto, wanted: TypeProto) -> bool:
    """True if no tensor can have both types. Unknown sizes fit any."""
    a, b = made.tensor_type, wanted.tensor_type
    if not wanted.HasField("tensor_type") or not b.elem_type:
        return False
    if a.elem_type != b.elem_type:
        return True
    if not (a.HasField("shape") and b.HasField("shape")):
        return False
    pairs = zip(a.shape.dim, b.shape.dim, strict=False)
    return len(a.shape.dim) != len(b.shape.dim) or any(
        x.HasField("dim_value") and y.HasField("dim_value") and x.dim_value != y.dim_value
        for x, y in pairs
    )


def _value(attribute: onnx.AttributeProto) -> str:
    value: Any = helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return spell(helper.make_tensor_type_proto(value.data_type, list(value.dims)))
    if isinstance(value, bytes):
        return repr(value.decode(errors="replace"))
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return f"({type(value).__name__})"
    items = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in value]
    rest = ", ..." if len(items) > _SHOWN else ""
    return f"[{', '.join(str(item) for item in items[:_SHOWN])}{rest}]"


def _same(domain: str, other: str) -> bool:
    return ("" if domain in _STANDARD else domain) == other
