"""Rows that are computed together because they read the same: rotary embeddings, and positions that
are added to the images of a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.sketch.shared.interleaving import Interleaving
from gtco.tensor.sketch.shared.lockstep import Lockstep
from gtco.tensor.stage import Operator, Stage
from tests.kernels import (
    assert_close,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)
from tests.sketch.test_elementwise import op, stage


def rotary(heads: tuple[int, ...], tables: tuple[int, ...], positions: int, width: int) -> Stage:
    """x * c + (-b, a) * s for the halves a, b of each row."""
    shape, half = (*heads, positions, width), (*heads, positions, width // 2)
    return stage(
        [
            *_slices(shape, half, (0, width // 2)),
            op("negative", "b", "m", half),
            op("concat", "m a", "r", shape, axis=len(heads) + 1),
            *_turned(shape),
        ],
        x=shape,
        c=(*tables, positions, width),
        s=(*tables, positions, width),
    )


def pairs(heads: tuple[int, ...], tables: tuple[int, ...], positions: int, width: int) -> Stage:
    """The same for pairs of neighbours."""
    shape, last = (*heads, positions, width), len(heads) + 2
    split, one = (*heads, positions, width // 2, 2), (*heads, positions, width // 2, 1)
    return stage(
        [
            op("reshape", "x", "v", split),
            *_slices(split, one, (0, 1), "v"),
            op("negative", "b", "m", one),
            op("concat", "m a", "w", split, axis=last),
            op("reshape", "w", "r", shape),
            *_turned(shape),
        ],
        x=shape,
        c=(*tables, positions, width),
        s=(*tables, positions, width),
    )


def _slices(
    shape: tuple[int, ...], part: tuple[int, ...], begins: tuple[int, int], of: str = "x"
) -> list[Operator]:
    """Both parts of the last axis, a and b."""
    before, strides = (0,) * (len(shape) - 1), (1,) * len(shape)
    return [
        op("slice", of, name, part, begin=(*before, begin), strides=strides)
        for name, begin in zip("ab", begins, strict=True)
    ]


def _turned(shape: tuple[int, ...]) -> list[Operator]:
    return [
        op("multiply", "x c", "p", shape),
        op("multiply", "r s", "q", shape),
        op("add", "p q", "y", shape),
    ]


def positions_of_a_batch() -> Stage:
    return stage([op("add", "x p", "y", (6, 170, 100))], x=(6, 170, 100), p=(170, 100))


CASES: dict[str, tuple[Callable[[], Stage], Lockstep]] = {
    "heads": (lambda: rotary((1, 12), (), 197, 64), Lockstep((1, 12, 197), 0, 2, 4)),
    "heads of a batch": (
        lambda: rotary((2, 3), (2, 1), 197, 64),
        Lockstep((2, 3, 197), 1, 2, 3),
    ),
    "a batch and heads": (lambda: rotary((2, 5), (), 150, 40), Lockstep((2, 5, 150), 0, 2, 2)),
    "pairs": (lambda: pairs((1, 6), (), 197, 64), Lockstep((1, 6), 0, 2, 3)),
    "pairs of a batch": (lambda: pairs((3, 4), (3, 1), 150, 48), Lockstep((3, 4), 1, 2, 4)),
    "even": (positions_of_a_batch, Lockstep((6,), 0, 1, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_read_the_same_are_made_side_by_side(case: str) -> None:
    make, wanted = CASES[case]
    sketch = elementwise.Elementwise(make(), target("x86-64-v4"))
    blocks = sketch.blocks
    assert (blocks.rows if isinstance(blocks, Interleaving) else sketch.grid.rows) == wanted


def test_what_l1_keeps_leaves_the_order_as_it_is() -> None:
    machine = target("x86-64-v4")
    sketch = elementwise.Elementwise(rotary((1, 12), (), 32, 64), machine)
    assert sketch.grid.rows == Lockstep((1, 12, 32))


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, name: str) -> None:
    machine, made = runnable(name), CASES[case][0]()
    inputs = random_inputs(made, fresh_seed())
    wanted = reference(made, inputs)
    for built in some_kernels(elementwise.Elementwise(made, machine), machine):
        assert_close(built(*inputs, unaligned=True), wanted)
        assert np.isfinite(wanted).all()
