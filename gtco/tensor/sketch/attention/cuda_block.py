"""The block of a fused attention: the template arguments of ``device/gtco/attention.cuh``, and the
memory and registers that they take.
"""

from __future__ import annotations

from dataclasses import dataclass

# Further registers of a lane, fitted to what ptxas takes for 140 random blockings:
OTHERS = 38  # places, counters, addresses of fragments
# Places of fragments and copies, from step to step; with one stage the copies stand between the
# scores and their sums, and what both need is kept over them.
KEPT, KEPT_OVER = 20, 36
CORES_OTHERS = 24  # the same on CUDA cores
# Registers of a piece of k or v that a lane copies: its source and destination are known from the
# step before. More than UNROLLED pieces are copied by a loop, which keeps LOOPED registers.
PIECE, UNROLLED, LOOPED = 6, 4, 2
# Operations of a copy: of a place that is known, is computed, and is computed by a loop.
KNOWN, COMPUTED, REPEATED = 2.0, 8.0, 30.0


@dataclass(frozen=True)
class Blocking:
    """The template arguments of a block, and the resources that they take. Widths are those that
    are multiplied, padding included.
    """

    mma: bool
    item: int  # bytes of an element in shared memory
    depth: int
    columns: int  # columns of v, as decided
    tiles: int
    warps: int
    split: int
    heads: int
    keys: int
    stages: int
    held: bool
    once: bool = False  # True if all keys are in one step
    addressed: bool = True  # False if pieces of k or v are computed and not copied
    computed: bool = False  # True if the bias is computed: its inputs wait beside each score

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
        """Bytes of shared memory: tiles of q, k and v, and on CUDA cores of the weights. If the
        keys are split, the warps put their results there at the end.
        """
        elements = self.heads * self.rows * self.depth
        elements += self.stages * self.heads * self.step * (self.depth + self.width)
        stride = self.keys + (8 if self.keys % 16 == 0 else 0)
        weights = 0 if self.mma else 4 * self.count * 16 * self.tiles * stride
        return max(self.item * elements + weights, 4 * self.merged)

    @property
    def merged(self) -> int:
        """The floats that a block's warps put into shared memory where they share the keys."""
        sums, rows = self._sums
        return 32 * self.count * (sums + 2 * rows) if self.split > 1 else 0

    @property
    def staged(self) -> float:
        """Bytes that a warp reads from shared memory in a step."""
        if self.mma:
            query = 0 if self.held else 16 * self.tiles * self.depth
            return self.item * (self.keys * (self.depth + self.width) + query)
        rows = 4 * self.tiles  # rows of a lane; 32 accesses of 16 bytes are one of 512
        scores = self.depth / 4 * (self.keys / 8 + rows)
        sums = self.keys / 4 * (rows + self.width / 8)
        return 512.0 * (scores + sums)

    @property
    def _sums(self) -> tuple[int, int]:
        """The sums of the result that a lane holds, and the number of rows they lie in."""
        if self.mma:
            return self.tiles * self.columns // 2, 2 * self.tiles
        return self.tiles * self.width // 2, 4 * self.tiles

    @property
    def registers(self) -> int:
        """An estimate of a thread's registers: the sums of the result, scores, each row's maximum
        and sum, and q's fragments if they stay. If there are several steps, places are kept from
        one to the next. Where the copies compute their places, those under way take some, and the
        sums a quarter of their number a second time, while they are scaled and added to.
        """
        sums, rows = self._sums
        data = sums + self.tiles * self.keys // 2 * (1 + self.computed) + 2 * rows
        if self.mma:
            data += self.tiles * self.depth // 4 * self.held + OTHERS
        else:  # weights and values on their way from shared memory
            data += self.keys // 2 + 4 * rows + CORES_OTHERS
        if self.once:
            return data
        if self.mma and all(self._known(width) for width in (self.depth, self.width)):
            return data + (KEPT if self.stages > 1 else KEPT_OVER)
        return data + self.mma * (sums // 4) + PIECE * self._pieces

    @property
    def copying(self) -> float:
        """Operations of all lanes that copy a step's k and v, whose rows lie evenly in memory."""
        return sum(
            self.heads * self.step * width / 8 * self._copy(width)
            for width in (self.depth, self.width)
        )

    def _known(self, width: int) -> bool:
        """True if a thread has the same piece of every so many rows, and so knows the places of all
        from that of its first one (``StepLoader``).
        """
        rows, left = divmod(32 * self.count, width // 8)
        regular = self.addressed and self.heads == 1 and not left
        return regular and rows % 8 == 0 and self.step % rows == 0

    def _copy(self, width: int) -> float:
        """Operations of a piece's copy."""
        if self._known(width):
            return KNOWN
        each = -(-self.heads * self.step * width // 8 // (32 * self.count))
        return COMPUTED if each <= UNROLLED else REPEATED

    @property
    def _pieces(self) -> int:
        """Pieces of 16 bytes of a step's k and v whose addresses a lane keeps."""
        rows = self.heads * self.step * self.item
        each = (-(-rows * width // (512 * self.count)) for width in (self.depth, self.width))
        return sum(n if n <= UNROLLED else LOOPED for n in each)

    @property
    def arguments(self) -> str:
        """The arguments in the order of ``AttentionBlock``."""
        given = (self.tiles, self.warps, self.split, self.heads, self.keys, self.columns)
        return ", ".join(map(str, (*given, self.stages, str(self.held).lower())))
