"""Turns float16 and bfloat16 files into float32 ones: operators are computed in float32, and the
narrow types are for storage.

    before: x {float16}    y = MatMul(x, W)    z = Relu(y)
    after:  x {float16}    a = Cast(x)    b = MatMul(a, W')    c = Relu(b)    z = Cast(c) {float16}

The model's inputs and outputs keep their types. Everything between them is float32. Constants keep
their values, which float32 holds exactly. A Cast to float16 inside the model becomes a Cast to
float32, which does nothing: values are rounded only at the model's outputs. So no intermediate
value overflows, and each is at least as exact as the file asks for.

The ONNX message is changed before its operators are read, so this holds for every operator, also
for those that only TVM compiles, and for those that ONNX does not define for bfloat16: Conv before
opset 22, which is what PyTorch's exporter writes for modules in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from itertools import chain

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

from gtco.support.later import Later, cast
from gtco.support.onnx_messages import inner_tensors, nodes, subgraphs

Weights = Mapping[str, numpy.ndarray | Later]

# Attributes that hold a type's number: of Cast, of operators that make tensors (EyeLike,
# HannWindow, DequantizeLinear), of Attention's softmax.
_TYPES = frozenset("to dtype output_datatype output_dtype softmax_precision".split())


def widen(
    model: onnx.ModelProto,
    weights: Weights,
    narrow: int = TensorProto.FLOAT16,
) -> tuple[onnx.ModelProto, Weights, bool]:
    """The model and its weights with float32 in place of ``narrow``, one of ONNX's types, and
    whether there was any of it. Weights are widened when they are read.

    ``weights`` are values of inputs of the graph, by name. The model has no local functions.
    """
    if not _any_narrow(model.graph, weights, narrow):
        return model, weights, False
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    constants = {tensor.name for tensor in graph.initializer} | set(weights)
    given = [v.name for v in graph.input if _type(v) == narrow and v.name not in constants]
    results = [v.name for v in graph.output if _type(v) == narrow and v.name not in given]
    _widen_graph(graph, narrow)
    taken = _names(graph)
    inside = {name: _fresh(name, taken) for name in (*given, *results)}
    for node in nodes(graph):
        _rename(node.input, inside)
        _rename(node.output, inside)
        for attribute in node.attribute:
            for branch in subgraphs(attribute):
                _rename_values(branch.output, inside)
    for tensor in graph.initializer:
        tensor.name = inside.get(tensor.name, tensor.name)
    _rename_values((v for v in graph.input if v.name in weights), inside)
    for value in chain(graph.input, graph.output):
        if value.name in given or value.name in results:
            value.type.tensor_type.elem_type = narrow
    body = list(graph.node)
    del graph.node[:]
    graph.node.extend(_cast(name, inside[name], TensorProto.FLOAT) for name in given)
    graph.node.extend(body)
    graph.node.extend(_cast(inside[name], name, narrow) for name in results)
    floats = {
        inside.get(n, n): cast(array, numpy.float32) if array.dtype == _numpy(narrow) else array
        for n, array in weights.items()
    }
    return wide, floats, True


def _any_narrow(
    graph: onnx.GraphProto, weights: Weights, narrow: int
) -> bool:
    tensors = chain(graph.initializer, inner_tensors(graph))
    types = (a.i for n in nodes(graph) for a in n.attribute if a.name in _TYPES)
    return (
        any(array.dtype == _numpy(narrow) for array in weights.values())
        or any(_type(value) == narrow for value in graph.input)
        or any(tensor.data_type == narrow for tensor in tensors)
        or narrow in types
    )


def _type(value: onnx.ValueInfoProto) -> int:
    return int(value.type.tensor_type.elem_type)


def _numpy(narrow: int) -> numpy.dtype:
    return numpy.dtype(helper.tensor_dtype_to_np_dtype(narrow))


def _widened(array: numpy.ndarray, narrow: int) -> numpy.ndarray:
    return array.astype(numpy.float32) if array.dtype == _numpy(narrow) else array


def _widen_graph(graph: onnx.GraphProto, narrow: int) -> None:
    """Puts float32 for ``narrow`` in every tensor, type and attribute, also in nested graphs."""
    for tensor in chain(graph.initializer, inner_tensors(graph)):
        if tensor.data_type == narrow:
            array = _widened(numpy_helper.to_array(tensor), narrow)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for each in _graphs(graph):
        for value in chain(each.input, each.output, each.value_info):
            _widen_type(value.type, narrow)
    for node in nodes(graph):
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i == narrow:
                attribute.i = TensorProto.FLOAT


def _widen_type(kind: onnx.TypeProto, narrow: int) -> None:
    match kind.WhichOneof("value"):
        case "tensor_type":
            if kind.tensor_type.elem_type == narrow:
                kind.tensor_type.elem_type = TensorProto.FLOAT
        case "sequence_type":
            _widen_type(kind.sequence_type.elem_type, narrow)
        case "optional_type":
            _widen_type(kind.optional_type.elem_type, narrow)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those nested in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in subgraphs(attribute):
                yield from _graphs(inner)


def _names(graph: onnx.GraphProto) -> set[str]:
    return {
        name
        for each in _graphs(graph)
        for name in chain(
            (v.name for v in chain(each.input, each.output, each.initializer)),
            *(chain(node.input, node.output) for node in each.node),
        )
    }


def _fresh(name: str, taken: set[str]) -> str:
    """A new name for the float32 value of a tensor. It is added to ``taken``."""
    made = f"{name}_float32"
    while made in taken:
        made += "_"
    taken.add(made)
    return made


def _rename(names: MutableSequence[str], new: Mapping[str, str]) -> None:
    for i, name in enumerate(names):
        if name in new:
            names[i] = new[name]


def _rename_values(values: Iterable[onnx.ValueInfoProto], new: Mapping[str, str]) -> None:
    for value in values:
        value.name = new.get(value.name, value.name)


def _cast(source: str, result: str, dtype: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [result], name=f"Cast_{result}", to=dtype)
