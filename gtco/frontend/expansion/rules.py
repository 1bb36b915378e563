"""The table of rules: which one writes out which operator, by domain and name."""

from __future__ import annotations

from collections.abc import Mapping

from gtco.frontend.expansion.attention import (
    attention,
    multi_head_attention,
    quantized_attention,
    rotary_embedding,
)
from gtco.frontend.expansion.control_flow import branch, loop, scan
from gtco.frontend.expansion.deform_conv import deform_conv
from gtco.frontend.expansion.fourier import dft, stft
from gtco.frontend.expansion.norms import (
    embed_layer_norm,
    group_norm,
    layer_norm,
    simplified_layer_norm,
    skip_group_norm,
    skip_simplified_layer_norm,
)
from gtco.frontend.expansion.packed_attention import packed_attention, packed_multi_head_attention
from gtco.frontend.expansion.packed_weights import gather_block_quantized, matmul_nbits
from gtco.frontend.expansion.pointwise import (
    bias_add,
    bias_dropout,
    bias_softmax,
    bias_split_gelu,
    quick_gelu,
)
from gtco.frontend.expansion.products import (
    fused_conv,
    fused_gemm,
    fused_matmul,
    gemm_fast_gelu,
    nhwc_conv,
    nhwc_fused_conv,
    nhwc_max_pool,
)
from gtco.frontend.expansion.quantized_pointwise import (
    dequantize_linear,
    dynamic_quantize_linear,
    qlinear_add,
    qlinear_average_pool,
    qlinear_concat,
    qlinear_global_average_pool,
    qlinear_leaky_relu,
    qlinear_mul,
    qlinear_reduce_mean,
    qlinear_sigmoid,
    qlinear_softmax,
    qlinear_where,
    quantize_linear,
)
from gtco.frontend.expansion.quantized_products import (
    dynamic_quantize_matmul,
    matmul_integer_to_float,
    qgemm,
    qlinear_conv,
    qlinear_matmul,
)
from gtco.frontend.expansion.recurrent import recurrent
from gtco.frontend.expansion.reversal import reverse_sequence
from gtco.frontend.expansion.walk import Key, Rule
from gtco.frontend.expansion.writer import MICROSOFT

RULES: Mapping[Key, Rule] = {
    ("", "If"): branch,
    ("", "Loop"): loop,
    ("", "Scan"): scan,
    ("", "DFT"): dft,
    ("", "STFT"): stft,
    ("", "DeformConv"): deform_conv,
    ("", "DynamicQuantizeLinear"): dynamic_quantize_linear,
    ("", "LSTM"): recurrent,
    ("", "GRU"): recurrent,
    ("", "RNN"): recurrent,
    ("", "ReverseSequence"): reverse_sequence,
    ("", "QLinearConv"): qlinear_conv,
    ("", "QLinearMatMul"): qlinear_matmul,
    (MICROSOFT, "Attention"): attention,
    (MICROSOFT, "BiasAdd"): bias_add,
    (MICROSOFT, "BiasDropout"): bias_dropout,
    (MICROSOFT, "BiasSoftmax"): bias_softmax,
    (MICROSOFT, "BiasSplitGelu"): bias_split_gelu,
    (MICROSOFT, "DequantizeLinear"): dequantize_linear,
    (MICROSOFT, "DynamicQuantizeMatMul"): dynamic_quantize_matmul,
    (MICROSOFT, "EmbedLayerNormalization"): embed_layer_norm,
    (MICROSOFT, "FusedConv"): fused_conv,
    (MICROSOFT, "FusedGemm"): fused_gemm,
    (MICROSOFT, "FusedMatMul"): fused_matmul,
    (MICROSOFT, "FusedMatMulActivation"): fused_matmul,
    (MICROSOFT, "GatherBlockQuantized"): gather_block_quantized,
    (MICROSOFT, "GemmFastGelu"): gemm_fast_gelu,
    (MICROSOFT, "GroupNorm"): group_norm,
    (MICROSOFT, "LayerNormalization"): layer_norm,
    (MICROSOFT, "MatMulIntegerToFloat"): matmul_integer_to_float,
    (MICROSOFT, "MatMulNBits"): matmul_nbits,
    (MICROSOFT, "MultiHeadAttention"): multi_head_attention,
    (MICROSOFT, "NhwcConv"): nhwc_conv,
    (MICROSOFT, "NhwcFusedConv"): nhwc_fused_conv,
    (MICROSOFT, "NhwcMaxPool"): nhwc_max_pool,
    (MICROSOFT, "PackedAttention"): packed_attention,
    (MICROSOFT, "PackedMultiHeadAttention"): packed_multi_head_attention,
    (MICROSOFT, "QAttention"): quantized_attention,
    (MICROSOFT, "QGemm"): qgemm,
    (MICROSOFT, "QLinearAdd"): qlinear_add,
    (MICROSOFT, "QLinearAveragePool"): qlinear_average_pool,
    (MICROSOFT, "QLinearConcat"): qlinear_concat,
    (MICROSOFT, "QLinearConv"): qlinear_conv,
    (MICROSOFT, "QLinearGlobalAveragePool"): qlinear_global_average_pool,
    (MICROSOFT, "QLinearLeakyRelu"): qlinear_leaky_relu,
    (MICROSOFT, "QLinearMul"): qlinear_mul,
    (MICROSOFT, "QLinearReduceMean"): qlinear_reduce_mean,
    (MICROSOFT, "QLinearSigmoid"): qlinear_sigmoid,
    (MICROSOFT, "QLinearSoftmax"): qlinear_softmax,
    (MICROSOFT, "QLinearWhere"): qlinear_where,
    (MICROSOFT, "QuantizeLinear"): quantize_linear,
    (MICROSOFT, "QuickGelu"): quick_gelu,
    (MICROSOFT, "RotaryEmbedding"): rotary_embedding,
    (MICROSOFT, "SimplifiedLayerNormalization"): simplified_layer_norm,
    (MICROSOFT, "SkipGroupNorm"): skip_group_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): skip_simplified_layer_norm,
    (MICROSOFT, "TransposeMatMul"): fused_matmul,
}
