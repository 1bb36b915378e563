"""Rows that are written to the places that indices give, against numpy; also by the fallback."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.scatter import cpu as scatter
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

REDUCTIONS = ("update", "add", "mul", "max", "min")


def writing(
    shape: tuple[int, ...],
    rows: int,
    count: int,
    reduction: str = "update",
    dtype: str = "float32",
    indices: str = "int64",
) -> Stage:
    types = {
        "x": TensorType(shape, dtype),
        "i": TensorType((count,), indices),
        "u": TensorType((count, int(np.prod(shape)) // rows), dtype),
    }
    attrs = make_attrs(rows=rows, reduction=reduction)
    return make_stage([Operator("scatter", ("x", "i", "u"), "y", types["x"], attrs)], types, [])


def drawn(stage: Stage) -> list[np.ndarray]:
    """Small whole numbers, so that sums are exact. A few indices name no row."""
    rng = np.random.default_rng(fresh_seed())
    rows = stage.output["rows"]
    arrays = []
    for i in stage.inputs:
        shape = tuple(int(d) for d in i.type.shape)
        if i.name == "i":
            places = rng.integers(-1, rows + 1, shape).astype(i.type.dtype)
            if places.itemsize == 8 and places.size > 1:
                places[-1] = 1 << 32  # is row 0 in 32 bits
            arrays.append(places)
        else:
            arrays.append(rng.integers(-3, 4, shape).astype(i.type.dtype))
    return arrays


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("shape", "rows", "count"),
    [
        ((1,), 1, 3),
        ((7, 5), 35, 50),
        ((3, 1000), 3, 2),
        ((11, 37), 11, 20),
        ((2, 300, 19), 600, 70),
        ((4099,), 4099, 900),
    ],
)
def test_rows_of_any_length(shape: tuple[int, ...], rows: int, count: int, name: str) -> None:
    """Many updates of one row, in order. An index that names no row is dropped."""
    machine = runnable(name)
    for reduction in REDUCTIONS:
        stage = writing(shape, rows, count, reduction)
        sketch = scatter.match(stage, machine)
        assert sketch is not None
        arrays = drawn(stage)
        with small_tasks():
            for built in some_kernels(sketch, machine):
                got = built(*arrays, unaligned=True)
                np.testing.assert_array_equal(got, reference(stage, arrays, precise=False))


@pytest.mark.parametrize("indices", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "int8", "bool", "float16"])
def test_dtypes(dtype: str, indices: str) -> None:
    machine = runnable("x86-64-v3")
    for reduction in REDUCTIONS if dtype in scatter.SUMS else ("update",):
        stage = writing((5, 21), 5, 9, reduction, dtype, indices)
        sketch = scatter.match(stage, machine)
        assert sketch is not None
        arrays = drawn(stage)
        built = build(sketch, first_config(sketch), machine)
        np.testing.assert_array_equal(built(*arrays), reference(stage, arrays, precise=False))
    assert scatter.match(writing((5, 21), 5, 9, "add", "float16"), machine) is None


def test_nan_stays_in_maxima() -> None:
    machine = runnable("x86-64-v3")
    stage = writing((6, 20), 6, 6, "max")
    sketch = scatter.match(stage, machine)
    assert sketch is not None
    x, i, u = drawn(stage)
    i, x[1, 3], u[2, 4] = np.arange(6), np.nan, np.nan
    got = build(sketch, first_config(sketch), machine)(x, i, u)
    np.testing.assert_array_equal(got, reference(stage, [x, i, u], precise=False))
    assert np.isnan(got).sum() == 2


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_fallback_writes_the_same(reduction: str) -> None:
    machine = runnable("x86-64-v3")
    stage = writing((3, 4, 5), 12, 9, reduction)
    sketch = fallback.match(stage, machine)
    assert sketch is not None
    arrays = drawn(stage)
    got = build(sketch, first_config(sketch), machine)(*arrays)
    np.testing.assert_array_equal(got, reference(stage, arrays, precise=False))
