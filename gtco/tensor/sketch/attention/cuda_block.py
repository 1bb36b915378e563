"""What a block of fused attention holds: the template arguments of ``device/gtco/attention.cuh``,
and the memory and registers that they take.
"""

from __future__ import annotations

from dataclasses import dataclass

# Registers of a lane beside what it computes with, fitted to what ptxas takes of 140 drawn ones:
OTHERS = 38  # places, counters, addresses of fragments
CORES_OTHERS = 24  # of the same on CUDA cores
# A piece of k or v that a lane copies: where it comes from and goes to is known from the step
# before, unless there are more than UNROLLED of them, which a loop copies that keeps LOOPED.
PIECE, UNROLLED, LOOPED = 6, 4, 2


@dataclass(frozen=True)
class Blocking:
    """The template arguments of a block, and what they take; widths as they are multiplied."""

    mma: bool
    item: int  # bytes of an element in shared memory
    depth: int
    columns: int  # of v, as decided
    tiles: int
    warps: int
    split: int
    heads: int
    keys: int
    stages: int
    held: bool
    once: bool = False  # are all keys in one step?
    computed: bool = False  # is the bias? What it is made of waits beside each score

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps

    @property
    def step(self) -> int:
        return self.keys * self.split

    @property
    def count(self) -> int:
        return self.warps * self.split * self.heads

    @property
    def width(self) -> int:
        """Columns of v in shared memory."""
        return self.columns if self.mma else -(-self.columns // 32) * 32

    @property
    def shared(self) -> int:
        """Bytes of shared memory: tiles of q, k and v, of weights on CUDA cores; where the keys are
        split, what the warps make of them lies there at the end.
        """
        elements = self.heads * self.rows * self.depth
        elements += self.stages * self.heads * self.step * (self.depth + self.width)
        stride = self.keys + (8 if self.keys % 16 == 0 else 0)
        weights = 0 if self.mma else 4 * self.count * 16 * self.tiles * stride
        sums, rows = self._sums
        merged = 4 * 32 * self.count * (sums + 2 * rows) if self.split > 1 else 0
        return max(self.item * elements + weights, merged)

    @property
    def staged(self) -> float:
        """Bytes that a warp reads of shared memory in a step."""
        if self.mma:
            query = 0 if self.held else 16 * self.tiles * self.depth
            return self.item * (self.keys * (self.depth + self.width) + query)
        rows = 4 * self.tiles  # of a lane; an access of 16 bytes by each of 32 lanes is one of 512
        scores = self.depth / 4 * (self.keys / 8 + rows)
        sums = self.keys / 4 * (rows + self.width / 8)
        return 512.0 * (scores + sums)

    @property
    def _sums(self) -> tuple[int, int]:
        """Of a lane: sums of the result, and rows they lie in."""
        if self.mma:
            return self.tiles * self.columns // 2, 2 * self.tiles
        return self.tiles * self.width // 2, 4 * self.tiles

    @property
    def registers(self) -> int:
        """About what a thread has: the result's sums, scores, each row's maximum and sum, q's
        fragments where they stay. With several steps also a quarter of the sums a second time, as
        they are scaled and added to, and the copies under way.
        """
        sums, rows = self._sums
        data = sums + self.tiles * self.keys // 2 * (1 + self.computed) + 2 * rows
        if self.mma:
            data += self.tiles * self.depth // 4 * self.held + OTHERS
        else:  # weights and values on their way from shared memory
            data += self.keys // 2 + 4 * rows + CORES_OTHERS
        if self.once:
            return data
        return data + self.mma * (sums // 4) + PIECE * self._pieces

    @property
    def _pieces(self) -> int:
        """Pieces of 16 bytes of a step's k and v whose addresses a lane keeps."""
        rows = self.heads * self.step * self.item
        each = (-(-rows * width // (512 * self.count)) for width in (self.depth, self.width))
        return sum(n if n <= UNROLLED else LOOPED for n in each)

    @property
    def arguments(self) -> str:
        """As ``AttentionBlock`` takes them."""
        given = (self.tiles, self.warps, self.split, self.heads, self.keys, self.columns)
        return ", ".join(map(str, (*given, self.stages, str(self.held).lower())))
