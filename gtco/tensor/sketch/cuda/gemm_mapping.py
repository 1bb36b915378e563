"""A contraction on a GPU under one mapping of its loops: how its operands are read, how its sums
are stored, and the tiles that fit (the second step of GTCO's hierarchical mapping).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gtco.gpu import GpuTarget
from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.mapped import MappedProduct
from gtco.tensor.analysis.placement import stores_columns
from gtco.tensor.cuda.tensor_core import Row
from gtco.tensor.sketch.cuda.gemm_tiles import Tiles, block_options, stage_options, warp_options
from gtco.tensor.sketch.cuda.operands import CHUNK, Reading, Source
from gtco.tensor.space import Option
from gtco.tensor.stage import ITEM_BYTES, Stage

# What fits: by the block's tile, by the warps', numbers of stages.
Tilings = Mapping[Option, Mapping[Option, tuple[int, ...]]]


def times(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def sizes(text: Option) -> list[int]:
    return [int(size) for size in str(text).split("x")]


@dataclass(frozen=True)
class Mapped:
    """A stage's contraction under one mapping, on a target."""

    stage: Stage
    target: GpuTarget
    product: MappedProduct
    tail: Epilogue
    operand: str

    @property
    def name(self) -> str:
        """The loops that are m, n and k, by the initials of their words: ``(r,c)(f)(tr,tc,c)``."""

        def short(loop: str) -> str:
            return "".join(word[0] for word in loop.split() if word != "of")

        m = self.product.mapping
        groups = (m.m, m.n, self.product.inside)
        return "".join(f"({','.join(map(short, group))})" for group in groups)

    @cached_property
    def a_source(self) -> Source:
        return Source(self.stage, self.product, "a")

    @cached_property
    def b_source(self) -> Source:
        return Source(self.stage, self.product, "b")

    @cached_property
    def a(self) -> Reading:
        return self.a_source.reading()

    @cached_property
    def b(self) -> Reading:
        return self.b_source.reading()

    @cached_property
    def transposed(self) -> bool:
        """Do rows of C, not columns, lie side by side in the output?"""
        return stores_columns(self.product, self.tail)

    def tilings(self, row: Row) -> Tilings:
        """The tree of what fits the target."""
        known = self._tilings
        if row.name not in known:
            known[row.name] = dict(self._tilings_of(row))
        return known[row.name]

    @cached_property
    def _tilings(self) -> dict[str, Tilings]:
        return {}

    def _tilings_of(self, row: Row) -> Iterator[tuple[str, Mapping[Option, tuple[int, ...]]]]:
        for block in block_options(self.target, self.operand, self.product.extents):
            fitting: dict[Option, tuple[int, ...]] = {}
            for warps in warp_options(block, row):
                tiles = self.tiles(row, block, warps, 2)
                if self._chunked(row, warps) and (found := stage_options(tiles, self.target)):
                    fitting[times(*warps)] = found
            if fitting:
                yield times(*block), fitting

    def _chunked(self, row: Row, warps: tuple[int, int, int]) -> bool:
        """Are the rows and columns of a lane of CUDA cores whole chunks, where neighbours along
        them are read at once?
        """
        if row.unit == "mma":
            return True
        chunk = CHUNK // ITEM_BYTES[self.operand]
        sides = zip((self.a, self.b), warps, (4, 8), strict=False)
        return all(side.along_k or size // lanes % chunk == 0 for side, size, lanes in sides)

    def tiles(
        self, row: Row, block: tuple[int, int, int], warps: tuple[int, int, int], stages: int
    ) -> Tiles:
        *warp, parts = warps
        return Tiles(
            row,
            self.operand,
            self.product.extents,
            block,
            (warp[0], warp[1]),
            parts,
            stages,
            self.transposed,
            (self.a.way == "computed") * block[0] + (self.b.way == "computed") * block[1],
        )

    def chosen(self, row: Row, chosen: Mapping[str, Any]) -> Tiles:
        """The tiles of a config's choices."""
        m, n, k = sizes(chosen["block"])
        wm, wn, parts = sizes(chosen["warps"])
        return self.tiles(row, (m, n, k), (wm, wn, parts), int(chosen["stages"]))
