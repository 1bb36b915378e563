"""Gathers against numpy and the reference: an index may count from the end, every lane may have an
index of its own, and what is gathered may be padding.
"""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.space import configs
from gtco.tensor.stage import TensorType, make_stage
from tests.kernels import build, fresh_seed, reference, runnable, some_kernels, targets
from tests.sketch.test_elementwise import op


def test_gather_with_negative_indices() -> None:
    machine = runnable("x86-64-v3")
    g = make_stage(
        [op("gather", "x i", "g", (3, 4, 19), axis=1), op("negative", "g", "y", (3, 4, 19))],
        {"x": TensorType((3, 9, 19)), "i": TensorType((4,), "int64")},
        [],
    )
    sketch = elementwise.match(g, machine)
    assert sketch is not None
    x = np.random.default_rng(fresh_seed()).standard_normal((3, 9, 19)).astype(np.float32)
    i = np.array([8, -1, 0, -9])
    got = build(sketch, next(iter(configs(sketch))), machine)(x, i)
    np.testing.assert_array_equal(got, -np.take(x, i, axis=1))


@pytest.mark.parametrize("name", targets())
def test_gather_along_the_last_axis(name: str) -> None:
    """Every lane has its own index."""
    machine = runnable(name)
    g = make_stage(
        [op("gather", "x i", "y", (3, 2, 21), axis=1)],
        {"x": TensorType((3, 9)), "i": TensorType((2, 21), "int64")},
        [],
    )
    sketch = elementwise.match(g, machine)
    assert sketch is not None
    rng = np.random.default_rng(fresh_seed())
    x, i = rng.standard_normal((3, 9)).astype(np.float32), rng.integers(-9, 9, (2, 21))
    np.testing.assert_array_equal(
        build(sketch, next(iter(configs(sketch))), machine)(x, i), np.take(x, i, axis=1)
    )


@pytest.mark.parametrize("name", targets())
def test_a_gather_behind_a_padding_reads_inside_too(name: str) -> None:
    """The row that is gathered is known only at run time. The analysis once took row 0, which is
    padding, for every row, and so it saw rows of a constant.
    """
    machine = runnable(name)
    padding = {"before": (1, 3, 0), "after": (1, 3, 3), "value": 0.0}
    for axis, shape in ((0, (6, 7, 6)), (1, (5, 6, 6)), (2, (5, 7, 6))):
        built = make_stage(
            [
                op("pad", "x", "p", (5, 7, 6), **padding),
                op("gather", "p at", "y", shape, axis=axis),
            ],
            {"x": TensorType((3, 1, 3)), "at": TensorType((6,), "int64")},
            [],
        )
        sketch = elementwise.match(built, machine)
        assert sketch is not None
        x = np.arange(1, 10, dtype=np.float32).reshape(3, 1, 3)
        inputs = [x, np.array([3, -1, 4, -5, 4, -2])]
        if axis == 2:
            inputs[1][3] = 0
        for kernel in some_kernels(sketch, machine):
            np.testing.assert_array_equal(kernel(*inputs), reference(built, inputs, precise=False))
