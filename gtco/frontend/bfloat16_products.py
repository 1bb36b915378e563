"""Which products a file computes in bfloat16. Its types are gone once it is widened to float32."""

from __future__ import annotations

from itertools import chain

import onnx
from onnx import TensorProto

from gtco.support.onnx_messages import nodes

_PRODUCTS = frozenset("MatMul Gemm Conv ConvTranspose Einsum Attention".split())
NOTE = (
    "some products of the file are of bfloat16 and some of wider types, so all are computed in "
    "float32; --precision bf16 rounds the operands of all of them"
)


def all_in_bfloat16(model: onnx.ModelProto) -> tuple[bool, list[str]]:
    """Whether the file has products, and all of them are of bfloat16; a note if only some are. A
    product in a nested graph, or of an operand whose type is not known, counts as a wider one.
    """
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = chain(graph.input, graph.output, graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = {
        types.get(node.input[0]) == TensorProto.BFLOAT16
        for node in nodes(model.graph)
        if node.op_type in _PRODUCTS
    }
    return found == {True}, [NOTE] if len(found) == 2 else []
