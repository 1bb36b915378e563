"""The writer of nodes. It infers the types of a node's results when it writes the node, and
computes the results that are shapes, flags or counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any

import numpy
import onnx
import onnx.shape_inference
from onnx import TypeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from gtco.frontend.node_check import Node
from gtco.support.onnx_messages import nodes

MICROSOFT = "com.microsoft"  # the domain of the operators that ONNX Runtime's optimizer writes
_STANDARD = ("", "ai.onnx")
# Shapes, conditions and counts have few elements; larger values are data and are not evaluated.
_SMALL = 1 << 12
# Operators that compute shapes, conditions and counts.
_ARITHMETIC = frozenset(
    """Abs Add And Cast Ceil Concat ConstantOfShape Div Equal Expand Flatten Floor Gather
    GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg
    Not Or Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Relu Reshape Slice Split Sqrt Squeeze
    Sub Tile Transpose Unsqueeze Where Xor""".split()
)
# The first output has the first input's type, and ONNX infers none for it.
_ALIKE = frozenset(
    [
        ("", "GroupNormalization"),
        ("", "MeanVarianceNormalization"),
        *(
            (MICROSOFT, kind)
            for kind in ("Gelu", "FastGelu", "BiasGelu", "SkipLayerNormalization", "Trilu")
        ),
    ]
)


class Unsuitable(Exception):
    """A use of an operator that cannot be written out; the message says why."""


class Writer:
    """The nodes written so far, in order, and the tensors that they were written with.

    ``types`` and ``values`` hold the known types and values of tensors, by name. A tensor whose
    type is not known before the model runs is in neither.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._opsets = list(model.opset_import)
        self.opset = next((o.version for o in self._opsets if o.domain in _STANDARD), 1)
        self._ir = model.ir_version
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.types: dict[str, TypeProto] = {}
        self.values: dict[str, numpy.ndarray] = {}
        self._taken = _names(model.graph)
        self._given_out = {value.name for value in model.graph.output}
        self._label = ""
        self._tensors: dict[str, onnx.TensorProto] = {}
        for value in model.graph.input:
            self.types[value.name] = value.type
        for tensor in model.graph.initializer:
            self.know(tensor)

    # -- known facts -----------------------------------------------------------------------------

    def know(self, tensor: onnx.TensorProto) -> None:
        """Records an initializer's type and, if it is small, its value."""
        self.types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        self._tensors[tensor.name] = tensor
        if prod(tensor.dims) <= _SMALL and tensor.data_type != onnx.TensorProto.STRING:
            self.values[tensor.name] = numpy_helper.to_array(tensor)

    def array(self, name: str) -> numpy.ndarray:
        """The value of an initializer of any size. Raises :class:`Unsuitable` for other tensors."""
        if name not in self._tensors:
            raise Unsuitable(f"its input '{name}' is known only at run time: make it a constant")
        return numpy_helper.to_array(self._tensors[name])

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self.types.get(name)
        if kind is not None and kind.HasField("tensor_type") and kind.tensor_type.HasField("shape"):
            dims = kind.tensor_type.shape.dim
            if all(dim.HasField("dim_value") for dim in dims):
                return tuple(dim.dim_value for dim in dims)
        raise Unsuitable(f"the shape of its input '{name}' is not known before the model runs")

    def dtype(self, name: str) -> int:
        """The element type, in ONNX's numbers."""
        kind = self.types.get(name)
        if kind is None or not kind.HasField("tensor_type"):
            raise Unsuitable(f"the type of its input '{name}' is not known before the model runs")
        return int(kind.tensor_type.elem_type)

    def check_unknown(self, tensors: Collection[str]) -> None:
        """Raises :class:`ModelError` for the first node that makes one of these tensors without a
        known type, because it breaks a rule of ONNX.
        """
        for node in self.nodes:
            if any(name in tensors and name not in self.types for name in node.output):
                Node(node, self.types, self.values).infer(self._opsets)

    def mark(self) -> tuple[int, int]:
        """The place that has been reached, for :meth:`since` and :meth:`back_to`."""
        return len(self.nodes), len(self.initializers)

    def since(self, mark: tuple[int, int]) -> set[str]:
        """The tensors of the nodes that were written since then."""
        return {name for node in self.nodes[mark[0] :] for name in node.output if name}

    def back_to(self, mark: tuple[int, int]) -> None:
        """Removes what was written since then."""
        del self.nodes[mark[0] :]
        del self.initializers[mark[1] :]

    # -- writing ---------------------------------------------------------------------------------

    def label(self, name: str) -> None:
        """Sets the name of the model's node that the next written nodes come from."""
        self._label = name

    def fresh(self, hint: str) -> str:
        name, number = hint, 0
        while name in self._taken:
            number += 1
            name = f"{hint}_{number}"
        self._taken.add(name)
        return name

    def constant(self, value: Any, dtype: int, hint: str = "constant") -> str:
        """Adds an initializer; ``dtype`` is in ONNX's numbers."""
        with numpy.errstate(invalid="ignore"):  # NaN as an integer
            array = numpy.asarray(value).astype(helper.tensor_dtype_to_np_dtype(dtype))
        tensor = numpy_helper.from_array(array, self.fresh(f"{self._label}/{hint}"))
        self.initializers.append(tensor)
        self.know(tensor)
        return str(tensor.name)

    def integers(self, value: Any) -> str:
        return self.constant(value, onnx.TensorProto.INT64)

    def add(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node. Returns its first output."""
        name = f"{self._label}/{kind}"
        output = self.fresh(f"{name}_output")
        node = helper.make_node(kind, inputs, [output], name=name, domain=domain, **attributes)
        self.append(node)
        return output

    def several(self, kind: str, count: int, *inputs: str) -> list[str]:
        """Adds a node of several outputs. Returns them."""
        name = f"{self._label}/{kind}"
        outputs = [self.fresh(f"{name}_output{place}") for place in range(count)]
        self.append(helper.make_node(kind, inputs, outputs, name=name))
        return outputs

    def append(self, node: onnx.NodeProto) -> None:
        """Adds a finished node. If its results are small and known, they become initializers,
        unless the model returns them.
        """
        results = self._results(node)
        if results is None or self._given_out.intersection(node.output):
            self.nodes.append(node)
            self.types.update(self._inferred(node))
            return
        for name, array in zip(node.output, results, strict=True):
            if name:
                self.initializers.append(numpy_helper.from_array(array, name))
                self.know(self.initializers[-1])

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        if tuple(shape) == self.shape(x):
            return x
        return self.add("Reshape", x, self.integers(list(shape)))

    def transpose(self, x: str, order: Sequence[int]) -> str:
        return x if list(order) == sorted(order) else self.add("Transpose", x, perm=list(order))

    def slice(self, x: str, axis: int, start: int, stop: int) -> str:
        if (start, stop) == (0, self.shape(x)[axis]):
            return x
        if self.opset < 10:
            return self.add("Slice", x, starts=[start], ends=[stop], axes=[axis])
        return self.add("Slice", x, *(self.integers([v]) for v in (start, stop, axis)))

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.add("Clip", x, min=low, max=high)
        return self.add("Clip", x, *(self.constant(v, self.dtype(x)) for v in (low, high)))

    def split(self, x: str, sizes: Iterable[int], axis: int) -> list[str]:
        parts, start = [], 0
        for size in sizes:
            parts.append(self.slice(x, axis, start, start + size))
            start += size
        return parts

    def mean(self, x: str, axes: Sequence[int]) -> str:
        """The mean over ``axes``, which stay with size 1."""
        if self.opset < 18:
            return self.add("ReduceMean", x, axes=list(axes), keepdims=1)
        return self.add("ReduceMean", x, self.integers(list(axes)), keepdims=1)

    def sum(self, x: str, axes: Sequence[int]) -> str:
        """The sum over ``axes``, which stay with size 1."""
        if self.opset < 13:
            return self.add("ReduceSum", x, axes=list(axes), keepdims=1)
        return self.add("ReduceSum", x, self.integers(list(axes)), keepdims=1)

    def cast(self, x: str, dtype: int) -> str:
        return x if self.dtype(x) == dtype else self.add("Cast", x, to=dtype)

    def scaled(self, x: str, factor: float) -> str:
        return x if factor == 1.0 else self.add("Mul", x, self.constant(factor, self.dtype(x)))

    # -- inference -------------------------------------------------------------------------------

    def _results(self, node: onnx.NodeProto) -> list[numpy.ndarray] | None:
        """The values of all outputs if they follow from known values; else None."""
        if node.domain not in _STANDARD:
            return None
        if node.op_type == "Constant":
            value = _constant(node)
            return None if value is None else [value]
        if node.op_type in ("Shape", "Size"):
            return self._measured(node)
        known = [self.values.get(name) for name in node.input if name]
        if node.op_type not in _ARITHMETIC or not known or any(v is None for v in known):
            return None
        inferred = self._inferred(node)
        sizes = [prod(d.dim_value for d in t.tensor_type.shape.dim) for t in inferred.values()]
        if any(size > _SMALL for size in sizes):
            return None
        feeds = {name: self.values[name] for name in node.input if name}
        model = self._alone(node, list(feeds))
        try:
            found = ReferenceEvaluator(model).run(None, feeds)
        except Exception:  # a damaged model: the translation of the node says what is wrong
            return None
        results = iter(found)
        arrays = [numpy.asarray(next(results)) if name else numpy.empty(0) for name in node.output]
        return arrays if all(array.size <= _SMALL for array in arrays) else None

    def _measured(self, node: onnx.NodeProto) -> list[numpy.ndarray] | None:
        try:
            shape = self.shape(node.input[0])
        except Unsuitable:
            return None
        if node.op_type == "Size":
            return [numpy.asarray(prod(shape), numpy.int64)]
        ends = {a.name: a.i for a in node.attribute}
        return [numpy.asarray(shape[ends.get("start") : ends.get("end")], numpy.int64)]

    def _inferred(self, node: onnx.NodeProto) -> dict[str, TypeProto]:
        """The types of the node's outputs, as far as they can be inferred."""
        given = [name for name in node.input if name]
        if any(name not in self.types for name in given):
            return {}
        if (node.domain, node.op_type) in _ALIKE:
            alike = [name for i, name in enumerate(node.output) if name and i in (0, 3)]
            return {name: self.types[node.input[0]] for name in alike}
        if (node.domain, node.op_type) == (MICROSOFT, "GridSample"):
            try:
                x, grid = (self.shape(name) for name in given)
            except Unsuitable:
                return {}
            kind = helper.make_tensor_type_proto(self.dtype(given[0]), (*x[:2], *grid[1:-1]))
            return {node.output[0]: kind}
        if node.domain not in _STANDARD:
            return {}
        known = [name for name in given if name in self.values]
        tensors = [numpy_helper.from_array(self.values[name], name) for name in known]
        graph = onnx.shape_inference.infer_shapes(self._alone(node, given, tensors)).graph
        found = {value.name: value.type for value in graph.output}
        return {name: kind for name, kind in found.items() if kind.WhichOneof("value")}

    def _alone(
        self,
        node: onnx.NodeProto,
        inputs: Sequence[str],
        known: Sequence[onnx.TensorProto] = (),
    ) -> onnx.ModelProto:
        """A model of this node, for inference and evaluation."""
        graph = helper.make_graph(
            [node],
            "one_node",
            [helper.make_value_info(name, self.types[name]) for name in dict.fromkeys(inputs)],
            [helper.make_value_info(name, TypeProto()) for name in node.output if name],
            known,
        )
        return helper.make_model(graph, opset_imports=self._opsets, ir_version=self._ir)


def _constant(node: onnx.NodeProto) -> numpy.ndarray | None:
    """The value of a Constant node; None for strings and sparse tensors."""
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value" and value.data_type != onnx.TensorProto.STRING:
        return numpy_helper.to_array(value)
    dtypes = {"value_float": "float32", "value_int": "int64"}
    dtype = dtypes.get(attribute.name.removesuffix("s"))
    return None if dtype is None else numpy.asarray(value, dtype)


def _names(graph: onnx.GraphProto) -> set[str]:
    """Every tensor's name, in nested graphs too."""
    inside = {name for node in nodes(graph) for name in (*node.input, *node.output)}
    values = (*graph.input, *graph.output, *graph.initializer)
    return inside | {value.name for value in values}
