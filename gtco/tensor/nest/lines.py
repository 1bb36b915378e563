"""A nest as lines to read: its loops, outermost first, and what is packed in which of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from gtco.tensor.loops import REGISTERS, STEPS, THREADS, Line
from gtco.tensor.nest.nest import Nest

_AHEAD = {
    "none": "",
    "next": "; the next one is prefetched",
    "both": "; the next one is prefetched, and this one a few steps ahead",
}
_PLACES = {
    "direct": "in its input",
    "packed": "in scratch",
    "windows": "in scratch",
    "panels": "a constant in panels",
    "widened": "in scratch",
}


def nest_lines(
    nest: Nest, first: str = "", before: Sequence[str] = (), after: Sequence[str] = ()
) -> tuple[Line, ...]:
    """The loops of a product C = A x B. A loop of one iteration is left out, as in the program.

    ``first``: what a task does before its loops, in words; ``before`` and ``after``: the operators
    of the stage that make A, and those behind the product.
    """
    lines = _Lines(nest)
    lines.task()
    if first:
        lines.says(first)
    lines.blocks(before)
    lines.panels()
    lines.product(after)
    return tuple(lines.made)


class _Lines:
    """The lines so far, and the depth of the next one."""

    def __init__(self, nest: Nest) -> None:
        self.nest, self.shape, self.row = nest, nest.shape, nest.row
        self.held = min(nest.held, nest.task_blocks) // nest.shape.task_lines  # in a line
        self.made: list[Line] = []
        self.depth = 0

    def loop(self, name: str, extent: int, step: int, runs: str, text: str) -> None:
        if extent > 1 or runs == THREADS:
            self.made.append(Line(self.depth, name, extent, step, runs, text))
            self.depth += 1

    def says(self, text: str) -> None:
        self.made.append(Line(self.depth, text=text))

    def task(self) -> None:
        """The loop whose iterations the threads share."""
        batch, m, n, _ = self.nest.extents
        shape = self.shape
        groups = ceil(shape.lines / shape.task_lines)
        cuts = {"of the batch": batch, "of lines": groups, "of rows": shape.chunks_m}
        cuts["of columns"] = self.shape.chunks_n
        cut = " x ".join(f"{number} {what}" for what, number in cuts.items() if number > 1)
        rows, columns = shape.task_rows, min(n, self.columns)
        size = f"{rows} of {m} rows by {columns} of {n} columns"
        self.loop("task", shape.tasks, 1, THREADS, f"{cut}: at most {size}" if cut else size)

    @property
    def columns(self) -> int:
        """The most columns of a task, those behind the last one included."""
        return self.shape.task_panels * self.row.columns

    @property
    def parts(self) -> int:
        """The most passes of a task over its panels."""
        return ceil(self.nest.task_blocks / self.nest.held)

    def blocks(self, before: Sequence[str]) -> None:
        """The loops over parts of the rows and blocks of k, and what is packed there."""
        nest, kind, rows = self.nest, self.row.kind, self.shape.rows(self.held)
        how = f", with {', '.join(before)}" if before else ""
        if nest.a.windows is not None:
            part = f"{nest.a.windows.copied} elements of the input {kind.a.dtype}"
            self.says(f"copy {part} -> scratch, where rows of A overlap{how}")
        self.loop("part", self.parts, rows, STEPS, "rows that all columns use before the next ones")
        if nest.order != "k":
            self.kblocks()
        if nest.a.how == "packed":
            done = "pack" if nest.positions == 1 else f"transform inputs to {nest.positions}"
            self.says(f"{done} A[{rows}, {nest.kc}] {kind.a.dtype} -> scratch{how}")
        if nest.b.how == "packed":
            once = ", in the first part" if self.parts > 1 and nest.kblocks == 1 else ""
            self.says(f"pack B[{nest.kc}, {self.columns}] {kind.b.dtype} -> scratch{once}")

    def kblocks(self) -> None:
        """The loop over blocks of k."""
        nest = self.nest
        self.loop("kb", nest.kblocks, nest.kc, STEPS, f"blocks of k, which is {nest.extents[3]}")

    def panels(self) -> None:
        """The loops over panels of columns, positions, lines and blocks of rows."""
        nest, row, heights = self.nest, self.row, self.shape.heights
        ahead = _AHEAD[nest.prefetch]
        self.loop("panel", self.shape.task_panels, row.columns, STEPS, f"panels of columns{ahead}")
        if nest.b.how == "widened":
            done = f"transform {nest.taps} taps to {nest.positions} of" if nest.taps else "convert"
            part = f"B[{nest.kc}, {row.columns}] {nest.b.dtype}"
            self.says(f"{done} {part} -> scratch, {row.kind.b.dtype}")
        if nest.order == "k":
            self.kblocks()
        if not nest.by_block:
            self.positions()
        self.loop("line", self.shape.task_lines, 1, STEPS, "lines of rows")
        high = f"{' or '.join(map(str, heights))} rows"
        again = self.shape.again
        more = f"; the last one multiplies {again} of the block before again" if again else ""
        self.loop("block", self.held, max(heights), STEPS, f"blocks of {high}{more}")
        if nest.by_block:
            self.positions()

    def positions(self) -> None:
        """The loop over the products of a panel."""
        self.loop("position", self.nest.positions, 1, STEPS, "products of other A and B")

    def product(self, after: Sequence[str]) -> None:
        """The micro-kernel, and what becomes of its sums."""
        nest, kind, columns = self.nest, self.row.kind, self.row.columns
        rows, several = max(self.shape.heights), nest.kblocks > 1
        begin = "C = 0, or the sums of the kb before" if several else "C = 0"
        self.says(f"{begin}: [{rows}, {columns}] {kind.accumulator}")
        where = f"A {_PLACES[nest.a.how]}, B {_PLACES[nest.b.how]}"
        sums = "the tile unit's registers" if kind.in_tiles else "vector registers"
        steps = ceil(nest.kc / kind.step)
        self.made.append(Line(self.depth, "k", steps, kind.step, REGISTERS, f"C in {sums}"))
        product = f"A[{rows}, {kind.step}] x B[{kind.step}, {columns}]"
        self.made.append(Line(self.depth + 1, text=f"C += {product}: {where}"))
        work = f"{', '.join(after) or 'C'} -> output, {nest.out}"
        if nest.positions == 1:
            self.says(f"C -> scratch; {'at the last kb: ' if several else ''}{work}")
            return
        self.says("C -> scratch")
        self.depth = next(line.depth for line in self.made if line.loop == "position")
        self.says(f"transform {nest.positions} C to {nest.transform[1]}; {work}")
