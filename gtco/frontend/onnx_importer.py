"""TVM's ONNX importer, with errors in gtco's words and with the rules of
:mod:`gtco.frontend.operators.overrides` before its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from gtco.frontend.node_check import NUMBERS, Node, differ, spell
from gtco.frontend.operators.arguments import Refused
from gtco.frontend.operators.overrides import OVERRIDES
from gtco.frontend.operators.padding import with_windows

_SMALL = 1 << 10  # elements: a larger constant is data
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


class Importer(ONNXGraphImporter):
    """The importer. ``labels`` are the nodes' names by Relax variable."""

    def __init__(self, opsets: Sequence[onnx.OperatorSetIdProto]) -> None:
        super().__init__({}, {}, sanitize=True)
        self.labels: dict[str, str] = {}
        self._opsets = opsets
        self._begun = False

    def from_onnx(self, graph: onnx.GraphProto, opset: int) -> tvm.IRModule:
        try:
            return super().from_onnx(graph, opset)
        except Exception:
            if self._begun:  # TVM leaves it open, and warns of this on standard error
                self.bb._end_block()
            raise

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Does nothing: ``frontend.onnx`` has refused them already, all at once and with their
        nodes.
        """

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        """Translates node by node, after a check of each against ONNX's rules. Every error of TVM
        becomes a :class:`GtcoError` about the node, in gtco's words.
        """
        self._begun = True
        for proto in graph.node:
            node = self._known(proto)
            wanted = node.infer(self._opsets)
            try:
                super()._construct_nodes(SimpleNamespace(node=[proto]))
            except Refused as reason:
                raise node.refused(str(reason)) from reason
            except Exception as error:
                raise node.refused(_reason(node, error)) from error
            for name, kind in wanted.items():
                made = _type_proto(self._nodes[name]) if name in self._nodes else None
                if made is not None and differ(made, kind):
                    raise node.refused(
                        f"its output '{name}' would be {spell(made)} and has to be {spell(kind)}"
                    )
            outputs = {n: self._nodes[n] for n in proto.output if n in self._nodes}
            types = {n: _type_proto(value) for n, value in outputs.items()}
            node.check_sizes({n: kind for n, kind in types.items() if kind is not None})

    def _known(self, proto: onnx.NodeProto) -> Node:
        types, values = {}, {}
        for name in proto.input:
            value = self._nodes.get(name)
            kind = None if value is None else _type_proto(value)
            if kind is not None:
                types[name] = kind
            known = None if value is None else _small_value(value)
            if known is not None:
                values[name] = known
        return Node(proto, types, values)

    def _convert_operator(
        self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int
    ) -> Any:
        name = attrs["tvm_custom"]["name"]
        attrs = with_windows(op_name, inputs, attrs, opset)
        attrs["tvm_custom"]["opset"] = opset
        override = OVERRIDES.get(op_name)
        result = override(self.bb, inputs, attrs) if override is not None else None
        if result is None:
            result = super()._convert_operator(op_name, inputs, attrs, opset)
        if isinstance(result, relax.Tuple):  # several outputs
            return relax.Tuple([self._labelled(field, name) for field in result.fields])
        return self._labelled(result, name)

    def _labelled(self, result: Any, name: str) -> Any:
        # Bound here, so that the variable belongs to this node. TVM's converters of two tensors
        # fail at two elements of a sequence that are not bound.
        if isinstance(result, relax.Call | relax.TupleGetItem):
            result = self.bb.emit(result)
        if isinstance(result, relax.Var):
            self.labels.setdefault(result.name, name)
        return result


# The positions of inputs that must be constants, by operator. If one is known only at run time, TVM
# fails with words of its own.
_CONSTANT_INPUTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("AffineGrid", "CumSum", "Expand", "OneHot", "Reshape", "SplitToSequence"), (1,)
    ),
    **dict.fromkeys(("Split", "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze"), (1,)),
    **dict.fromkeys((f"Reduce{kind}" for kind in _REDUCTIONS), (1,)),
    "ConstantOfShape": (0,),
    "MaxUnpool": (2,),
    "NonMaxSuppression": (2, 3, 4),
    "Range": (0, 1, 2),
    "Slice": (1, 2, 3, 4),
}


def _reason(node: Node, error: Exception) -> str:
    """Why TVM fails at a node, if that is known; else ""."""
    for place in _CONSTANT_INPUTS.get(node.proto.op_type, ()):
        name = node.proto.input[place] if place < len(node.proto.input) else ""
        if name and name not in node.values:
            return f"its input '{name}' is known only at run time: make it a constant"
    if isinstance(error, AssertionError) and str(error).startswith("Missing outputs"):
        kind = node.proto.op_type, node.proto.domain
        formal = onnx.defs.get_schema(*kind).outputs if onnx.defs.has(*kind) else ()
        names = [f"'{x}' ({y.name})" for x, y in zip(node.proto.output, formal, strict=False)]
        return f"not all of its {len(node.proto.output)} outputs are supported: {', '.join(names)}"
    return ""


def _type_proto(value: Any) -> onnx.TypeProto | None:
    """The ONNX type of a Relax value; None if ONNX has none for it."""
    kind = value.ty
    if isinstance(kind, relax.ShapeType):  # for ONNX this is a vector of integers
        rank = kind.ndim if kind.ndim >= 0 else None
        return onnx.helper.make_tensor_type_proto(NUMBERS["int64"], [rank])
    if not isinstance(kind, relax.TensorType) or str(kind.dtype) not in NUMBERS:
        return None
    known = isinstance(kind.shape, relax.ShapeExpr)
    shape = [_size(dim) for dim in kind.shape] if known else None
    return onnx.helper.make_tensor_type_proto(NUMBERS[str(kind.dtype)], shape)


def _size(dim: Any) -> int | None:
    return int(dim) if isinstance(dim, int | tvm.tirx.IntImm) else None


def _small_value(value: Any) -> numpy.ndarray | None:
    """The value of a small constant that ONNX's rules need, such as a shape or a list of axes."""
    if isinstance(value, relax.ShapeExpr):
        sizes = [_size(dim) for dim in value.values]
        return None if None in sizes else numpy.array(sizes, numpy.int64)
    if not isinstance(value, tvm.ir.expr.GenericConst):
        return None
    return value.value.numpy() if math.prod(value.value.shape) <= _SMALL else None
