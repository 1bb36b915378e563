"""Keys and values of attention as the rows of micro-kernels read them. In bfloat16 these are pairs:
an int32 holds two neighbours along the sum, and a zero follows the last.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from gtco.tensor.emit.bfloat16 import pair
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.transpose import transpose
from gtco.tensor.sketch.shared.streaming import each_vector

# (row, column) -> the value; as the bits of a bfloat16 where pairs are made
Element = Callable[[Expr, Expr], Expr]


def pack_keys(em: Emitter, keys: Array, key: Element, n: int, d: int) -> None:
    """keys[p, d, l] = K[p * lanes + l, d], zero beyond n. Blocks are transposed in registers."""
    lanes = em.lanes

    def block(p: Expr, d0: Expr, width: int, present: int) -> None:
        cell = em.registers(lanes * lanes)
        for r in range(lanes):
            if r >= present or width < lanes:
                em.store_vector(cell, [r * lanes], em.splat(0.0))
            if r < present:
                with em.vector(width) as v:
                    em.store(cell, [r * lanes + v], key(p * lanes + r, d0 + v))
        rows = [em.let(em.load_vector(cell, [r * lanes]), "r") for r in range(lanes)]
        for c, column in enumerate(transpose(em, rows)[:width]):
            em.store_vector(keys, [p, d0 + c, 0], column)

    _each_block(em, n, d, lanes, block)


def pack_values(em: Emitter, values: Array, value: Element, n: int, e: int) -> None:
    """values[r, j] = V[r, j], zero beyond e."""
    with em.loop(n, "n") as r:
        _row(em, values, r, e, lambda j: value(r, j))


def _each_block(
    em: Emitter, n: int, d: int, wide: int, block: Callable[[Expr, Expr, int, int], None]
) -> None:
    """``block`` for each ``wide`` columns of each panel of ``n`` keys: the panel, the vector of it
    that the block begins with, and the columns and the keys that the block has.
    """

    def panel(p: Expr, present: int) -> None:
        whole, rest = divmod(d, wide)
        if whole:
            with em.loop(whole, "c") as c:
                block(p, c * em.lanes, wide, present)
        if rest:
            block(p, whole * em.lanes, rest, present)

    full, rest = divmod(n, em.lanes)
    if full:
        with em.loop(full, "p") as p:
            panel(p, em.lanes)
    if rest:
        panel(full, rest)


def _row(em: Emitter, values: Array, r: Expr, e: int, content: Callable[[Expr], Expr]) -> None:
    """values[r, j] = content(j), zero beyond e."""
    lanes = em.lanes

    def vector(j: Expr, width: int) -> None:
        with em.vector(width) as v:
            em.store(values, [r, j + v], content(j + v))
        if width < lanes:
            with em.vector(lanes - width) as v:
                em.store(values, [r, j + width + v], tirx.const(0, values.dtype))

    each_vector(em, e, vector)


def pack_key_pairs(em: Emitter, keys: Array, key: Element, n: int, d: int) -> None:
    """keys[p, c, l] = the pair K[p * lanes + l, 2 c] and K[p * lanes + l, 2 c + 1]; zero beyond n,
    and beyond d to the end of ``keys``, which is within a block.

    The pairs of a row lie in the order needed, so blocks of pairs are transposed in registers.
    """
    lanes = em.lanes
    wide = 2 * lanes

    def block(p: Expr, at: Expr, width: int, present: int) -> None:
        cell = em.registers(lanes * wide, "uint16")
        for r in range(lanes):
            if r >= present or width < wide:
                zero = em.splat(tirx.const(0, "uint16"), wide)
                em.store_vector(cell, [r * wide], zero, wide)
            if r < present:
                with em.vector(width) as v:
                    em.store(cell, [r * wide + v], key(p * lanes + r, 2 * at + v))
        rows = [
            em.let(tirx.reinterpret(f"int32x{lanes}", em.load_vector(cell, [r * wide], wide)), "r")
            for r in range(lanes)
        ]
        end = lanes if width == wide else keys.shape[1] - at
        for c, column in enumerate(transpose(em, rows)[:end]):
            em.store_vector(keys, [p, at + c, 0], column)

    _each_block(em, n, d, wide, block)


def pack_value_pairs(em: Emitter, values: Array, value: Element, n: int, e: int) -> None:
    """values[r, j] = the pair V[2 r, j] and V[2 r + 1, j]; zero beyond e, and beyond n to the end
    of ``values``.
    """
    with em.loop(n // 2, "n") as r:
        _row(em, values, r, e, lambda j: pair(value(2 * r, j), value(2 * r + 1, j)))
    if n % 2:
        _row(em, values, n // 2, e, lambda j: tirx.Cast("int32", value(n - 1, j)))
    filled = -(-n // 2)
    if filled < values.shape[0]:
        with em.loop(values.shape[0] - filled, "n") as r:
            _row(em, values, filled + r, e, lambda j: tirx.const(0, "int32"))
