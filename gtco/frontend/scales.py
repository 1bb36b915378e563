"""Checks the constant scales of quantized operators.

A scale of 0 divides by 0, and a NaN spreads over the model; both come from a calibration that went
wrong. Engines make different results of them, so they are errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy
import onnx
from onnx import numpy_helper

from gtco.frontend.node_check import Node
from gtco.support.errors import ModelError
from gtco.support.later import Later, read
from gtco.support.onnx_messages import nodes, subgraphs

# The positions of the scales among the inputs, by operator.
_SCALES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (1,)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QLinearAdd", "QLinearMul"), (1, 4, 6)),
    **dict.fromkeys(
        """QLinearAveragePool QLinearGlobalAveragePool QLinearLeakyRelu QLinearReduceMean
        QLinearSigmoid QLinearSoftmax""".split(),
        (1, 3),
    ),
    **dict.fromkeys(("DynamicQuantizeMatMul", "GatherBlockQuantized"), (2,)),
    "MatMulIntegerToFloat": (2, 3),
    "MatMulNBits": (2,),
    "QAttention": (3, 4),
    "QGemm": (1, 4, 7),
    "QLinearWhere": (2, 5, 7),
}


def check_scales(model: onnx.ModelProto, weights: Mapping[str, numpy.ndarray | Later]) -> None:
    """Raises :class:`ModelError`, which names the node, for a constant scale that is not a positive
    number. ``weights``: values of inputs of the graph, by name.

    Scales of blocks may be 0 or negative: quantizers of weights write both, 0 for a block of
    zeros and a negative one to reach the larger end of the range.
    """
    known = {**_constants(model.graph), **weights}
    for node in nodes(model.graph):
        blocks = node.op_type in ("MatMulNBits", "GatherBlockQuantized") or (
            node.op_type == "DequantizeLinear"
            and any(a.name == "block_size" and a.i for a in node.attribute)
        )
        for place in _places(node):
            name = node.input[place] if place < len(node.input) else ""
            if name in known:
                _check(node, name, read(known[name]), blocks)


def _places(node: onnx.NodeProto) -> Sequence[int]:
    if node.op_type == "QLinearConcat":
        return (0, *range(3, len(node.input), 3))
    return _SCALES.get(node.op_type, ())


def _check(node: onnx.NodeProto, name: str, value: numpy.ndarray, blocks: bool) -> None:
    if value.dtype.kind not in "fV":  # the check of types names it
        return
    numbers = value.astype(numpy.float64).reshape(-1)
    wrong = ~numpy.isfinite(numbers) if blocks else ~(numpy.isfinite(numbers) & (numbers > 0))
    if not wrong.any():
        return
    first = int(wrong.argmax())
    where = f" at place {first}" if numbers.size > 1 else ""
    wanted = "finite" if blocks else "positive and finite"
    raise ModelError(
        f"{Node(node)}: its scale '{name}' is {numbers[first]:g}{where}, and scales have to be "
        f"{wanted}. Quantize the model again, with samples in which this tensor is not constant"
    )


def _constants(graph: onnx.GraphProto) -> dict[str, numpy.ndarray]:
    """The values of float constants by name, also of nested graphs."""
    found = {}
    for tensor in _tensors(graph):
        if tensor.data_type in (
            onnx.TensorProto.FLOAT,
            onnx.TensorProto.FLOAT16,
            onnx.TensorProto.BFLOAT16,
            onnx.TensorProto.DOUBLE,
        ):
            found[tensor.name] = numpy_helper.to_array(tensor)
    return found


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                named = onnx.TensorProto()
                named.CopyFrom(attribute.t)
                named.name = node.output[0]
                yield named
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                values = [attribute.f] if attribute.name == "value_float" else attribute.floats
                yield numpy_helper.from_array(numpy.array(values, "float32"), node.output[0])
            for inner in subgraphs(attribute):
                yield from _tensors(inner)
