"""Kernels of products whose sizes are arguments: right for any cut, and for places beyond 2^31."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.machine.target import cpu_target
from gtco.tensor.nest.open import FEW_COLUMNS, FewColumns, OpenNest, few_columns, nests
from gtco.tensor.nest.open_images import Window
from gtco.tensor.nest.open_kernels import open_kernel
from tests.fences import fenced
from tests.inner_loops import keeps_sums, product_loops
from tests.kernels import check_guard, guarded, runnable
from tests.nest.cuts import LINE, Numbers, along_k, cut, pack, packed_vectors

TOLERANCE = 2e-6  # of the sum of the products' magnitudes: sums of some hundred, in float32
NORESERVE = 0x4000  # of mmap: pages that are not touched take no memory


@cache
def compiled(name: str) -> tuple[Any, tuple[OpenNest | FewColumns, ...], tuple[int, ...]]:
    """The narrowest and a wide kernel of a target with every feed of rows, those of few columns,
    and the same two with lines of images; and all widths.
    """
    target = runnable(name)
    every = nests(target)
    widths = tuple(sorted({nest.row.vectors for nest in every}))
    chosen = [nest for nest in every if nest.row.vectors in (1, widths[-2])]
    rows = [nest for nest in chosen if nest.direct or nest.packed]
    lines = [nest for nest in chosen if nest.feed == "lines"]
    made = (*rows, *few_columns(target)[:2], *lines)
    return load([open_kernel(nest, nest.name) for nest in made], target), made, widths


def in_rows(
    kernels: tuple[OpenNest | FewColumns, ...],
) -> tuple[OpenNest | FewColumns, ...]:
    lines = in_lines(kernels)
    return tuple(nest for nest in kernels if nest not in lines)


def in_lines(kernels: tuple[OpenNest | FewColumns, ...]) -> list[OpenNest]:
    return [nest for nest in kernels if isinstance(nest, OpenNest) and nest.feed == "lines"]


def lanes_of(nest: OpenNest | FewColumns) -> int:
    return nest.row.lanes if isinstance(nest, OpenNest) else nest.lanes


def multiplied(
    library: Any, nest: OpenNest | FewColumns, widths: tuple[int, ...], numbers: Numbers, m: int
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
    kernels = in_rows(kernels)
    random = np.random.default_rng(7)
    done = 0
    while done < 240:
        nest = kernels[done % len(kernels)]
        m, n, k = (int(2**x) for x in random.uniform(0, 6.7, 3))
        kc, held, chunks_m, chunks_n = (int(x) for x in random.integers(1, [k + 1, 6, 5, 5]))
        if done % 3 == 0:
            n = -(-n // LINE) * LINE
        if isinstance(nest, FewColumns):
            n, kc, held, chunks_n = nest.columns, k, m, 1
            if not along_k(n, k, nest.lanes):
                continue
        elif along_k(n, k, nest.row.lanes) or nest.row.vectors > -(-n // nest.row.lanes):
            continue
        chosen = cut(nest, m, n, k, chunks_m=chunks_m, chunks_n=chunks_n, kc=kc, held=held)
        multiplied(library, nest, widths, chosen, m)
        if n % LINE == 0:
            whole = cut(nest, m, n, k, chunks_m=chunks_m, chunks_n=chunks_n, held=held)
            multiplied(library, nest, widths, replace(whole, past=1), m)
        done += 1


def test_every_height_is_right() -> None:
    library, kernels, widths = compiled("x86-64-v3")
    for nest in in_rows(kernels):
        most = nest.row.rows if isinstance(nest, OpenNest) else nest.rows
        n = 50 if isinstance(nest, OpenNest) else nest.columns
        for m in range(1, 2 * most + 2):
            multiplied(library, nest, widths, cut(nest, m, n, 37), m)


def convolved(
    library: Any, nest: OpenNest, widths: tuple[int, ...], of: Window, batch: int, n: int,
    taps: int, task: int, held: int, deep: int,
) -> None:  # fmt: skip
    """Runs all tasks of a convolution, the last one first, on memory that ends before an
    inaccessible page: tasks of so many lines, parts of ``held``, blocks of k of ``deep`` runs.
    """
    lines, run = batch * of.out_h, of.kernel_w * of.channels
    blocks = -(-of.out_w // nest.row.rows)
    panels, wide = -(-n // nest.row.columns), (of.out_w - 1) * of.stride + of.kernel_w
    pitch = -(-wide * of.channels // LINE) * LINE
    height, taller = divmod(of.out_w, blocks)
    numbers = Numbers(
        n, taps * run, deep * run, height, taller, lines * blocks, task * blocks, panels, 1, panels,
        held * blocks, pitch, 0, int(n % LINE == 0 and deep == taps),
    )  # fmt: skip
    random = np.random.default_rng(n + of.out_w + of.channels)
    x = random.standard_normal((batch, of.image_h, of.image_w, of.channels), dtype=np.float32)
    w = random.standard_normal((taps * run, n), dtype=np.float32)
    p, s = of.padding, of.stride
    padded = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (taps, of.kernel_w), (1, 2))
    a = windows[:, ::s, ::s].transpose(0, 1, 2, 4, 5, 3).reshape(lines * of.out_w, -1)
    # the lines of scratch under any `held` lines of the output, without those that images share
    later = min(s, taps)
    used = [
        sum(taps if line == first or line % of.out_h == 0 else later for line in range(first, end))
        for first in range(lines)
        if (end := min(first + held, lines))
    ]
    out, whole = guarded(4 * lines * of.out_w * n)
    work, scratch = guarded(4 * max(used) * pitch)
    work[:] = 0xFF  # NaN, because scratch is not zeroed
    read = np.concatenate([numbers.array, of.array])
    held_arrays = [fenced(x), fenced(pack(w, nest.row.lanes, widths)), fenced(read)]
    places = [ctypes.c_void_p(array.ctypes.data) for array in (*held_arrays, out, work)]
    for number in reversed(range(-(-lines // task) * panels)):
        getattr(library, nest.name)(*places, ctypes.c_int64(number), ctypes.c_int64(number + 1))
    check_guard(out, whole, "C")
    check_guard(work, scratch, "scratch")
    room = TOLERANCE * (np.abs(a) @ np.abs(w)).astype(np.float64)
    error = np.abs(out.view(np.float32).reshape(-1, n) - a.astype(np.float64) @ w)
    assert (error <= room).all(), (nest.name, of, numbers)


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
def test_drawn_lines_of_images_are_right(target: str) -> None:
    """Windows narrower and wider than their stride, lines that several images share in a part."""
    library, kernels, widths = compiled(target)
    random = np.random.default_rng(3)
    done = 0
    while done < 160:
        batch, high, wide, stride = (int(x) for x in random.integers(1, [4, 9, 40, 5]))
        channels, n = (int(2**x) for x in random.uniform(0, 6, 2))
        n = -(-n // LINE) * LINE if done % 3 == 0 else n
        taps, kernel_w, padding = (int(x) for x in random.integers([1, 1, 0], [6, 8, 4]))
        if high + 2 * padding < taps or wide + 2 * padding < kernel_w:
            continue
        out_h, out_w = ((size + 2 * padding - kernel) // stride + 1
                        for size, kernel in ((high, taps), (wide, kernel_w)))  # fmt: skip
        nest = in_lines(kernels)[done % 2]
        if n <= FEW_COLUMNS or nest.row.vectors > -(-n // nest.row.lanes):
            continue  # the panels of convolutions are never along k
        of = Window(high, wide, channels, kernel_w, stride, padding, out_h, out_w)
        task, held, deep = (int(x) for x in random.integers(1, [batch * out_h + 1, 8, taps + 1]))
        convolved(library, nest, widths, of, batch, n, taps, task, min(held, task), deep)
        done += 1


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


@pytest.mark.parametrize("name", ["znver4", "cascadelake", "haswell"])
def test_sums_of_products_stay_in_registers(name: str) -> None:
    """In the machine code of every kernel, no loop of products stores a vector to the stack. LLVM
    once wrote two steps of some tiles out, with the elements of A in the registers of the sums,
    and these tiles took twice their time. The transforms of minimal filtering, which read
    constants, have more values than there are registers.
    """
    machine = cpu_target(name)
    for nest in nests(machine):
        bodies = product_loops([open_kernel(nest, "kernel")], machine, least=10)
        assert nest.row.rows * nest.row.vectors < 10 or bodies, nest.name
        for body in bodies:
            assert keeps_sums(body) or "(%rip)" in body, (nest.name, body)
