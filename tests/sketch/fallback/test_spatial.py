"""The fallback on contractions, pools and resizing, against numpy. The tolerance is that of
:mod:`tests.sketch.fallback.test_fallback`.
"""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tensor.sketch.fallback import cpu as fallback
from tests.kernels import fresh_seed, random_inputs
from tests.sketch.fallback.test_fallback import T, case, check, check_each, single


# contractions -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ((3, 5), (5, 7), (3, 7)),
        ((2, 1, 3, 5), (4, 5, 7), (2, 4, 3, 7)),
        ((1, 1), (1, 1), (1, 1)),
        ((6, 2, 4), (4, 3), (6, 2, 3)),
    ],
)
def test_matmul(a: tuple, b: tuple, c: tuple) -> None:
    for dtype in ("float32", "int64"):
        check(single("matmul", [T(a, dtype), T(b, dtype)], T(c, dtype)))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "kernel", "strides", "padding", "dilation"),
    [
        (6, 8, 1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (6, 8, 2, (3, 2), (2, 1), (1, 0, 2, 1), (1, 1)),
        (5, 5, 5, (3, 3), (1, 2), (2, 2, 2, 2), (2, 2)),
        (4, 8, 4, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    ],
)
def test_conv2d(
    channels: int,
    outputs: int,
    groups: int,
    kernel: tuple,
    strides: tuple,
    padding: tuple,
    dilation: tuple,
    layout: str,
) -> None:
    h, w = 9, 8
    top, left, bottom, right = padding
    oh = (h + top + bottom - (kernel[0] - 1) * dilation[0] - 1) // strides[0] + 1
    ow = (w + left + right - (kernel[1] - 1) * dilation[1] - 1) // strides[1] + 1
    x, y = (
        ((2, channels, h, w), (2, outputs, oh, ow))
        if layout == "NCHW"
        else ((2, h, w, channels), (2, oh, ow, outputs))
    )
    check(
        single(
            "conv2d",
            [T(x), T((outputs, channels // groups, *kernel))],
            T(y),
            strides=strides,
            padding=padding,
            dilation=dilation,
            groups=groups,
            layout=layout,
        )
    )


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "more"),
    [
        ((3, 2), (2, 1), (1, 0, 0, 1), (1, 0)),
        ((3, 4), (2, 3), (1, 0, 0, 1), (0, 3)),  # as large as a stride: gtco adds whole strides
        ((1, 2), (1, 1), (0, 1, 0, 2), (2, 5)),  # larger than the part cut off
        ((2, 2), (3, 2), (3, 2, 2, 4), (0, 0)),  # the part cut off is larger than a kernel
    ],
)
def test_conv_transpose2d(
    kernel: tuple, strides: tuple, padding: tuple, more: tuple, layout: str
) -> None:
    size = (4, 5)
    ends = [padding[a] + padding[a + 2] for a in (0, 1)]
    oh, ow = (
        (n - 1) * s + k - p + m
        for n, s, k, p, m in zip(size, strides, kernel, ends, more, strict=True)
    )
    x, y = ((2, 6, *size), (2, 4, oh, ow)) if layout == "NCHW" else ((2, *size, 6), (2, oh, ow, 4))
    attrs = {"strides": strides, "padding": padding, "output_padding": more, "groups": 2}
    types = [T(x), T((6, 2, *kernel))]
    check(single("conv_transpose2d", types, T(y), layout=layout, **attrs))


def test_steps_of_one_kernel_see_what_the_steps_before_stored() -> None:
    """Steps hand tensors on in scratch. LLVM may not take their pointers for those of different
    memory: it loaded before the store, so a run read what the run before had left there.
    """
    types = [T((2, 1, 1, 16)), T((16, 2, 1, 7))]
    attrs = {"strides": (1, 2), "padding": (0, 1, 0, 3), "output_padding": (0, 0), "groups": 2}
    check(single("conv_transpose2d", types, T((2, 1, 3, 4)), layout="NHWC", **attrs))


@pytest.mark.parametrize("bias", [None, (1, 2, 7, 5), (5,), (7, 1)])
def test_attention(bias: tuple[int, ...] | None) -> None:
    types = [T((3, 2, 7, 6)), T((3, 2, 5, 6)), T((3, 2, 5, 4))] + ([T(bias)] if bias else [])
    check(single("attention", types, T((3, 2, 7, 4)), scale=0.4))


def test_attention_rank_two() -> None:
    check(single("attention", [T((7, 6)), T((5, 6)), T((5, 4))], T((7, 4)), scale=0.4))


# images -------------------------------------------------------------------------------------------
POOLS = [
    ((7, 9), (4, 5), (3, 3), (2, 2), (1, 1, 1, 1)),
    ((8, 8), (4, 4), (2, 2), (2, 2), (0, 0, 0, 0)),
    ((7, 6), (4, 3), (2, 2), (2, 2), (0, 0, 0, 0)),  # ceil mode: the last row of windows hangs over
    ((5, 4), (5, 5), (2, 3), (1, 1), (0, 2, 1, 1)),
    ((6, 5), (1, 1), (6, 5), (1, 1), (0, 0, 0, 0)),
]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("size", "out", "kernel", "strides", "padding"), POOLS)
def test_pools(
    size: tuple, out: tuple, kernel: tuple, strides: tuple, padding: tuple, layout: str
) -> None:
    x, y = ((2, 3, *size), (2, 3, *out)) if layout == "NCHW" else ((2, *size, 3), (2, *out, 3))
    attrs = {"kernel": kernel, "strides": strides, "padding": padding, "layout": layout}
    stages = [
        single("max_pool2d", [T(x, dtype)], T(y, dtype), dilation=(1, 1), **attrs)
        for dtype in ("float32", "int64")
    ]
    stages += [
        single("avg_pool2d", [T(x)], T(y), count_include_pad=include, **attrs)
        for include in (False, True)
    ]
    check_each([case(stage) for stage in stages])


def test_dilated_pool_and_nan() -> None:
    attrs = {
        "kernel": (2, 2),
        "strides": (1, 1),
        "padding": (1, 1, 1, 1),
        "dilation": (2, 3),
        "layout": "NCHW",
    }
    stage = single("max_pool2d", [T((1, 2, 6, 6))], T((1, 2, 6, 5)), **attrs)
    x = random_inputs(stage, fresh_seed())[0]
    x[0, 0, 2, 2], x[0, 1] = np.nan, -np.inf
    check(stage, x)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    "coordinates", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
)
@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
def test_resize(method: str, coordinates: str, layout: str) -> None:
    cases = []
    for (h, w), (oh, ow) in (
        ((7, 9), (14, 23)),
        ((5, 6), (1, 4)),
        ((3, 7), (7, 3)),
        ((1, 4), (4, 4)),
    ):
        x, y = (
            ((2, 3, h, w), (2, 3, oh, ow)) if layout == "NCHW" else ((2, h, w, 3), (2, oh, ow, 3))
        )
        for rounding in (
            ("floor", "ceil", "round", "round_prefer_ceil") if method == "nearest" else ("round",)
        ):
            stage = single(
                "resize2d",
                [T(x)],
                T(y),
                method=method,
                coordinates=coordinates,
                rounding=rounding,
                cubic_alpha=-0.75,
                layout=layout,
            )
            cases.append(case(stage))
    check_each(cases)


def test_a_transposed_convolution_is_priced_by_its_products() -> None:
    """Every output is multiplied by every tap of the channels of its group, zeros between the
    inputs among them: it must not look cheaper than the sketches that multiply less.
    """
    attrs = {"strides": (2, 2), "padding": (1, 1, 1, 1), "output_padding": (0, 0), "groups": 3}
    types = [T((2, 12, 5, 5)), T((12, 7, 4, 4))]
    stage = single("conv_transpose2d", types, T((2, 21, 10, 10)), layout="NCHW", **attrs)
    assert fallback.operations(stage) == 2 * (2 * 21 * 10 * 10) * (12 // 3) * 16
