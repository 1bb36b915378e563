"""The loops of a kernel for GPUs as lines to read. A sketch says them with the numbers that it also
gives to the template (``device/gtco/*.cuh``), because the loops themselves are the template's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gtco.tensor.analysis.chains import ancestors, derived
from gtco.tensor.loops import BLOCKS, STEPS, THREADS, Line
from gtco.tensor.stage import Operator, Stage


class Loops:
    """The lines so far. A loop is a context, and what is said inside lies deeper::

        with loops.over("row", 4, THREADS, "a team of 32 threads each"):
            loops.says("x -> registers")
    """

    def __init__(self) -> None:
        self.made: list[Line] = []
        self._depth = 0

    @contextmanager
    def over(
        self, name: str, extent: int, runs: str = STEPS, text: str = "", step: int = 1
    ) -> Iterator[None]:
        """A loop around what is said inside. A single iteration makes no loop, unless it is the
        outermost one.
        """
        shown = extent > 1 or not self.made
        if shown:
            self.made.append(Line(self._depth, name, extent, step, runs, text))
        self._depth += shown
        yield
        self._depth -= shown

    def says(self, text: str) -> None:
        """A statement."""
        self.made.append(Line(self._depth, text=text))

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(self.made)


def kinds(operators: Sequence[Operator]) -> str:
    """What the operators do, in words: ``add, gelu``."""
    return ", ".join(op["op"] if op.kind == "relax" else op.kind for op in operators)


def before(stage: Stage, tensor: str) -> str:
    """What makes the tensor inside the stage, in words; "" for an input of the stage."""
    return kinds(ancestors(stage, tensor))


def read(stage: Stage, tensor: str, name: str = "x") -> str:
    """How a value of the tensor is got: ``x = its input``, ``x = add, gelu``."""
    return f"{name} = {before(stage, tensor) or 'its input'}"


def written(stage: Stage, anchor: str, result: str) -> str:
    """What becomes of the anchor's result: ``sum, relu -> output, float16``."""
    after = kinds(derived(stage, anchor))
    return f"{result}{after and ', '}{after} -> output, {stage.output.type.dtype}"


def by_element(stage: Stage, blocks: int, threads: int, work: str) -> tuple[Line, ...]:
    """The loops of a kernel whose threads each do the same, once."""
    loops = Loops()
    with loops.over("block", blocks, BLOCKS), loops.over("thread", threads, THREADS, work):
        loops.says(f"{kinds(stage.operators)} -> output, {stage.output.type.dtype}")
    return loops.lines
