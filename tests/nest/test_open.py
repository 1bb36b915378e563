"""Kernels of products whose sizes are arguments: right for any cut, and for places beyond 2^31."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.machine.target import cpu_target
from gtco.support.errors import ShapeError
from gtco.tensor.nest.open import (
    Cut,
    FewColumns,
    OpenNest,
    along_k,
    check_sizes,
    cut,
    few_columns,
    nests,
    pack,
    packed_vectors,
)
from gtco.tensor.nest.open_columns import columns_kernel
from gtco.tensor.nest.open_filtering import filtering_kernel
from gtco.tensor.nest.open_images import Window
from gtco.tensor.nest.open_loops import open_kernel
from tests.fences import fenced
from tests.inner_loops import keeps_sums, product_loops
from tests.kernels import check_guard, guarded, runnable

TOLERANCE = 2e-6  # of the sum of the products' magnitudes: sums of some hundred, in float32
NORESERVE = 0x4000  # of mmap: pages that are not touched take no memory


@cache
def compiled(name: str) -> tuple[Any, tuple[OpenNest | FewColumns, ...], tuple[int, ...]]:
    """The narrowest and a wide kernel of a target with every feed, and those of few columns; and
    all widths.
    """
    target = runnable(name)
    every = nests(target)
    widths = tuple(sorted({nest.row.vectors for nest in every}))
    chosen = [nest for nest in every if nest.row.vectors in (1, widths[-2])]
    few = few_columns(target)[:2]
    functions = [open_kernel(nest, nest.name) for nest in chosen]
    functions += [columns_kernel(nest, nest.name) for nest in few]
    return load(functions, target), (*chosen, *few), widths


def lanes_of(nest: OpenNest | FewColumns) -> int:
    return nest.row.lanes if isinstance(nest, OpenNest) else nest.lanes


def multiplied(
    library: Any, nest: OpenNest | FewColumns, widths: tuple[int, ...], numbers: Cut, m: int
) -> None:
    """Runs all tasks, the last one first, on memory that ends before an inaccessible page."""
    n, k = numbers.n, numbers.k
    random = np.random.default_rng(m * n + k)
    a = random.standard_normal((m, k), dtype=np.float32)
    b = random.standard_normal((k, n), dtype=np.float32)
    read = numbers.array
    if isinstance(nest, OpenNest) and nest.gathered:  # images of one column, and windows of a pixel
        read = np.concatenate([read, Window(m, 1, k, 1, 1, 0, m, 1).array])
    held = [fenced(a), fenced(pack(b, lanes_of(nest), widths)), fenced(read)]
    out, whole = guarded(4 * m * n)
    work, scratch = guarded(numbers.workspace)
    work[:] = 0xFF  # NaN, because scratch is not zeroed
    places = [ctypes.c_void_p(array.ctypes.data) for array in (*held, out, work)]
    for task in reversed(range(numbers.tasks)):
        getattr(library, nest.name)(*places, ctypes.c_int64(task), ctypes.c_int64(task + 1))
    check_guard(out, whole, "C")
    check_guard(work, scratch, "scratch")
    room = TOLERANCE * (np.abs(a) @ np.abs(b)).astype(np.float64)
    error = np.abs(out.view(np.float32).reshape(m, n) - a.astype(np.float64) @ b)
    assert (error <= room).all(), (nest.name, numbers)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
def test_every_cut_of_drawn_sizes_is_right(target: str) -> None:
    library, kernels, widths = compiled(target)
    random = np.random.default_rng(7)
    done = 0
    while done < 240:
        nest = kernels[done % len(kernels)]
        m, n, k = (int(2**x) for x in random.uniform(0, 6.7, 3))
        kc, held, chunks_m, chunks_n = (int(x) for x in random.integers(1, [k + 1, 6, 5, 5]))
        if isinstance(nest, FewColumns):
            n, kc, held, chunks_n = nest.columns, k, m, 1
            if not along_k(n, k, nest.lanes):
                continue
        elif along_k(n, k, nest.row.lanes) or nest.row.vectors > -(-n // nest.row.lanes):
            continue
        chosen = cut(nest, m, n, k, chunks_m=chunks_m, chunks_n=chunks_n, kc=kc, held=held)
        multiplied(library, nest, widths, chosen, m)
        done += 1


def test_every_height_is_right() -> None:
    library, kernels, widths = compiled("x86-64-v3")
    for nest in kernels:
        most = nest.row.rows if isinstance(nest, OpenNest) else nest.rows
        n = 50 if isinstance(nest, OpenNest) else nest.columns
        for m in range(1, 2 * most + 2):
            multiplied(library, nest, widths, cut(nest, m, n, 37), m)


def test_places_beyond_two_to_the_31_are_reached() -> None:
    """Only the last rows of A and C are touched: the other pages are no memory."""
    library, kernels, widths = compiled("x86-64-v3")
    nest = kernels[0]
    assert isinstance(nest, OpenNest) and not nest.packed
    n, k = 40, 24
    m = 2**31 // k + 1000
    tasks = m // nest.row.rows
    numbers = cut(nest, m, n, k, chunks_m=tasks)
    rows = nest.row.rows * 3

    def sparse(width: int) -> tuple[mmap.mmap, np.ndarray]:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        memory = mmap.mmap(-1, 4 * m * width, flags=flags)
        return memory, np.frombuffer(memory, np.float32).reshape(m, width)

    (_, a), (_, c) = sparse(k), sparse(n)
    random = np.random.default_rng(0)
    a[-rows:] = random.standard_normal((rows, k), dtype=np.float32)
    b = random.standard_normal((k, n), dtype=np.float32)
    packed, chosen = pack(b, nest.row.lanes, widths), numbers.array
    assert a.size > 2**31 and c.size > 2**31
    places = [ctypes.c_void_p(x.ctypes.data) for x in (a, packed, chosen, c, packed)]
    begin = numbers.tasks - 1
    getattr(library, nest.name)(*places, ctypes.c_int64(begin), ctypes.c_int64(begin + 1))
    last = numbers.height  # of the rows of the last block
    exact = a[-last:].astype(np.float64) @ b
    assert np.abs(c[-last:] - exact).max() <= 1e-5 * np.abs(exact).max()


def test_blocks_have_two_neighbouring_heights_that_cover_all_rows() -> None:
    nest = nests(runnable("x86-64-v3"))[0]
    for m in range(1, 200):
        chosen = cut(nest, m, 33, 5, chunks_m=3, chunks_n=2, held=2)
        assert chosen.blocks * chosen.height + chosen.taller == m
        assert chosen.height + (chosen.taller > 0) <= nest.row.rows
        assert chosen.chunks_m * chosen.task_blocks >= chosen.blocks


def test_the_last_tile_of_every_width_lies_inside_packed_columns() -> None:
    for vectors in range(1, 60):
        panels = packed_vectors(16 * vectors, 16, (1, 2, 3, 4, 6))
        for width in (1, 2, 3, 4, 6):
            if width <= vectors:
                assert -(-vectors // width) * width <= panels


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -3, 1), (1, 1, 2**41)])
def test_other_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeError, match="is no size of a product"):
        check_sizes(*sizes)


@pytest.mark.parametrize("name", ["znver4", "cascadelake", "haswell"])
def test_sums_of_products_stay_in_registers(name: str) -> None:
    """In the machine code of every kernel, no loop of products stores a vector to the stack. LLVM
    once wrote two steps of some tiles out, with the elements of A in the registers of the sums,
    and these tiles took twice their time. The transforms of minimal filtering, which read
    constants, have more values than there are registers.
    """
    machine = cpu_target(name)
    for nest in nests(machine):
        made = filtering_kernel if nest.feed == "filtered" else open_kernel
        bodies = product_loops([made(nest, "kernel")], machine, least=10)
        assert nest.row.rows * nest.row.vectors < 10 or bodies, nest.name
        for body in bodies:
            assert keeps_sums(body) or "(%rip)" in body, (nest.name, body)
