"""Element-wise stages that transpose: blocks are turned in registers, instead of lanes gathered one
by one.

If the output runs along its last axes (``j``) and an input along others (``t``)::

    for task in other axes x chunks of t x chunks of j:      # parallel
      for block of lanes of t, for block of lanes of j:
        for each such input: lanes vectors along t -> transposed, vectors along j
        for each t of the block: output[.., t, .., j] = expression, other inputs read along j

The last block of a chunk begins early enough to be whole, so it overlaps the block before it. This
is safe because a chunk belongs to one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from gtco.tensor.analysis.axes import Turned, turned
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.transpose import transpose
from gtco.tensor.sketch.shared.streaming import (
    blocks_of,
    chunk_span,
    chunks_of,
    tasks_of_rows,
    unflatten,
    whole_block,
)
from gtco.tensor.stage import Stage

CHUNK = 64  # positions of either axis that a task's tile has: 16 KB in, 16 KB out


@dataclass(frozen=True)
class Tiling:
    """The chunks that the axes of a transposing stage are cut into."""

    axes: Turned

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of chunks of t and of j. The last chunk of either has the remaining
        positions.
        """
        t, j = (chunks_of(n, CHUNK) for n in self.axes.extents)
        return t, j

    @property
    def outer(self) -> tuple[int, ...]:
        """The axes that units count: those that belong neither to t nor to j, then the chunks of t
        and of j.
        """
        return (*self.axes.others, *self.chunks)

    @property
    def units(self) -> int:
        return prod(self.outer)

    @property
    def work(self) -> int:
        """The elements of one unit."""
        return prod(self.axes.shape) // self.units


def tiling(stage: Stage, lanes: int) -> Tiling | None:
    """The axes whose blocks, if turned, make every load a vector; None if there are none."""
    axes = turned(stage, lanes)
    return None if axes is None else Tiling(axes)


@dataclass
class _TileReader(Reader):
    """Reads the turned inputs from their tiles, at the position that was set before."""

    tiles: dict[str, Array] = field(default_factory=dict)
    at: Expr = 0

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        if tensor in self.tiles:
            return self.emitter.load(self.tiles[tensor], [self.at])
        return super().load(tensor, index)


def emit_tiles(
    em: Emitter, args: KernelArguments, stage: Stage, grid: Tiling, per_task: int
) -> None:
    """Emits the whole kernel's loops, ``per_task`` units a task."""
    lanes = em.lanes
    reader = _TileReader(stage, em, args.inputs)
    with tasks_of_rows(em, args, grid.units, per_task) as unit:
        *rest, t_chunk, j_chunk = unflatten(em, unit, grid.outer)
        t_span = chunk_span(em, t_chunk, grid.axes.extents[0], CHUNK)
        j_span = chunk_span(em, j_chunk, grid.axes.extents[1], CHUNK)
        with em.range(0, blocks_of(t_span, lanes), "tb") as tb:
            t = whole_block(em, tb, t_span, lanes, grid.axes.extents[0])
            with em.range(0, blocks_of(j_span, lanes), "jb") as jb:
                j = whole_block(em, jb, j_span, lanes, grid.axes.extents[1])
                _block(em, args, reader, grid.axes, rest, t, j)


def _block(
    em: Emitter,
    args: KernelArguments,
    reader: _TileReader,
    axes: Turned,
    rest: list[Expr],
    t: Expr,
    j: Expr,
) -> None:
    """Emits one block of lanes x lanes from ``t`` and ``j`` on."""
    lanes, output = em.lanes, reader.stage.output.output
    rows: dict[str, list[Expr]] = {name: [] for name in axes.inputs}
    for k in range(lanes):
        probe = Probe(reader.stage, em)
        probe.follow(output, axes.index(rest, t, j + k))
        # One place each (analysis/axes.py). Where the index is numbers alone, the probe has it once
        # for each operator that reads there.
        places = dict(probe.loads)
        for name, row in rows.items():
            row.append(em.let(args.inputs[name].buffer[em.ramp(places[name])], "row"))
    reader.tiles = {}
    for name in axes.inputs:
        tile = em.registers(lanes * lanes)
        for k, column in enumerate(transpose(em, rows[name])):
            em.store_vector(tile, [k * lanes], column)
        reader.tiles[name] = tile
    for k in range(lanes):
        with em.vector(lanes) as lane:
            at = axes.index(rest, t + k, j + lane)
            reader.at = k * lanes + lane
            em.store(args.output, at, reader.value(output, at))
