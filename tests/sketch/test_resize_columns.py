"""Resizing along contiguous columns by permuted vectors, against float64.

Tolerance: 2e-6 of the largest magnitude; cubic weights reach 1.4 and are summed over 16 taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtco.tensor.reference_spatial import nearest_indices, source_coordinates
from gtco.tensor.sketch.resize import cpu as resize
from gtco.tensor.sketch.resize.columns import fits
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    build_all,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    targets,
)

T = TensorType
COORDINATES = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
ROUNDINGS = ["floor", "ceil", "round", "round_prefer_ceil"]
SIZES = [
    ((3, 5), (7, 21)),
    ((2, 16), (4, 16)),
    ((2, 1), (1, 19)),
    ((4, 33), (3, 34)),
    ((3, 11), (6, 44)),
    ((1, 7), (2, 112)),
    ((3, 20), (6, 57)),
    ((2, 37), (3, 38)),
]


def stage(size: tuple[int, int], out: tuple[int, int], **attrs: str) -> Stage:
    known = {"method": "linear", "coordinates": "half_pixel", "rounding": "round", **attrs}
    op = Operator(
        "resize2d",
        ("x",),
        "y",
        T((2, 3, *out)),
        make_attrs(layout="NCHW", cubic_alpha=-0.75, **known),
    )
    return make_stage([op], {"x": T((2, 3, *size))}, [])


def check(given: Stage, name: str) -> None:
    check_each([given], name)


def check_each(stages: Sequence[Stage], name: str) -> None:
    machine, chosen, cases = runnable(name), [], []
    for one in stages:
        sketch = resize.match(one, machine)
        assert sketch is not None and sketch.columns is not None, "not by permuted vectors"
        inputs = random_inputs(one, fresh_seed())
        every = list(configs(sketch))
        for config in {every[0], every[-1]}:
            chosen.append((sketch, config))
            cases.append((inputs, reference(one, inputs)))
    for kernel, (inputs, want) in zip(build_all(chosen, machine), cases, strict=True):
        assert_close(kernel(*inputs, unaligned=True), want, 2e-6)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("method", ["linear", "cubic"])
def test_interpolation(method: str, coordinates: str, name: str) -> None:
    stages = [stage(size, out, method=method, coordinates=coordinates) for size, out in SIZES]
    check_each(stages, name)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nearest(rounding: str, coordinates: str) -> None:
    stages = [
        stage(size, out, method="nearest", coordinates=coordinates, rounding=rounding)
        for size, out in SIZES[:4]
    ]
    check_each(stages, "x86-64-v3")


@pytest.mark.parametrize("name", targets())
def test_prologue_and_epilogue(name: str) -> None:
    """relu(x) is resized, a residual is added, and the result is stored channels last."""
    shape = (2, 3, 6, 40)
    resized = make_attrs(
        method="linear",
        coordinates="half_pixel",
        rounding="round",
        cubic_alpha=-0.75,
        layout="NCHW",
    )
    check(
        make_stage(
            [
                Operator("relu", ("x",), "a", T((2, 3, 5, 13))),
                Operator("resize2d", ("a",), "b", T(shape), resized),
                Operator("add", ("b", "r"), "c", T(shape)),
                Operator("permute", ("c",), "y", T((2, 6, 40, 3)), make_attrs(axes=(0, 2, 3, 1))),
            ],
            {"x": T((2, 3, 5, 13)), "r": T((3, 1, 1))},
            [],
        ),
        name,
    )


def test_nan_and_infinity_do_not_spread() -> None:
    """Only outputs that have a column of NaN or infinity among their two taps see it."""
    given = stage((2, 9), (2, 36))
    x = random_inputs(given, fresh_seed())[0]
    x[0, 0, :, 4] = np.nan
    x[1, 2, :, 0] = np.inf
    machine = runnable("x86-64-v3")
    sketch = resize.match(given, machine)
    assert sketch is not None and sketch.columns is not None
    got = build(sketch, next(iter(configs(sketch))), machine)(x)
    with np.errstate(invalid="ignore"):
        want = reference(given, [x])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isfinite(got[0, 1:]).all() and np.isfinite(got[1, :2]).all()


@given(
    st.integers(1, 300),
    st.integers(0, 2000),
    st.sampled_from(COORDINATES),
    st.sampled_from([8, 16]),
)
def test_taps_of_a_vector_lie_within_a_vector(
    size: int, more: int, coordinates: str, lanes: int
) -> None:
    """``fits`` promises that every lane's first tap is 0 to lanes - 1 columns after that of the
    first lane.
    """
    out = size + more
    if not fits(size, out, lanes):
        return
    firsts = [np.floor(source_coordinates(size, out, coordinates))]
    firsts += [nearest_indices(size, out, coordinates, rounding) for rounding in ROUNDINGS]
    for first in firsts:
        assert first.min() >= -1 and first.max() <= size - 1
        for x0 in range(0, out, lanes):
            x0 = min(x0, out - lanes)
            reach = first[x0 : x0 + lanes] - first[x0]
            assert (reach >= 0).all() and (reach < lanes).all()
