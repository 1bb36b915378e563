"""Reductions of whole numbers on a GPU: the emulated kernels are exact."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.machine.gpu import ARCHITECTURES
from gtco.tensor.sketch.rows import cuda_counts as counts
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.emulate import run_stage
from tests.cuda.sketches import compiles, matched, some
from tests.kernels import fresh_seed

NUMPY = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def counting(
    kind: str, shape: tuple[int, ...], axes: tuple[int, ...], read: str, made: str
) -> Stage:
    """A reduction of its input, cast to ``made`` if the operator itself does not cast."""
    x = TensorType(shape, read)
    out = TensorType(tuple(n for a, n in enumerate(shape) if a not in axes), made)
    wide = TensorType(shape, made)
    operators = [
        Operator("cast", ("x",), "w", wide),
        Operator(kind, ("w",), "y", out, make_attrs(axes=axes, keepdims=False)),
    ]
    return make_stage(operators, {"x": x}, [])


@pytest.mark.parametrize("made", ["int32", "int64"])
@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("axes", [(2,), (0, 1), (0, 1, 2)])
def test_rows_columns_and_all(kind: str, axes: tuple[int, ...], made: str) -> None:
    """Numbers that float32 does not hold, all of them negative, and sums that wrap around."""
    random = np.random.default_rng(fresh_seed())
    stage = counting(kind, (3, 71, 5), axes, made, made)
    limit = np.iinfo(made)
    x = random.integers(limit.min, -(1 << 28), (3, 71, 5), made)
    x = -1 - x if kind == "min" else x  # all are greater than 0
    sketch = matched(counts.match, stage)
    for config in some(sketch, 2):
        wanted = NUMPY[kind](x, axis=axes, **({"dtype": made} if kind in ("sum", "prod") else {}))
        np.testing.assert_array_equal(run_stage(sketch, config, [x]), wanted)


def test_a_mask_is_counted_by_many_threads() -> None:
    stage = counting("sum", (2, 1500), (1,), "bool", "int64")
    mask = np.random.default_rng(fresh_seed()).random((2, 1500)) < 0.5
    sketch = matched(counts.match, stage)
    (config, *_) = some(sketch, 1)
    assert config["threads"] > 32
    np.testing.assert_array_equal(run_stage(sketch, config, [mask]), mask.sum(1))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str) -> None:
    compiles(matched(counts.match, counting("sum", (4, 999), (1,), "bool", "int64")), arch)
    compiles(matched(counts.match, counting("max", (4, 99, 7), (1,), "int32", "int32")), arch)
