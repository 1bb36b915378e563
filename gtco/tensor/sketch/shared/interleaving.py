"""Element-wise stages whose neighbours in the output lie a few positions apart in the inputs.
Vectors are woven by shuffles, instead of lanes gathered one by one.

Examples are pixel shuffles, an image whose 3 channels are made last, channel shuffles, and rotary
embeddings of pairs. Every ``phases``-th position of a row runs evenly through every input, by steps
of at most REACH::

    for task in other axes x chunks of i:             # parallel
      for block of lanes of i:
        for phase r:                                  # inputs by steps: loaded whole, picked
          vector[r] = expression at positions phases * i + r
        output[phases * i ...] = the phases' vectors, woven

The last block of a chunk begins early enough to be whole, so it overlaps the block before it. This
is safe because a chunk belongs to one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from tvm.sym import detect_linear_equation

from gtco.tensor.analysis.axes import output_shape, phase_steps, spans
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.transpose import pick, weave
from gtco.tensor.sketch.shared.lockstep import Lockstep
from gtco.tensor.sketch.shared.streaming import (
    blocks_of,
    chunk_span,
    chunks_of,
    tasks_of_rows,
    unflatten,
    whole_block,
)
from gtco.tensor.stage import Stage

REACH = 8  # the longest step, and the most phases: beyond it, shuffles cost as much as gathering
CHUNK = 1024  # least positions of a task's chunk


@dataclass(frozen=True)
class Interleaving:
    """The phases of a row. A row is the axes of the output's ``shape`` after those that count the
    ``rows``. ``steps`` are the steps of each phase's loads that are not vectors.
    """

    shape: tuple[int, ...]
    rows: Lockstep
    steps: tuple[tuple[int, ...], ...]

    @property
    def cut(self) -> int:
        """The first axis of a row."""
        return len(self.rows.outer)

    @property
    def phases(self) -> int:
        return len(self.steps)

    @property
    def extent(self) -> int:
        """Positions of one phase in a row."""
        return prod(self.shape[self.cut :]) // self.phases

    @property
    def outer(self) -> tuple[int, ...]:
        """The extents that units count: the rows side by side, then the chunks of a row."""
        return (*self.rows.counted, chunks_of(self.extent, CHUNK))

    @property
    def units(self) -> int:
        return prod(self.outer)

    @property
    def work(self) -> int:
        """The elements of one unit."""
        return prod(self.shape) // self.units

    @cached_property
    def shuffles(self) -> float:
        """Vector instructions for weaving and picking, for one vector of the output."""
        even = (self.phases & -self.phases).bit_length() - 1  # halvings
        weaving = even + (self.phases >> even) - 1
        picking = sum(2 * s - 1 for phase in self.steps for s in phase) / self.phases
        return weaving + picking

    def index(self, rest: Sequence[Expr], i: Expr, phase: int) -> list[Expr]:
        """The output's index at position ``i`` of a phase, with ``rest`` along the axes before."""
        return [*rest, *split_flat(i * self.phases + phase, self.shape[self.cut :])]


def interleaving(stage: Stage, lanes: int) -> Interleaving | None:
    """The fewest phases, in the longest rows, with which every load is a vector or a few vectors;
    None if there are none.
    """
    shape = output_shape(stage)
    if any(op.kind == "gather" for op in stage.operators) or any(
        t.dtype not in ("float32", "int32") for t in stage.types.values()
    ):
        return None
    # what takes turns along a row lies behind each other in some tensor
    turns = {1, *(n for n in spans(stage) if n <= REACH)}
    for phases in range(1, REACH + 1):
        if all(n % phases for n in turns):
            continue
        cuts = [cut for cut in range(len(shape)) if prod(shape[cut:]) % phases == 0]
        # the shortest row is a part of all others: where it is uneven, they are
        if not cuts or phase_steps(stage, cuts[-1], phases, 0, REACH) is None:
            continue
        for cut in cuts:
            if 2 * (prod(shape[cut:]) // phases) < lanes:
                continue
            steps: list[tuple[int, ...]] = []
            for phase in range(phases):
                found = phase_steps(stage, cut, phases, phase, REACH)
                if found is None:
                    break
                steps.append(found)
            if len(steps) == phases:
                return Interleaving(shape, Lockstep(shape[:cut]), tuple(steps))
    return None


@dataclass
class SteppedReader(Reader):
    """Reads at positions ``first + lane`` of a phase, or of any even row.

    The index maps are followed at ``at``, a single variable that is not in the code, because a sum
    of two variables is not always recognised as even. ``picked`` holds tensor, step, the place of
    position 0, and the values of loads by steps.
    """

    at: Any = None
    first: Expr = 0
    lane: Expr = 0
    picked: list[tuple[str, int, Expr, Array]] = field(default_factory=list)

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        em, array = self.emitter, self.inputs[tensor]
        step, origin = step_of(em.index(array.flat(index)), self.at)
        for name, known, start, values in self.picked:
            if (name, known) == (tensor, step) and _is_zero(em.index(start - origin)):
                return em.load(values, [self.lane])
        return array.buffer[em.index(origin + (self.first + self.lane) * step)]


def step_of(flat: Expr, var: Any) -> tuple[int, Expr]:
    """The distance between neighbours along ``var``, and the place of the first."""
    parts: Any = (0, flat) if isinstance(flat, int) else detect_linear_equation(flat, [var])
    assert len(parts) == 2, f"{flat} is not even, though it was"
    return int(parts[0]), parts[1]


def _is_zero(value: Expr) -> bool:
    return isinstance(value, int) and value == 0


def emit_interleaved(
    em: Emitter, args: KernelArguments, stage: Stage, grid: Interleaving, per_task: int
) -> None:
    """Emits the whole kernel's loops, ``per_task`` units a task."""
    reader = SteppedReader(stage, em, args.inputs)
    lanes = min(em.lanes, grid.extent)
    with tasks_of_rows(em, args, grid.units, per_task) as unit:
        *group, chunk = unflatten(em, unit, grid.outer)
        rows = [*grid.rows.rows(em, group)]
        span = chunk_span(em, chunk, grid.extent, CHUNK)
        with em.range(0, blocks_of(span, lanes), "block") as block:
            i = whole_block(em, block, span, lanes, grid.extent)
            for row in rows:
                _block(em, args, reader, grid, row, i, lanes)


def _block(
    em: Emitter,
    args: KernelArguments,
    reader: SteppedReader,
    grid: Interleaving,
    rest: list[Expr],
    i: Expr,
    lanes: int,
) -> None:
    """Emits ``lanes`` positions of every phase, from ``i`` on."""
    output = reader.stage.output
    reader.at, reader.first = em.variable("at"), i
    em.bind(reader.at, grid.extent)
    vectors = []
    for phase in range(grid.phases):
        index = grid.index(rest, reader.at, phase)
        reader.picked = _picked(reader, index, lanes) if grid.steps[phase] else []
        values = em.registers(lanes, output.type.dtype)
        with em.vector(lanes) as reader.lane:
            em.store(values, [reader.lane], reader.value(output.output, index))
        vectors.append(em.let(em.load_vector(values, [0], lanes), "phase"))
    flat: Expr = 0
    for extent, at in zip(grid.shape[: grid.cut], rest, strict=True):
        flat = flat * extent + at
    flat = flat * (grid.extent * grid.phases) + i * grid.phases
    whole = Array(args.output.buffer, (output.type.size,), output.type.dtype)
    for k, vector in enumerate(weave(em, vectors)):
        em.store_vector(whole, [flat + k * lanes], vector, lanes)


def _picked(
    reader: SteppedReader, index: list[Expr], lanes: int
) -> list[tuple[str, int, Expr, Array]]:
    """Emits the loads by steps for ``lanes`` positions of the output's ``index``."""
    em = reader.emitter
    probe = Probe(reader.stage, em)
    probe.follow(reader.stage.output.output, index)
    found = []
    for name, flat in probe.loads:
        step, origin = step_of(flat, reader.at)
        if step > 1:
            array = reader.inputs[name]
            values = em.registers(lanes, array.dtype)
            vector = pick(em, array, origin + reader.first * step, step, lanes)
            em.store_vector(values, [0], vector, lanes)
            found.append((name, step, origin, values))
    return found
