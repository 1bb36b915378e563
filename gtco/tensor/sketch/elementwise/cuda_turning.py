"""Element-wise stages that transpose, on a GPU: squares are turned in shared memory, so that an
input that runs along another axis than the output is read along its own.

If the output runs along its last axes (``j``) and an input along others (``t``)::

    for square of t and j, for the other axes:      # a block each
      tile0[t, j] = in0[..., j, ..., t]              # neighbouring threads along t
      sync
      out[..., t, ..., j] = expression(tile0[t, j])  # along j, as all other inputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

from tvm import tirx

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.axes import Turned, turned
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.lambdas import Body, traced, write
from gtco.tensor.cuda.loops import Loops, kinds
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.cuda.spelling import CTYPES, indented
from gtco.tensor.emit.emitter import Expr, storage
from gtco.tensor.emit.reader import Reader
from gtco.tensor.loops import BLOCKS, Line
from gtco.tensor.loops import THREADS as PARALLEL
from gtco.tensor.stage import ITEM_BYTES, Stage

SIDES = (64, 32)
THREADS = 256
LEAST = 8  # least positions of either axis: with fewer, separate reads are as good


@dataclass(frozen=True)
class Turning:
    """The squares that the axes of a transposing stage are cut into, with one of the ``sides``."""

    stage: Stage
    axes: Turned
    sides: tuple[int, ...]

    def index(self, other: Expr, t: Expr, j: Expr) -> list[Expr]:
        """The output's index."""
        return self.axes.index(split_flat(other, self.axes.others), t, j)

    def squares(self, side: int) -> tuple[int, int]:
        t, j = self.axes.extents
        return ceil(t / side), ceil(j / side)

    def blocks(self, side: int) -> int:
        return prod(self.squares(side)) * prod(self.axes.others)

    def places(self, side: int) -> tuple[int, ...]:
        """The beginning of each input's tile in shared memory, and the end of the last one."""
        return _places(self.stage, self.axes.inputs, side)

    def launch(self, side: int, read: float, work: float, flops: float) -> Launch:
        written = float(self.stage.output.type.nbytes)
        return Launch(
            blocks=self.blocks(side),
            threads=THREADS,
            shared=self.places(side)[-1],
            registers=32,
            unit="fma",
            work=0.0,
            vector=work,
            read=read,
            written=written,
            traffic=read + written,
            flops=flops,
            overlapped=False,
            staged=sum(
                float(self.stage.output.type.size * ITEM_BYTES[self.stage.types[x].dtype])
                for x in self.axes.inputs
            ),
        )

    def program(self, side: int, symbol: str) -> CudaProgram:
        """A block for each square of ``side`` x ``side``."""
        stage = self.stage
        ts, js = self.axes.extents
        t_squares, j_squares = self.squares(side)
        others = prod(self.axes.others)
        lines = ["GTCO_SHARED(shared);"]
        place = "block"
        parts = []
        for name, count in (("j0", j_squares), ("t0", t_squares), ("other", others)):
            last = name == "other" or (name == "t0" and others == 1)
            where = place if last or count == 1 else f"{place} % {count}"
            times = f" * {side}" if name != "other" else ""
            if name != "other" or others > 1:
                zero = count == 1 and name != "other"
                parts.append(f"{name} = {'0' if zero else f'{where}{times}'}")
            place = place if count == 1 else f"{place} / {count}"
        lines.append(f"const int {', '.join(parts)};")
        for n, (tensor, at) in enumerate(zip(self.axes.inputs, self.places(side), strict=False)):
            element = CTYPES[stage.types[tensor].dtype]
            begin = f"shared + {at}" if at else "shared"
            lines.append(
                f"const gtco::Square<{element}, {side}> tile{n}"
                f"{{reinterpret_cast<{element}*>({begin})}};"
            )
            lines.append(self._read(f"read{n}", tensor, others))
            square = f"tile{n}, t0, {ts}, j0, {js}, read{n}"
            lines.append(f"gtco::fill_square<{THREADS}>({square});")
        lines += [f"gtco::sync<{THREADS}>();", self._write(side, others)]
        call = f"gtco::drain_square<{THREADS}, {side}>(t0, {ts}, j0, {js}, write);"
        about = f"squares of {side} x {side} turned in shared memory"
        text = source(symbol, stage, ["elementwise.cuh"], lines, call, THREADS, about)
        grid = (self.blocks(side), 1, 1)
        return CudaProgram(text, grid, THREADS, self.places(side)[-1], lines=self.lines(side))

    def lines(self, side: int) -> tuple[Line, ...]:
        """The loops in words."""
        loops, (ts, js) = Loops(), self.axes.extents
        cut = f"{side} x {side} of {ts} x {js} each"
        turns, stage = side * side // THREADS, self.stage
        with loops.over("square", self.blocks(side), BLOCKS, cut):
            for tensor in self.axes.inputs:
                with loops.over("turn", turns), loops.over("thread", THREADS, PARALLEL):
                    loops.says(f"{stage.types[tensor]}, along its own axis -> shared memory")
            with loops.over("turn", turns), loops.over("thread", THREADS, PARALLEL):
                loops.says(f"{kinds(stage.operators)} -> output, {stage.output.type.dtype}")
        return loops.lines

    def _parameters(self, others: int) -> tuple[tuple[str, int], ...]:
        return (("other", others), ("t", self.axes.extents[0]), ("j", self.axes.extents[1]))

    def _read(self, name: str, tensor: str, others: int) -> str:
        """``read(t, j)``: the input's element at its place in memory."""
        dtype = self.stage.types[tensor].dtype

        def body(b: Body) -> None:
            probe = Probe(self.stage, b.em)
            probe.follow(self.stage.output.output, self.index(*b.index))
            flat = next(flat for found, flat in probe.loads if found == tensor)
            b.give(b.inputs[tensor].buffer[b.em.index(flat)])

        return write(
            arguments(self.stage), name, self._parameters(others), body, returns=dtype, outer=1
        )

    def _write(self, side: int, others: int) -> str:
        """``write(t, j, u, w)``: the output's element. The turned inputs have it at (u, w) of their
        tiles.
        """
        stage = self.stage

        def body(b: Body) -> None:
            *index, u, w = b.index
            tiles = {
                x: tirx.decl_buffer((side, side), storage(stage.types[x].dtype), name=f"tile{n}")
                for n, x in enumerate(self.axes.inputs)
            }
            made.extend(tiles.items())
            reader = TileReader(stage, b.em, b.inputs, tiles=tiles, at=(u, w))
            at = self.index(*index)
            b.em.store(b.output, at, reader.value(stage.output.output, at))

        made: list[tuple[str, Any]] = []
        parameters = (*self._parameters(others), ("u", side), ("w", side))
        printer, function = traced(arguments(stage), parameters, body)
        for n, (tensor, buffer) in enumerate(made):
            printer.called[buffer] = f"tile{n}.at"
            if stage.types[tensor].dtype == "bfloat16":
                printer.bfloat16.add(buffer)
        head = "auto write = [=](int t, int j, int u, int w) {"
        return "\n".join([head, *indented(printer.lines(function)), "};"])


@dataclass
class TileReader(Reader):
    """Reads the turned inputs from their tiles, at ``at``."""

    tiles: dict[str, Any] = field(default_factory=dict)
    at: tuple[Expr, ...] = ()

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        if tensor in self.tiles:
            return self.tiles[tensor][tuple(self.at)]
        return super().load(tensor, index)


def _places(stage: Stage, inputs: Sequence[str], side: int) -> tuple[int, ...]:
    found = [0]
    for x in inputs:
        nbytes = side * (side + 1) * ITEM_BYTES[stage.types[x].dtype]
        found.append(found[-1] + ceil(nbytes / 16) * 16)
    return tuple(found)


def turning(stage: Stage, target: GpuTarget) -> Turning | None:
    """The axes whose squares, if turned, make every load a run; None if there are none."""
    axes = turned(stage, LEAST, tuple(ITEM_BYTES))
    if axes is None:
        return None
    fits = tuple(s for s in SIDES if _places(stage, axes.inputs, s)[-1] <= target.shared)
    if not fits:
        return None
    return Turning(stage, axes, fits)
