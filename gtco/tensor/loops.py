"""The loops of a kernel as lines to read. A product's come from its nest
(:mod:`gtco.tensor.nest.lines`), those of other kernels for CPUs from the program itself
(:mod:`gtco.tensor.emit.lines`). The loops of a kernel for GPUs are those of the template that it
calls, and its sketch says them (:mod:`gtco.tensor.cuda.loops`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How the iterations of a loop run: they are shared by the threads; they follow each other; they are
# the lanes of a vector; they are unrolled; they follow each other while their sums stay in
# registers.
THREADS, STEPS, VECTOR, UNROLLED, REGISTERS = "threads steps vector unrolled registers".split()
# On a GPU, they are the blocks of a launch; the warps of a block share them. THREADS are there
# those of a block.
BLOCKS, WARPS = "blocks", "warps"


@dataclass(frozen=True)
class Line:
    """A loop, or a statement in one.

    - ``depth``: of the loops around it
    - ``loop``: the name of its variable; "" for a statement
    - ``extent``: the most iterations; None if no number is known before the program runs
    - ``step``: what an iteration goes forward by, in elements of the axis; 1 unless the nest knows
    - ``runs``: how the iterations run; "" for a statement
    - ``text``: what it is, in words; for a loop without an ``extent``, the expression that has it
    """

    depth: int
    loop: str = ""
    extent: int | None = None
    step: int = 1
    runs: str = ""
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that this line needs. :meth:`from_json` fills in the others."""
        found: dict[str, Any] = {"depth": self.depth}
        if self.loop:
            found |= {"loop": self.loop, "extent": self.extent, "runs": self.runs}
        if self.step != 1:
            found["step"] = self.step
        return found | ({"text": self.text} if self.text else {})

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Line:
        known = {name: found[name] for name in Line.__dataclass_fields__ if name in found}
        return Line(**known)

    def __str__(self) -> str:
        """``for panel in 3 step 8:  # text``, indented by its depth."""
        said = f"  # {self.text}" if self.loop and self.text and self.extent is not None else ""
        return "  " * self.depth + self.code + said

    @property
    def code(self) -> str:
        """The line without its indent and, if it is a loop's, without its text."""
        if not self.loop:
            return self.text
        many = self.text or "?" if self.extent is None else str(self.extent)
        step = f" step {self.step}" if self.step != 1 else ""
        where = f" ({self.runs})" if self.runs and self.runs != STEPS else ""
        return f"for {self.loop} in {many}{step}{where}:"
