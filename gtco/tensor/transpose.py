"""Transposing a square block in registers, as shuffles."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from gtco.tensor.emit import Emitter, Expr


def transpose(em: Emitter, rows: Sequence[Expr]) -> list[Expr]:
    """n vectors of n lanes (n a power of two) -> the n columns, by log2(n) rounds of two-operand
    shuffles.

    Round b exchanges, for rows i and i + b, the lanes that have bit b clear in one and set in the
    other.
    """
    n = len(rows)
    current = list(rows)
    b = 1
    while b < n:
        for i in range(n):
            if i & b:
                continue
            low, high = current[i], current[i + b]
            first = [lane if not lane & b else n + lane - b for lane in range(n)]
            second = [lane + b if not lane & b else n + lane for lane in range(n)]
            current[i] = em.let(tirx.Shuffle([low, high], first), "t")
            current[i + b] = em.let(tirx.Shuffle([low, high], second), "t")
        b *= 2
    return current
