"""The node tests that are known to fail, with the reason and the message that gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpectedFailure:
    """``message``: a regular expression found in the failure of each of ``tests``."""

    reason: str
    message: str
    tests: frozenset[str]


def _row(reason: str, message: str, tests: str) -> ExpectedFailure:
    return ExpectedFailure(reason, message, frozenset(f"test_{name}" for name in tests.split()))


EXPECTED_FAILURES = (
    _row(
        "tensors without elements are refused as inputs",
        r"is empty: axis",
        """
        reduce_l1_empty_set reduce_l1_empty_set_expanded reduce_l2_empty_set
        reduce_l2_empty_set_expanded reduce_max_empty_set reduce_max_empty_set_bool
        reduce_min_empty_set reduce_prod_empty_set reduce_sum_empty_set
        reduce_sum_empty_set_non_reduced_axis_zero reduce_sum_square_empty_set
        reduce_sum_square_empty_set_expanded reshape_allowzero_reordered
        split_zero_size_splits_opset13 split_zero_size_splits_opset18 tril_zero triu_zero
        """,
    ),
    _row(
        "element types of 8 bits and fewer that are not integers; results of int4 and int2",
        r"dtype (float\d|u?int[24])|elements of type (float\d|u?int[24])",
        """
        cast_FLOAT16_to_FLOAT4E2M1 cast_FLOAT16_to_FLOAT8E4M3FN cast_FLOAT16_to_FLOAT8E4M3FNUZ
        cast_FLOAT16_to_FLOAT8E5M2 cast_FLOAT16_to_FLOAT8E5M2FNUZ cast_FLOAT16_to_INT2
        cast_FLOAT16_to_INT4 cast_FLOAT16_to_UINT2 cast_FLOAT16_to_UINT4 cast_FLOAT4E2M1_to_FLOAT
        cast_FLOAT4E2M1_to_FLOAT16 cast_FLOAT8E4M3FNUZ_to_FLOAT cast_FLOAT8E4M3FNUZ_to_FLOAT16
        cast_FLOAT8E4M3FN_to_FLOAT cast_FLOAT8E4M3FN_to_FLOAT16 cast_FLOAT8E5M2FNUZ_to_FLOAT
        cast_FLOAT8E5M2FNUZ_to_FLOAT16 cast_FLOAT8E5M2_to_FLOAT cast_FLOAT8E5M2_to_FLOAT16
        cast_FLOAT_to_FLOAT4E2M1 cast_FLOAT_to_FLOAT8E4M3FN cast_FLOAT_to_FLOAT8E4M3FNUZ
        cast_FLOAT_to_FLOAT8E5M2 cast_FLOAT_to_FLOAT8E5M2FNUZ cast_FLOAT_to_INT2 cast_FLOAT_to_INT4
        cast_FLOAT_to_UINT2 cast_FLOAT_to_UINT4 cast_e8m0_FLOAT16_to_FLOAT8E8M0
        cast_e8m0_FLOAT8E8M0_to_FLOAT cast_e8m0_FLOAT8E8M0_to_FLOAT16 cast_e8m0_FLOAT_to_FLOAT8E8M0
        cast_no_saturate_FLOAT16_to_FLOAT8E4M3FN cast_no_saturate_FLOAT16_to_FLOAT8E4M3FNUZ
        cast_no_saturate_FLOAT16_to_FLOAT8E5M2 cast_no_saturate_FLOAT16_to_FLOAT8E5M2FNUZ
        cast_no_saturate_FLOAT_to_FLOAT8E4M3FN cast_no_saturate_FLOAT_to_FLOAT8E4M3FNUZ
        cast_no_saturate_FLOAT_to_FLOAT8E5M2 cast_no_saturate_FLOAT_to_FLOAT8E5M2FNUZ
        dequantizelinear_e4m3fn dequantizelinear_e4m3fn_float16 dequantizelinear_e4m3fn_zero_point
        dequantizelinear_e5m2 dequantizelinear_float4e2m1 quantizelinear_e4m3fn quantizelinear_e5m2
        quantizelinear_float4e2m1 quantizelinear_int2 quantizelinear_int4 quantizelinear_uint2
        quantizelinear_uint4
        """,
    ),
    _row(
        "strings",
        r"elements of type string",
        """
        equal_string equal_string_broadcast
        """,
    ),
    _row(
        "training mode",
        r"training",
        """
        batchnorm_epsilon_training_mode batchnorm_example_training_mode training_dropout
        training_dropout_default training_dropout_default_mask training_dropout_mask
        training_dropout_zero_ratio training_dropout_zero_ratio_mask
        """,
    ),
    _row(
        "loops whose count is an input",
        r"\(Loop\): how often it runs is known only when the model runs",
        """
        range_bfloat16_type_positive_delta_expanded range_float16_type_positive_delta_expanded
        range_float_type_positive_delta_expanded range_int32_type_negative_delta_expanded
        """,
    ),
    _row(
        "Scan of opset 8",
        r"Scan before opset 9",
        """
        scan_sum
        """,
    ),
    _row(
        "zeros held to 1e-7 that are sums of ten numbers of up to 90 in float32",
        r"output 0 is wrong by \d\.\d+e-06",
        """
        dft_inverse dft_inverse_opset19
        """,
    ),
    _row(
        "TVM's importer: the second output of MaxPool",
        r"not all of its 2 outputs are supported",
        """
        maxpool_with_argmax_2d_precomputed_pads maxpool_with_argmax_2d_precomputed_strides
        """,
    ),
    _row(
        "sequences and optional values",
        r"is not a tensor",
        """
        identity_opt identity_sequence if_opt if_seq loop13_seq loop16_seq_none
        """,
    ),
)
