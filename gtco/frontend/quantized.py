"""Messages about quantized models.

Products by quantized weights are products of integers on CPUs with VNNI and, on AArch64, with
DotProd (:mod:`gtco.graph.rewrites.quantized.integer_products`). QuantizeLinear and DequantizeLinear
are element-wise operators around them. The operators into which ONNX Runtime fuses them are written
out (:mod:`gtco.frontend.expansion.quantized_products` and its kin), except for those listed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx

from gtco.support.onnx_messages import nodes

_COMPILED = frozenset(
    """ConvInteger DequantizeLinear DynamicQuantizeLinear DynamicQuantizeMatMul
    GatherBlockQuantized MatMulInteger MatMulIntegerToFloat MatMulNBits QAttention QGemm QLinearAdd
    QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu
    QLinearMatMul QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere
    QuantizeLinear""".split()
)
# In a model of nothing but these, no activation is quantized.
_WEIGHTS_ALONE = frozenset(["DequantizeLinear", "GatherBlockQuantized", "MatMulNBits"])
_REFUSED = frozenset(
    """ConvTransposeWithDynamicQuantization DynamicQuantizeLSTM MatMulBnb4 MatMulInteger16
    QEmbedLayerNormalization QMoE QOrderedAttention QOrderedGelu QOrderedLayerNormalization
    QOrderedLongformerAttention QOrderedMatMul""".split()
)


def is_quantized(model: onnx.ModelProto) -> bool:
    """True if the model has an operator that quantizes, dequantizes or multiplies integers."""
    return any(node.op_type in _COMPILED | _REFUSED for node in nodes(model.graph))


def note(model: onnx.ModelProto) -> str:
    """A note for the user of a quantized model; "" for any other model."""
    counts = Counter(n.op_type for n in nodes(model.graph) if n.op_type in _COMPILED)
    if not counts:
        return ""
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    if counts.keys() <= _WEIGHTS_ALONE:
        return (
            f"the weights of the model are quantized ({listed}): CPUs keep them in 8 or 4 bits "
            "where they are multiplied, and everything is computed in float32"
        )
    return (
        f"the model is quantized ({listed}): products by quantized weights are computed in int8 if "
        "the target has VNNI (AVX512-VNNI or AVX-VNNI) or Arm's DotProd, quantized products of "
        "attention in bfloat16, exactly, if the target multiplies it, and everything else in "
        "float32"
    )


def advice(operators: Collection[str]) -> str:
    """Advice about unsupported operators, if some of them are of quantized models."""
    found = sorted(operator for operator in operators if operator.rpartition("::")[2] in _REFUSED)
    if not found:
        return ""
    return (
        f"{', '.join(found)} {'are' if len(found) > 1 else 'is'} of a quantized model in a format "
        "that gtco does not read: quantize the float32 model that it was made from in the QDQ "
        "format (QuantizeLinear and DequantizeLinear around its operators), or compile that model"
    )
