"""Messages about quantized models: gtco has no kernels for int8.

QuantizeLinear and DequantizeLinear are compiled as element-wise operators around products in
float32. The operators into which ONNX Runtime fuses them are not supported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx

from gtco.frontend.messages import nodes

_COMPILED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger")
_FUSED = frozenset(
    """ConvInteger ConvTransposeWithDynamicQuantization DynamicQuantizeLSTM DynamicQuantizeMatMul
    GatherBlockQuantized MatMulBnb4 MatMulInteger16 MatMulIntegerToFloat MatMulNBits QAttention
    QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv
    QLinearGlobalAveragePool QLinearLeakyRelu QLinearMatMul QLinearMul QLinearReduceMean
    QLinearSigmoid QLinearSoftmax QLinearWhere QMoE QOrderedAttention QOrderedGelu
    QOrderedLayerNormalization QOrderedMatMul""".split()
)


def note(model: onnx.ModelProto) -> str:
    """A note for the user of a quantized model; "" for any other model."""
    counts = Counter(n.op_type for n in nodes(model.graph) if n.op_type in _COMPILED)
    if not counts:
        return ""
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return (
        f"the model is quantized ({listed}), and gtco has no int8 kernels: the library gives the "
        "quantized model's results, in about the time of the float32 model that it was made from"
    )


def advice(operators: Collection[str]) -> str:
    """Advice about unsupported operators, if some of them are of quantized models."""
    found = sorted(operator for operator in operators if operator.rpartition("::")[2] in _FUSED)
    if not found:
        return ""
    return (
        f"{', '.join(found)} {'are' if len(found) > 1 else 'is'} of a quantized model, and gtco "
        "has no int8 kernels: compile the float32 model that it was made from (--precision bf16 is "
        "faster where the CPU multiplies bfloat16), or quantize it in the QDQ format, which is "
        "compiled, and about as fast as float32"
    )
