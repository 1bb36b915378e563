"""A nest: loops that are not possible are refused when it is made; scratch follows from it."""

from dataclasses import replace

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from gtco.tensor.intrinsics.table import KINDS, MicroKernel
from gtco.tensor.nest.nest import Nest, Placed
from gtco.tensor.nest.shape import cut, unit_of

ROW = MicroKernel(6, 2, 16)
NEST = Nest(
    (1, 40, 64, 96), ROW, (2, 1), 32, None, "panels",
    Placed("packed", "float32"), Placed("panels", "float32"),
)  # fmt: skip
DIRECT = Placed("direct", "float32", 96)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kc": 97}, "kc=97"),
        ({"kc": 33, "row": MicroKernel(6, 2, 16, KINDS["bf16"])}, "multiple of 2"),
        ({"extents": (1, 0, 64, 96)}, "positive"),
        ({"order": "columns"}, "order=columns"),
        ({"order": "rows", "mc": 2}, "mc=2"),
        ({"order": "rows", "b": Placed("packed", "float32")}, "order=rows"),
        ({"order": "rows", "b": Placed("widened", "float16")}, "order=rows"),
        ({"prefetch": "next", "b": Placed("packed", "float32")}, "constant B"),
        ({"prefetch": "both", "b": Placed("widened", "float16")}, "not widened"),
        ({"a": DIRECT, "row": MicroKernel(6, 2, 16, KINDS["bf16"])}, "A of float32"),
        ({"b": DIRECT, "extents": (1, 40, 65, 96)}, "65 columns"),
        ({"a": Placed("panels", "float32")}, "A cannot be panels"),
        ({"order": "k"}, "order=k would pack"),
        ({"order": "k", "a": DIRECT, "mc": 2}, "mc=2"),
        ({"lines": (3, 1)}, "40 rows cannot lie in 3 lines"),
        ({"lines": (4, 5)}, "5 in a task"),
        ({"lines": (4, 2)}, "whole lines"),
        ({"transform": (16, 4)}, "one block of k"),
        ({"a": Placed("windows", "float32", 3)}, "its windows are None"),
    ],
)
def test_impossible_loops_are_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(NEST, **wrong)  # type: ignore[arg-type]


def test_tiles_of_partial_sums_are_kept_for_all_blocks_of_a_task() -> None:
    blocks, panels = NEST.shape.task_blocks, NEST.shape.task_panels
    assert {p.name: p.shape for p in NEST.pieces()}["tiles"] == (blocks * panels, 6, 32)
    whole = replace(NEST, kc=96)
    assert {p.name: p.shape for p in whole.pieces()}["tiles"] == (1, 6, 32)


@pytest.mark.parametrize("m", [1, 7, 16, 17, 31, 32, 33, 48, 64, 197, 1370])
@pytest.mark.parametrize("rows", [16, 32])
def test_blocks_of_the_tile_unit_are_full_but_for_the_last(m: int, rows: int) -> None:
    """197 rows take 13 tiles, not the 14 of seven equal blocks; a configuration for the last block
    is set only if the other one does not fit.
    """
    tile = MicroKernel(rows, 2, 16, KINDS["tiles"])
    shape = cut(1, m, 32, rows, 32, 1, 1, full=True)
    blocks = -(-m // rows)
    assert shape.rows(blocks) == m and shape.first_row(blocks) == m
    assert [int(shape.first_row(b)) for b in range(blocks)] == list(range(0, m, rows))
    assert shape.heights[0] == min(rows, m) and shape.heights[-1] == m - (blocks - 1) * rows
    assert shape.covered(tile, blocks) == -(-m // 16) * 16
    sets_again = len(shape.heights) > 1 and m % 16 != 0
    assert shape.configurations(tile, 1, 1) == (3 if sets_again else 1)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("m", range(1, 100))
def test_the_tile_unit_has_one_configuration_and_finishes_each_row_once(m: int, rows: int) -> None:
    """The last block begins inside of the one before, and drops what that one finishes."""
    row = MicroKernel(rows, 2, 16, KINDS["tiles"])
    shape = cut(1, m, 64, rows, 32, 1, 1, True, unit=unit_of(row))
    assert shape.configurations(row, shape.tasks, 7) == shape.tasks
    finished = []
    for block in range(shape.blocks):
        this = tirx.const(block, "int32")
        first, dropped, kept = (
            int(Analyzer().simplify(found))
            for found in (
                tirx.const(0, "int32") + shape.first_row(this),
                tirx.const(0, "int32") + shape.dropped(this),
                tirx.const(0, "int32") + shape.finished(this),
            )
        )
        height = shape.heights[0 if block < shape.taller else -1]
        assert 0 <= first <= m - height
        assert dropped + kept == height
        assert kept in shape.finished_heights
        finished += range(first + dropped, first + height)
        end = tirx.const(0, "int32") + shape.end_row(this + 1)
        assert int(Analyzer().simplify(end)) == len(finished)
    assert finished == list(range(m))
