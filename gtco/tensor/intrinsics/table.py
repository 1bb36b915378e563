"""The register level as data: micro-kernels built on vector FMA, one row each.

An intrinsic is described by its compute abstraction (the loop extents it covers and which operand
each loop indexes) and its memory abstraction (what it holds in registers), after GTCO Section V-B.
:func:`micro_kernels` lists the rows that a target's register file admits (FILTERBYISA of Helix,
Alg. 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gtco.target import Target

FMA_LATENCY = 4  # cycles; chains needed to fill the ports: latency x ports


@dataclass(frozen=True)
class FmaTile:
    """C[rows, vectors*lanes] += A[rows, k] x B[k, vectors*lanes], C in registers, A broadcast, B
    loaded by vectors.

    Compute abstraction: i indexes (C, A), j indexes (C, B), k is reduced and indexes (A, B). Memory
    abstraction: rows*vectors accumulators, ``vectors`` registers of B, one of A.
    """

    rows: int
    vectors: int
    lanes: int

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.vectors}"

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def registers(self) -> int:
        return self.rows * self.vectors + self.vectors + 1

    @property
    def flops(self) -> int:
        """Floating-point operations of one step of k."""
        return 2 * self.rows * self.columns

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(name: str, lanes: int) -> FmaTile:
        rows, vectors = name.split("x")
        return FmaTile(int(rows), int(vectors), lanes)


def micro_kernels(target: Target) -> tuple[FmaTile, ...]:
    """Tiles that fit the registers, widest rows first for each number of vectors; none that could
    not hide FMA's latency and has a taller sibling.
    """
    tiles = []
    for vectors in (1, 2, 3, 4, 6):
        tallest = (target.registers - 1 - vectors) // vectors
        tiles += [FmaTile(rows, vectors, target.lanes) for rows in range(min(tallest, 14), 0, -1)]
    return tuple(tiles)
