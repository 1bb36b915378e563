"""Rules for operators that TVM 0.27's ONNX importer lacks, refuses, or gets wrong without an error.

ONNX's own backend tests showed what to correct or refuse:

- LayerNormalization's second and third output, Pow of two types
- SplitToSequence by one size, MeanVarianceNormalization, LRN of an even size
- Elu, Selu and LRN of other types than float32
- Dropout's mask and training mode, IsInf's two flags, Constant's scalar forms
- BatchNormalization's new statistics, reductions over no axes
- ConvTranspose's ``output_shape``, SpaceToDepth's ``mode``, most of Resize
- tensors without elements

ONNX's tests are of the newest form of an operator. Of older ones: Slice before opset 10, TopK and
Resize of opset 10, Upsample. Models showed RoiAlign of boxes that are scaled.

Attention, Col2Im, ConvInteger and LpNormalization are gtco's own, and so are quantizing and
dequantizing in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from gtco.frontend.operators.arguments import (
    Attributes,
    Override,
    Refused,
    constant_of,
    outputs_of,
    padded,
)
from gtco.frontend.operators.attention import attention
from gtco.frontend.operators.col2im import col2im
from gtco.frontend.operators.cumsum import cumsum
from gtco.frontend.operators.generators import constant, eye_like, one_hot
from gtco.frontend.operators.linear_quantization import (
    conv_integer,
    dequantize_linear,
    matmul_integer,
    quantize_linear,
)
from gtco.frontend.operators.movement import (
    expand,
    gather_elements,
    pad,
    scatter,
    slice_,
    space_to_depth,
    tile,
    top_k,
    unsqueeze,
)
from gtco.frontend.operators.normalization import (
    batch_normalization,
    layer_normalization,
    local_response_normalization,
    lp_normalization,
    mean_variance_normalization,
    skip_layer_normalization,
)
from gtco.frontend.operators.pointwise import (
    celu,
    clip,
    combined,
    dropout,
    elu,
    is_inf,
    power,
    prelu,
    selu,
    thresholded_relu,
)
from gtco.frontend.operators.products import conv_transpose, einsum, gemm
from gtco.frontend.operators.reductions import RULES as REDUCTIONS
from gtco.frontend.operators.resize import resize, upsample
from gtco.frontend.operators.roi_align import roi_align
from gtco.frontend.operators.sequences import sequence_insert, split_to_sequence


def _attention(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    results = attention(builder, padded(inputs, 7), attrs)
    return results[0] if outputs_of(attrs) == 1 else relax.Tuple(list(results[: outputs_of(attrs)]))


def _col2im(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    image, block = (constant_of(t) for t in inputs[1:3])
    if image is None or block is None:
        raise Refused("its image_shape and block_shape are known only at run time")
    rank = len(image)
    return col2im(
        builder,
        inputs[0],
        [int(d) for d in image],
        [int(d) for d in block],
        [int(d) for d in attrs.get("strides", [1] * rank)],
        [int(d) for d in attrs.get("pads", [0] * (2 * rank))],
        [int(d) for d in attrs.get("dilations", [1] * rank)],
    )


OVERRIDES: dict[str, Override] = {
    "LayerNormalization": layer_normalization,
    "SkipLayerNormalization": skip_layer_normalization,
    "ConvInteger": conv_integer,
    "DequantizeLinear": dequantize_linear,
    "MatMulInteger": matmul_integer,
    "QuantizeLinear": quantize_linear,
    "Dropout": dropout,
    "BatchNormalization": batch_normalization,
    "IsInf": is_inf,
    "Constant": constant,
    "CumSum": cumsum,
    "ConvTranspose": conv_transpose,
    "Celu": celu,
    "Elu": elu,
    "Selu": selu,
    "Einsum": einsum,
    "Gemm": gemm,
    "LRN": local_response_normalization,
    "LpNormalization": lp_normalization,
    "MeanVarianceNormalization": mean_variance_normalization,
    "Pad": pad,
    "Tile": tile,
    "Clip": clip,
    "Expand": expand,
    "GatherElements": gather_elements,
    "Slice": slice_,
    "TopK": top_k,
    "ScatterND": scatter,
    "ScatterElements": scatter,
    "SpaceToDepth": space_to_depth,
    "Resize": resize,
    "RoiAlign": roi_align,
    "Attention": _attention,
    "Col2Im": _col2im,
    "Upsample": upsample,
    "Pow": power,
    "EyeLike": eye_like,
    "OneHot": one_hot,
    "PRelu": prelu,
    "SequenceInsert": sequence_insert,
    "SplitToSequence": split_to_sequence,
    "ThresholdedRelu": thresholded_relu,
    "Unsqueeze": unsqueeze,
    **REDUCTIONS,
    "Max": combined(relax.op.maximum),
    "Min": combined(relax.op.minimum),
    "Sum": combined(relax.op.add),
    "Mean": combined(relax.op.add, mean=True),
}
