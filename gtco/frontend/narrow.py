"""Integers of 4 and 2 bits become integers of 8 bits with the same values.

    before: y = DequantizeLinear(W {int4}, s, z {int4})
    after:  y = DequantizeLinear(W' {int8}, s, z' {int8})

    before: q = QuantizeLinear(x, s, z {uint4})
    after:  r = QuantizeLinear(x, s, z' {uint8}); q = Clip(r, 0, 15)

Tensors of the graph have no such types; weights of 4 bits are found again by their values
(``gtco.graph.byte_weights``). The model's inputs and outputs cannot have them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.node_check import DTYPES, Node
from gtco.support.errors import UnsupportedError
from gtco.support.later import Later, cast
from gtco.support.onnx_messages import inner_tensors, nodes, subgraphs

# The type of 8 bits for each narrow one, and the least and the largest number of the narrow one.
_NARROW: Mapping[int, tuple[int, int, int]] = {
    TensorProto.INT4: (TensorProto.INT8, -8, 7),
    TensorProto.UINT4: (TensorProto.UINT8, 0, 15),
    TensorProto.INT2: (TensorProto.INT8, -2, 1),
    TensorProto.UINT2: (TensorProto.UINT8, 0, 3),
}
_CLIP_OF_INTEGERS = 12  # the first opset in which Clip takes integers


Weights = Mapping[str, numpy.ndarray | Later]


def widen_integers(model: onnx.ModelProto, weights: Weights) -> tuple[onnx.ModelProto, Weights]:
    """The model and its weights, which are inputs of it, with 8 bits in place of 4 and 2; the same
    ones if they have no such integers.

    Raises :class:`UnsupportedError` for an output of such a type.
    """
    if not _any_narrow(model.graph, weights):
        return model, weights
    for value in model.graph.output:
        number = value.type.tensor_type.elem_type
        if number in _NARROW:
            raise UnsupportedError(
                f"output '{value.name}' has elements of type {DTYPES[number]}, which gtco does not "
                "return: let the model dequantize it, or cast it to int8"
            )
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    opset = next((o.version for o in wide.opset_import if o.domain in ("", "ai.onnx")), 1)
    found = {}
    for value in wide.graph.input:
        kind = value.type.tensor_type
        if value.name in weights and kind.elem_type in _NARROW:
            kind.elem_type = _NARROW[kind.elem_type][0]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            found[value.name] = cast(weights[value.name], dtype)
    _widen_graph(wide.graph, opset, {})
    return wide, {**weights, **found}


def _any_narrow(graph: onnx.GraphProto, weights: Weights) -> bool:
    tensors = [*graph.initializer, *inner_tensors(graph)]
    kept = [a.i for n in nodes(graph) for a in n.attribute if a.name == "output_dtype"]
    kept += [v.type.tensor_type.elem_type for v in graph.input if v.name in weights]
    return any(t.data_type in _NARROW for t in tensors) or any(k in _NARROW for k in kept)


def _widen_graph(graph: onnx.GraphProto, opset: int, outer: Mapping[str, int]) -> None:
    """Changes the graph and those nested in it. ``outer``: the narrow types of constants around
    it, by name.
    """
    known = dict(outer)
    for tensor in graph.initializer:
        _widen_tensor(tensor, known)
    written: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            for inner in subgraphs(attribute):
                _widen_graph(inner, opset, known)
            if attribute.HasField("t"):
                if attribute.t.data_type in _NARROW and node.op_type == "Constant":
                    known[node.output[0]] = attribute.t.data_type
                _widen_tensor(attribute.t, {})
        written.append(node)
        narrow = _quantizes_to(node, known)
        if narrow in _NARROW:
            written += _clipped(graph, node, narrow, opset)
    nodes_now = [onnx.NodeProto.FromString(n.SerializeToString()) for n in written]
    del graph.node[:]
    graph.node.extend(nodes_now)
    for value in graph.value_info:
        kind = value.type.tensor_type
        if kind.elem_type in _NARROW:
            kind.elem_type = _NARROW[kind.elem_type][0]


def _widen_tensor(tensor: onnx.TensorProto, known: dict[str, int]) -> None:
    if tensor.data_type not in _NARROW:
        return
    known[tensor.name] = tensor.data_type
    dtype = helper.tensor_dtype_to_np_dtype(_NARROW[tensor.data_type][0])
    array = numpy.asarray(numpy_helper.to_array(tensor)).astype(dtype)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _quantizes_to(node: onnx.NodeProto, known: Mapping[str, int]) -> int:
    """The type to which a QuantizeLinear quantizes, in ONNX's numbers; 0 for other nodes."""
    if node.op_type != "QuantizeLinear":
        return 0
    if len(node.input) > 2 and node.input[2]:
        return known.get(node.input[2], 0)
    return next((a.i for a in node.attribute if a.name == "output_dtype"), 0)


def _clipped(
    graph: onnx.GraphProto, node: onnx.NodeProto, narrow: int, opset: int
) -> list[onnx.NodeProto]:
    """Makes the node quantize to 8 bits; the Clip to the narrow type's numbers that follows it."""
    if opset < _CLIP_OF_INTEGERS:
        raise Node(node).refused(
            f"it quantizes to {DTYPES[narrow]} in a file of opset {opset}: export with opset "
            f"{_CLIP_OF_INTEGERS} or newer"
        )
    wide, least, most = _NARROW[narrow]
    for attribute in node.attribute:
        if attribute.name == "output_dtype" and attribute.i:
            attribute.i = wide
    name = node.output[0]
    node.output[0] = f"{name}/wide"
    bounds = [f"{name}/least", f"{name}/most"]
    dtype = helper.tensor_dtype_to_np_dtype(wide)
    for bound, value in zip(bounds, (least, most), strict=True):
        graph.initializer.append(numpy_helper.from_array(numpy.array(value, dtype), bound))
    label = node.name or name
    return [helper.make_node("Clip", [node.output[0], *bounds], [name], name=f"{label}/Clip")]
