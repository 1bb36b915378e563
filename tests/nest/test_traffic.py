"""The traffic of a nest: bytes that its loops move, and the working sets that these come from."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

import pytest

from gtco.machine.target import cpu_target
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.nest.nest import Nest, Placed
from gtco.tensor.nest.traffic import layers, spread

MACHINE = cpu_target("x86-64-v4")  # 32 KB of L1, 2 cores
ROW = MicroKernel(4, 2, 16)
NEST = Nest(
    (1, 40, 128, 96), ROW, (2, 1), 32, None, "panels",
    Placed("direct", "float32", 96), Placed("panels", "float32"), prefetch="next",
)  # fmt: skip


def moved(nest: Nest) -> dict[str, float]:
    """Bytes of all tasks together, by what moves. Every float32 has four."""
    found = layers(nest, MACHINE)
    names = (
        ("A again", "B again", "partial sums"),
        ("B first", "B of other tasks", "B of other passes"),
        ("A first", "A of other tasks", "A packed"),
        ("C fetched", "C"),
    )
    total = {}
    for depth, (each, layer) in enumerate(zip(names, found, strict=True)):
        times = prod(x.iterations for x in found[depth:]) * nest.shape.tasks
        for name, stream in zip(each, (*layer.loads, *layer.stores), strict=False):
            total[name] = times * stream.nbytes
    return total


@pytest.mark.parametrize(
    ("chunks", "cores", "share"),
    [((2, 1), 2, 0), ((4, 3), 2, 0), ((1, 2), 2, 0.5), ((1, 4), 4, 0.75), ((3, 2), 4, 0.25)],
)
def test_rows_of_other_cores(chunks: tuple[int, int], cores: int, share: float) -> None:
    """A core has its part of the rows, and of the others what is read and stored is handed over:
    the output twice, since the next stage reads it.
    """
    _, _, of_k, tasks = layers(replace(NEST, chunks=chunks), replace(MACHINE, cores=cores))
    assert [s.handed for s in of_k.loads] == [share, None]
    assert [s.handed for s in tasks.stores] == [share, 2 * share]


@pytest.mark.parametrize(
    "change",
    [{}, {"kc": 96}, {"order": "rows"}, {"mc": 2}, {"chunks": (1, 2)}, {"prefetch": "none"}],
)
def test_each_element_moves_as_often_as_the_loops_use_it(change: dict[str, object]) -> None:
    nest = replace(NEST, **change)  # type: ignore[arg-type]
    shape, total, size = nest.shape, moved(nest), 4.0
    m, n, k = 40, 128, 96
    assert total["A again"] == pytest.approx(size * m * k * n / ROW.columns)
    blocks = shape.blocks
    assert total["B again"] == pytest.approx(size * k * n * blocks)
    once, others = total["B first"], total["B of other tasks"]
    assert once == pytest.approx(size * k * n)
    assert once + others == pytest.approx(size * k * n * shape.chunks_m)
    every_pass = once + others + total["B of other passes"]
    assert every_pass == pytest.approx(size * k * n * shape.chunks_m * nest.passes)
    assert total["A first"] == pytest.approx(size * m * k * shape.chunks_n)
    partial = 2 * size * m * n * (nest.kblocks - 1)
    assert total.get("partial sums", 0.0) == pytest.approx(partial)
    assert total["C"] == pytest.approx(size * m * n)


def test_a_packed_row_is_stored_before_it_is_read() -> None:
    total = moved(replace(NEST, a=Placed("packed", "float32")))
    assert total["A packed"] == total["A first"] == pytest.approx(4 * 40 * 96)


def test_a_core_that_gets_several_tasks_of_the_same_rows_reads_them_once() -> None:
    """Four tasks use the same rows, and each of the two cores gets two of these."""
    total = moved(replace(NEST, chunks=(1, 4)))
    assert total["A first"] == pytest.approx(2 * 4 * 40 * 96)
    assert total["A of other tasks"] == pytest.approx(2 * 4 * 40 * 96)


def test_constant_weights_come_from_memory_once() -> None:
    (_, panel, _, _) = layers(NEST, MACHINE)
    first, *others = panel.loads
    assert first.memory == "DRAM" and not any(s.memory for s in others)
    activations = replace(NEST, b=Placed("packed", "float32"), prefetch="none")
    assert not layers(activations, MACHINE)[1].loads[0].memory


def test_short_runs_of_output_are_fetched_before_they_are_written() -> None:
    """A tile's row is two lines, of which a prefetcher fetches one. The other comes, and the line
    that it replaces goes.
    """
    for order in ("panels", "rows"):
        assert moved(replace(NEST, order=order))["C fetched"] == pytest.approx(4 * 40 * 128)


def test_what_overlaps() -> None:
    """Panels of B are under way beside products if they are prefetched. Products wait for A."""

    def overlapped(nest: Nest) -> list[bool]:
        return [layer.overlapped for layer in layers(nest, MACHINE)[:3]]

    assert overlapped(NEST) == [True, True, False]
    assert overlapped(replace(NEST, prefetch="none")) == [True, False, False]


def test_runs_far_apart_take_more_room() -> None:
    """Lines of a set: the starts of runs are 64 bytes times an odd number apart, or more."""
    assert spread(0, 512) == spread(512, 512) == spread(1000, 512) == 1.0
    assert spread(64 * 97, 512) == 1.0  # all sets are used
    assert spread(6144, 512) == 2048 / 512  # runs begin at two places of a page
    assert spread(4096, 64) == spread(12288, 64) == 64.0  # all of them in one set
    assert spread(12288, 3072) == 4096 / 3072


@pytest.mark.parametrize("stride", [6144, 4096, 12288, 64 * 97, 64 * 34, 1536])
@pytest.mark.parametrize("run", [64, 512, 1024])
def test_spread_is_what_sets_of_a_page_hold(stride: int, run: int) -> None:
    """It counts the lines of many runs in each of the 64 places of a page. The fullest place needs
    so many times the ways that evenly dealt lines would need.
    """
    runs, places = 64 * 3, [0] * 64
    for start in range(0, runs * stride, stride):
        for line in range(ceil(run / 64)):
            places[(start // 64 + line) % 64] += 1
    assert max(places) / (sum(places) / 64) == pytest.approx(spread(stride, run), rel=0.35)


def test_rows_of_a_that_evict_each_other() -> None:
    """L1 has eight ways. Of nine rows whose lines share a set, an eighth more than fits, a ninth is
    loaded again at each of the 15 further steps of k that use a line.
    """

    def again(rows: int, stride: int) -> float:
        a = Placed("direct", "float32", stride)
        nest = replace(NEST, row=MicroKernel(rows, 1, 16), extents=(1, 36, 128, 1024), a=a, kc=1024)
        (micro, *_) = layers(nest, MACHINE)
        return micro.loads[0].nbytes / (4 * rows * 1024)

    assert again(9, 1024) == pytest.approx(1 + 15 / 9)
    assert again(12, 1024) == pytest.approx(1 + 15 / 3)
    assert again(6, 1024) == again(9, 1040) == 1.0
