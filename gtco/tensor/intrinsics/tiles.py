"""Rows of the tile unit (Intel AMX), which multiplies registers of 16 rows by 64 bytes.

A micro-kernel of up to 32 rows and 32 columns takes all eight registers::

                6  7    B: 32 or 64 steps of k by 16 columns
        4       0  1    C: 16 rows by 16 columns of float32 or, for bytes, of int32
        5       2  3
        A: 16 rows by 32 steps of k of bfloat16, or 64 of bytes

There is no way from a tile to a vector register, so C ends in an array. A configuration says how
many rows each tile has, and a kernel sets it before it multiplies. Kernels call a function for each
instruction; :mod:`gtco.codegen.tiles` makes them instructions of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.stage import ITEM_BYTES

HEIGHT, LINE = 16, 64  # rows of a tile, and bytes of a row
SIDE = 2  # most tiles of C side by side, and one below the other
C, A, B = (0, 1, 2, 3), (4, 5), (6, 7)  # the registers
PREFIX = "gtco_tile_"
MULTIPLY = {"bfloat16": "multiply", "int8": "multiply8"}  # the function, by B's dtype
# Steps of k in the time that a micro-kernel one tile wide takes beside its products, about 40 ns:
# its sums are set to zero, and reach memory, where each row begins a line of its own. A wider one
# takes no more.
DRAIN = 128
CONFIGURING = 400.0  # vector instructions in the time of a configuration (53 ns on Granite Rapids)


def tile_rows(rows: int) -> tuple[int, ...]:
    """The rows of the eight tiles, for a micro-kernel of so many rows. A tile that it does not use
    has none.
    """
    top, low = min(rows, HEIGHT), max(rows - HEIGHT, 0)
    return top, top, low, low, top, low, HEIGHT, HEIGHT


def serves(ready: int, rows: int) -> bool:
    """True if the configuration for ``ready`` rows is also one for ``rows`` rows."""
    return all(r in (0, t) for r, t in zip(tile_rows(rows), tile_rows(ready), strict=True))


def call(em: Emitter, what: str, *arguments: Any) -> None:
    """Calls the function of an instruction."""
    em.called.add(PREFIX + what)
    T.evaluate(tirx.call_extern("int32", PREFIX + what, *arguments))


@contextmanager
def configured(em: Emitter, rows: int, before: int = 0) -> Iterator[None]:
    """Sets the configuration for ``rows`` rows, and at the end the one of ``before``. If there was
    none, it gives the tiles back: other libraries in the process have configurations of their own.
    """
    if before and serves(before, rows):
        yield
        return
    call(em, f"configure_{rows}")
    yield
    call(em, f"configure_{before}" if before else "release")


def multiply(
    em: Emitter,
    tile: MicroKernel,
    depth: Expr,
    a: Operand,
    b: Operand,
    c: Array,
    *,
    first: Expr = True,
    step: Callable[[Expr], None] = lambda k: None,
    passes: int = 1,
    runs: Expr = 1,
) -> None:
    """The same as :func:`gtco.tensor.intrinsics.product.multiply`."""
    blocks = [(i, j) for i in range(ceil(tile.rows / HEIGHT)) for j in range(tile.vectors)]
    width, pairs = tile.kind.step, tile.kind.step // tile.kind.b.step
    instruction = MULTIPLY[tile.kind.b.dtype]

    def place(i: int, j: int) -> tuple[Expr, Expr]:
        return _address(em, c.buffer, c.flat([i * HEIGHT, j * tile.lanes])), _bytes(c, c.shape[-1])

    def begin() -> None:
        for i, j in blocks:
            call(em, f"zero_{C[SIDE * i + j]}")

    def go_on() -> None:
        for i, j in blocks:
            call(em, f"load_{C[SIDE * i + j]}", *place(i, j))

    em.branch(first, begin, go_on)
    steps = em.index((depth + (width - 1)) // width)
    with em.loop(passes, "part"), em.loop(runs, "run") as run, em.loop(steps, "k") as position:
        k = em.index(run * depth + position * width)
        step(k)
        number = em.index((run * steps + position) * pairs)
        for i, j in blocks:
            if i == 0:
                call(em, f"load_{B[j]}", *_columns(em, tile, b, number, j))
            if j == 0:
                at = a.offset + i * HEIGHT * a.stride + a.along(k)
                call(em, f"load_{A[i]}", _address(em, a.buffer, at), _bytes(a, a.stride))
            call(em, f"{instruction}_{C[SIDE * i + j]}_{A[i]}_{B[j]}")
    for i, j in blocks:
        call(em, f"store_{C[SIDE * i + j]}", *place(i, j))


def _columns(em: Emitter, tile: MicroKernel, b: Operand, number: Expr, j: int) -> tuple[Expr, Expr]:
    """The place of tile j of B, whose rows are pairs, or fours of bytes, from ``number``
    on.
    """
    elements = tile.kind.b.step if str(b.buffer.dtype) != "int32" else 1  # elements of a pair, or 1
    apart = elements * tile.lanes if b.vector is None else b.vector
    at = b.offset + number * b.stride + j * apart
    return _address(em, b.buffer, at), _bytes(b, b.stride)


def _address(em: Emitter, buffer: Any, at: Expr) -> Expr:
    return tirx.address_of(buffer[em.index(at)])


def _bytes(of: Operand | Array, stride: Expr) -> Expr:
    """A stride in elements, in bytes."""
    nbytes = stride * ITEM_BYTES[str(of.buffer.dtype)]
    return tirx.const(nbytes, "int64") if isinstance(nbytes, int) else tirx.Cast("int64", nbytes)
