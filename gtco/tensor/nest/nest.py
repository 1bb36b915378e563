"""A product's loop nest: the cuts of its extents and the places of its operands, in one value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm

from gtco.tensor.emit.scratch import ALIGN, Piece
from gtco.tensor.intrinsics.table import NIBBLES, Kind, Layout, MicroKernel
from gtco.tensor.intrinsics.tiles import DRAIN
from gtco.tensor.nest.shape import TaskShape, cut, unit_of
from gtco.tensor.stage import INT4, ITEM_BYTES, item_bytes

PLACES_OF_A = ("direct", "packed", "windows")
PLACES_OF_B = ("direct", "packed", "panels", "widened")
ORDERS = ("panels", "rows", "k")


@dataclass(frozen=True)
class Windows:
    """A task's copy of the part of an input in which its rows of A overlap.

    - ``copied``: its elements;
    - ``new``: the share of them that the task before does not copy;
    - ``fresh``: the share of a row of A that the row before does not have;
    - ``whole``: the elements of the input.
    """

    copied: int
    new: float
    fresh: float
    whole: int


@dataclass(frozen=True)
class Placed:
    """The place of an operand when the row reads it.

    - ``how``: "direct" (in an input), "packed" (copied to scratch), "windows" (in a copy of an
      input, in which rows overlap), "panels" (a constant that lies in panels), "widened" (a panel
      of them that is converted to scratch);
    - ``dtype``: the dtype in the tensor;
    - ``stride``: the elements between rows in an input, 0 if there is no such stride;
    - ``windows``: of "windows";
    - ``batches``: so many neighbouring batches read the same matrix.
    """

    how: str
    dtype: str
    stride: int = 0
    windows: Windows | None = None
    batches: int = 1

    @property
    def nbytes(self) -> float:
        """Bytes of an element in the tensor."""
        return item_bytes(self.dtype)


@dataclass(frozen=True)
class Nest:
    """The loops of C[batch, m, n] = A[batch, m, k] x B[batch, k, n].

    - ``extents``: batch, m, n, k;
    - ``chunks``: those of rows and of columns;
    - ``mc``: the number of row blocks that one pass over the panels works on; None means all of a
      task;
    - ``order``: the loops of a task, outer to inner: "panels" (blocks of k, panels, blocks of
      rows), "rows" (blocks of rows, of k, panels) or "k" (panels, blocks of k, of rows);
    - ``lines``: rows lie in so many lines, such as those of an image. A block of rows lies in one
      line, and a task has up to the second number of lines;
    - ``transform``: numbers of positions and of outputs, such as Winograd's. A task computes one
      product for each position and panel, each of other A and B, and for every column of A it reads
      as many inputs as there are outputs. An element of C at all positions becomes these outputs;
    - ``taps``: with positions, so many numbers are stored for an element of B that is "widened", of
      which B at all positions is made; 0 otherwise;
    - ``by_block``: with positions, a block of rows takes all of them before the next block does, so
      that the sums of one block are kept, and not those of all.

    Raises ValueError if such loops are not possible.
    """

    extents: tuple[int, int, int, int]
    row: MicroKernel
    chunks: tuple[int, int]
    kc: int
    mc: int | None
    order: str
    a: Placed
    b: Placed
    out: str = "float32"
    prefetch: str = "none"
    lines: tuple[int, int] = (1, 1)
    transform: tuple[int, int] = (1, 1)
    taps: int = 0
    by_block: bool = False

    def __post_init__(self) -> None:
        if fault := self.fault():
            raise ValueError(f"this loop nest is not possible: {fault}")

    def fault(self) -> str:
        """The reason why there are no such loops; empty if there are."""
        _, _, n, k = self.extents
        kind = self.row.kind
        if min(self.extents) < 1 or min(self.chunks) < 1:
            return f"extents {self.extents} and chunks {self.chunks} must be positive"
        if not 1 <= self.kc <= k or (self.kc < k and self.kc % kind.step):
            return f"kc={self.kc} must be k={k}, or less and a multiple of {kind.step}"
        if self.b.dtype == INT4 and self.kc < k and self.kc % NIBBLES.step:
            return f"kc={self.kc} must be k={k}, or end where {NIBBLES.step} steps of int4 do"
        if self.order not in ORDERS:
            return f"order={self.order} is none of {', '.join(ORDERS)}"
        if self.prefetch not in ("none", "next", "both"):
            return f"prefetch={self.prefetch} is none of none, next, both"
        if self.a.how not in PLACES_OF_A or self.b.how not in PLACES_OF_B:
            return f"A cannot be {self.a.how}, or B cannot be {self.b.how}"
        if self.mc is not None and (self.order != "panels" or not 1 <= self.mc):
            return f"mc={self.mc} must be positive, and needs order=panels"
        if self.order == "k" and (self.a.how == "packed" or not self.constant_b):
            return "order=k would pack A and B once for each panel"
        lines, together = self.lines
        if not 1 <= together <= lines or self.extents[1] % lines:
            return f"{self.extents[1]} rows cannot lie in {lines} lines, {together} in a task"
        if lines > 1 and (self.chunks[0] > 1 or self.held < self.shape.task_blocks * together):
            return "a task and each of its passes must have whole lines"
        if self.positions > 1 and self.kblocks > 1:
            return "the sums of several positions need one block of k"
        if (self.positions > 1 and self.b.how == "widened") != (self.taps > 0):
            return f"B is {self.b.how}, and {self.taps} of it make {self.positions} positions"
        if (self.positions > 1 or self.a.how == "windows") and not self.constant_b:
            return "windows and positions need a constant B"
        if (self.a.how == "windows") != (self.a.windows is not None):
            return f"A is {self.a.how}, its windows are {self.a.windows}"
        if self.order == "rows" and self.b.how == "widened":
            return "order=rows would widen each panel once for each block of rows"
        if self.order == "rows" and self.b.how == "packed" and self.kc < k:
            return "order=rows would pack each block of B once for each block of rows"
        if self.prefetch != "none" and not self.constant_b:
            return f"prefetch={self.prefetch} needs a constant B"
        if self.prefetch == "both" and self.b.how == "widened":
            return "prefetch=both needs panels that are not widened"
        if self.a.how == "direct" and (self.a.dtype != kind.a.dtype or k % kind.step):
            return f"A of {self.a.dtype} and k={k} must be packed for {self.row.name}"
        if self.b.how == "direct" and (kind.b.step > 1 or n % self.row.columns):
            return f"B with {n} columns must be packed for {self.row.name}"
        if self.b.how == "packed" and kind.word > 4:
            return f"{self.row.name} needs a constant B"
        return ""

    @cached_property
    def shape(self) -> TaskShape:
        """The tasks, their row blocks and their panels."""
        batch, m, n, _ = self.extents
        row, full = self.row, self.row.kind.height > 1
        size = batch, m // self.lines[0], n
        return cut(*size, row.rows, row.columns, *self.chunks, full, *self.lines, unit_of(row))

    @property
    def positions(self) -> int:
        """The products of a panel."""
        return self.transform[0]

    @property
    def stored(self) -> Layout:
        """The layout in which constant B lies."""
        return NIBBLES if self.b.dtype == INT4 else self.row.kind.b

    @property
    def whole(self) -> int:
        """The steps at a multiple of which a panel of constant B ends."""
        return lcm(self.row.kind.step, self.stored.step)

    @property
    def constant_b(self) -> bool:
        """True if B is known at compile time."""
        return self.b.how in ("panels", "widened")

    @property
    def kblocks(self) -> int:
        """The number of blocks of k."""
        return ceil(self.extents[3] / self.kc)

    @property
    def held(self) -> int:
        """The row blocks of a task that one pass over its panels works on."""
        if self.order == "rows":
            return 1
        return self.task_blocks if self.mc is None else self.mc

    @property
    def task_blocks(self) -> int:
        """The most row blocks of a task, in all of its lines."""
        return self.shape.task_lines * self.shape.task_blocks

    @property
    def passes(self) -> float:
        """The passes of a task over its panels, as an average."""
        return self.task_blocks / self.held

    @property
    def lda(self) -> int:
        """The stride of packed rows of A. A multiple of 1 KiB would put all rows of a tile into a
        few cache sets.
        """
        if self.row.kind.in_tiles or self.positions > 1:  # many rows, or planes, at once
            return odd_lines(self.kc, self.row.kind.a.dtype)
        item = self.row.kind.a.nbytes
        line = ALIGN // item
        return self.kc + (line if self.kc * item % 1024 == 0 else -self.kc % line)

    @property
    def configurations(self) -> int:
        """How often all tasks together configure the tile unit."""
        blocks = self.extents[0] * self.shape.lines * self.shape.panels * self.kblocks
        return self.shape.configurations(self.row, self.shape.tasks, blocks)

    @property
    def level0(self) -> tuple[str, float]:
        """The micro-kernel of a block of average height, and its work."""
        blocks = self.shape.task_blocks
        height = self.shape.covered(self.row, blocks) / blocks
        depth = self.kc + (DRAIN / self.row.vectors if self.row.kind.in_tiles else 0)
        return self.row.kernel_of(ceil(height)), self.row.work(height, depth)

    def pieces(self) -> Iterator[Piece]:
        """The scratch of a thread: copies of A and B, and the tiles of C."""
        shape, columns, kind = self.shape, self.row.columns, self.row.kind
        if self.a.windows is not None:
            yield Piece("image", (self.a.windows.copied,), kind.a.dtype)
        rows, sums = shape.rows(self.held), kind.accumulator
        if self.a.how == "packed":
            plane = self.positions, odd_lines(rows * self.lda, kind.a.dtype)
            yield Piece("rows", plane if self.positions > 1 else (rows, self.lda), kind.a.dtype)
        if self.b.how == "packed":
            depth, dtype = packed_steps(self.kc, kind)
            yield Piece("panels", (shape.task_panels, depth, columns), dtype)
        if self.b.how == "widened":
            whole = NIBBLES.step if self.b.dtype == INT4 else 1  # steps that are widened at once
            steps = ceil(self.kc / whole) * whole
            if self.taps:  # positions are stored at once
                apart = odd_lines(steps * columns, kind.b.dtype)
                yield Piece("panel", (self.positions, apart), kind.b.dtype)
            else:
                yield Piece("panel", (steps, columns), kind.b.dtype)
        if self.positions > 1:
            kept = self.row.rows if self.by_block else rows
            yield Piece("sums", (self.positions, odd_lines(kept * columns, sums)), sums)
            return
        panels = 1 if self.order == "k" else shape.task_panels
        tiles = self.held * panels if self.kblocks > 1 else 1
        yield Piece("tiles", (tiles, self.row.rows, columns), sums)


def odd_lines(elements: int, dtype: str) -> int:
    """The number of elements, rounded up to an odd number of cache lines. Data at such distances
    does not share cache sets.
    """
    line = ALIGN // ITEM_BYTES[dtype]
    return (ceil(elements / line) | 1) * line


def packed_steps(kc: int, kind: Kind) -> tuple[int, str]:
    """The number of steps of B that a block of k has in scratch, up to a whole iteration, and their
    dtype. A pair of 16-bit elements is an int32.
    """
    layout = kind.b
    if layout.step == 1:
        return kc, layout.dtype
    assert kind.word == 4
    return ceil(kc / kind.step) * kind.step // layout.step, "int32"
