"""The places of a row's largest and smallest elements, against numpy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.topk import cpu as topk
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    build,
    first_config,
    fresh_seed,
    reference,
    runnable,
    small_tasks,
    some_kernels,
    targets,
)


def best(shape: tuple[int, ...], k: int, largest: bool = True, dtype: str = "float32") -> Stage:
    op = Operator(
        "topk",
        ("x",),
        "y",
        TensorType((*shape[:-1], k), "int64"),
        make_attrs(k=k, largest=int(largest)),
    )
    return make_stage([op], {"x": TensorType(shape, dtype)}, [])


def rows(shape: tuple[int, ...], dtype: str, kind: str) -> np.ndarray:
    """Elements that are all different, elements with few values, or special values among others."""
    rng = np.random.default_rng(fresh_seed())
    if np.dtype(dtype).kind in "iu":
        bounds = np.iinfo(dtype)
        x = rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
        return x if kind == "different" else (x % 3).astype(dtype)
    if kind == "few":
        return rng.integers(-2, 3, shape).astype(dtype)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-9, 9, shape)).astype(dtype)
    if kind == "special":
        values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38], dtype)
        chosen = rng.random(shape) < 0.5
        x[chosen] = rng.choice(values, int(chosen.sum()))
    return x


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("shape", "k"),
    [
        ((1,), 1),
        ((3, 1), 1),
        ((2, 19), 1),
        ((5, 67), 5),
        ((2, 300), 50),
        ((3, 33), 33),  # a sort by merging
        ((2, 200), 64),
        ((2, 200), 65),  # the shortest that is sorted by digits
        ((2, 3, 517), 517),
        ((1, 9001), 300),
    ],
)
@pytest.mark.parametrize("largest", [True, False])
def test_places_are_those_of_a_stable_sort(
    shape: tuple[int, ...], k: int, largest: bool, name: str
) -> None:
    machine = runnable(name)
    stage = best(shape, k, largest)
    sketch = topk.match(stage, machine)
    assert sketch is not None
    with small_tasks():
        for built in some_kernels(sketch, machine):
            for kind in ("different", "few", "special"):
                x = rows(shape, "float32", kind)
                np.testing.assert_array_equal(built(x, unaligned=True), reference(stage, [x]))


@pytest.mark.parametrize("dtype", ["int32", "int16", "uint16", "int8", "uint8"])
@pytest.mark.parametrize("largest", [True, False])
def test_integers(dtype: str, largest: bool) -> None:
    machine = runnable("x86-64-v3")
    stage = best((3, 131), 20, largest, dtype)
    sketch = topk.match(stage, machine)
    assert sketch is not None
    built = build(sketch, first_config(sketch), machine)
    for kind in ("different", "few"):
        x = rows((3, 131), dtype, kind)
        np.testing.assert_array_equal(built(x), reference(stage, [x]))


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_wider_elements_are_the_fallback_s(dtype: str) -> None:
    machine = runnable("x86-64-v3")
    stage = best((2, 21), 4, True, dtype)
    assert topk.match(stage, machine) is None
    sketch = fallback.match(stage, machine)
    assert sketch is not None
    x = rows((2, 21), dtype, "few")
    built = build(sketch, first_config(sketch), machine)
    np.testing.assert_array_equal(built(x), reference(stage, [x], precise=False))
