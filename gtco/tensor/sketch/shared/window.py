"""Sliding windows whose channels do not mix, or mix only in narrow groups: the loops of depthwise
convolution and pooling, structure SSRS.

Channels last (vectors run along channels)::

    for task in images x bands of output rows x channel chunks x rows:        # parallel
      prepare the taps of the chunk, once a task and band     # weights of 8 bits are widened
      for block of output columns, then the odd ones:         # those at the borders with fewer taps
        for vector of channels in the chunk:
          accumulators[column] = start                        # in registers
          for kh whose input row exists:
            for input column of the block, for (column, kw) that it serves:
              accumulators[column] = combine(accumulators[column], x, weight)   # one load of x
          epilogue(accumulators) -> output

Each thread has bands of rows of its own, as in the stages before and behind that are cut by rows.

Channels first: vectors run along the output's columns, a channel a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import NamedTuple, Protocol

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor import cost
from gtco.tensor.analysis.chains import Epilogue, bytes_read
from gtco.tensor.analysis.indices import floormod
from gtco.tensor.analysis.window import Geometry
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scratch import Scratch
from gtco.tensor.sketch.shared.streaming import rows_per_task, tasks_of_rows, unflatten, vector_runs
from gtco.tensor.sketch.shared.window_groups import mix
from gtco.tensor.space import Config, Decision, Option
from gtco.tensor.stage import Operator, Stage, item_bytes
from gtco.tensor.workload import Extra, Layer, Stream, Workload

LONG_EPILOGUE = 8.0  # vector instructions of an epilogue that is worth a loop over the columns
LEAST_BAND = 4  # rows; the rows at its border are read for two bands
BLOCK_COST = 8.0  # the start of a block of columns takes the time of so many vector operations


class Taps(Protocol):
    """The computation of a window on the elements it covers."""

    @property
    def start(self) -> float:
        """The value with which the accumulators begin."""
        ...

    def prepare(self, em: Emitter, first: Expr, c0: Expr, width: int) -> None:
        """Emits what has to be done before rows of ``width`` channels from ``c0`` on. It is done
        already unless ``first`` holds.
        """
        ...

    def weight(self, em: Emitter, kh: Expr, kw: int, c: Expr, j: int = 0) -> Expr | None:
        """The tap's factor for an output channel, of input channel ``j`` of its group; None if
        there is no factor.
        """
        ...

    def combine(self, em: Emitter, total: Expr, x: Expr, weight: Expr | None) -> Expr: ...

    def scale(self, em: Emitter, y: Expr, x: Expr) -> Expr | None:
        """A factor of the whole window at output row ``y``, column ``x`` (it may vary over lanes);
        None for 1.
        """
        ...


def next_decision(g: Geometry, target: Target, chosen: Mapping[str, Option]) -> Decision | None:
    """The decisions, in order:

    - columns: accumulators side by side;
    - channels: the chunk that a task works on;
    - rows: output rows of a task.
    """
    last = g.layout == "NHWC"
    if "columns" not in chosen:
        begin, end = g.interior
        most = g.output[2] if last else max(1, end - begin)
        options = (2, 4, 6, 8) if last else (1, 2)
        wide = tuple(sorted({min(o, most if last else o) for o in options}))
        return Decision("columns", "registers", wide)
    if "channels" not in chosen:
        c = g.output[3]
        if not last:
            return Decision("channels", "grain", (1,))
        pieces = tuple(sorted({min(c, target.lanes * k) for k in (4, 8, 16)}))
        return Decision("channels", "grain", pieces)
    if "rows" not in chosen:
        chunk = int(chosen["channels"])
        units = rows_count(g, chunk)
        row = g.output[2] * chunk * prod(g.kernel)
        return Decision("rows", "grain", rows_per_task(units, row, target.cores))
    return None


def rows_count(g: Geometry, chunk: int) -> int:
    return g.output[0] * ceil(g.output[3] / chunk) * g.output[1]


def band_height(g: Geometry, chunk: int, cores: int) -> int:
    """The rows of an image whose chunks of channels are all done before the next rows: so many that
    the bands of all images can be dealt out to the cores, or else all rows.
    """
    images, height, _, channels = g.output
    if g.layout == "NHWC" and channels > chunk:
        for bands in range(1, height // LEAST_BAND + 1):
            if height % bands == 0 and images * bands % cores == 0:
                return height // bands
    return height


class Around(NamedTuple):
    """What a stage does around its window: vector instructions on one vector before it and behind
    it, and the bytes of an element as it is read and written.
    """

    before: float
    behind: cost.Vectors
    read: float
    written: float


def around(stage: Stage, op: Operator, tail: Epilogue, lanes: int) -> Around:
    """What the stage does around its window ``op``, whatever the config."""
    others = [o for o in stage.operators if o != op and o not in tail.operators]
    source = op.inputs[0]
    return Around(
        cost.vectors(stage, others, lanes).total,
        cost.epilogue_vectors(tail, lanes),
        bytes_read(stage, source) or item_bytes(stage.types[source].dtype),
        item_bytes(stage.output.type.dtype),
    )


def workload(
    beside_window: Around, g: Geometry, target: Target, config: Config
) -> Workload:
    chunk, columns = config["channels"], config["columns"]
    units = rows_count(g, chunk)
    tasks = ceil(units / config["rows"])
    lanes = target.lanes
    outputs = g.output[2] * chunk / lanes * (1 if g.layout == "NHWC" else 4)
    # a tap is one multiply-add; the loads of a block's inputs and weights are shared by its columns
    span = (columns - 1) * g.strides[1] + (g.kernel[1] - 1) * g.dilation[1] + 1
    loads = g.kernel[0] * (min(span, columns * g.kernel[1]) + g.kernel[1]) / columns
    before, behind, read, written = beside_window
    inputs = g.group[0]
    loads *= 0.5 + before + (0.5 * inputs if g.group != (1, 1) else 0)  # plus a shuffle an input
    vectors = outputs * (prod(g.kernel) * inputs + loads + 1)
    # wide chunks stream, narrow ones hop from pixel to pixel
    vectors += BLOCK_COST * g.output[2] / columns
    image = read * prod(g.source)
    window_rows = read * g.source[2] * chunk * (g.kernel[0] + 1)
    step = read * g.source[2] * chunk * g.strides[0]
    bands = g.output[0] * g.output[1] // band_height(g, chunk, target.cores)
    dealt = bands % target.cores == 0 or chunk >= g.output[3]
    # cut by rows, as the stages around it are
    by_rows = g.layout == "NHWC" and dealt and tasks >= target.cores
    handed = 0.0 if by_rows else target.elsewhere
    row = Layer(
        units / tasks,
        (
            Stream(step, image, handed=handed),
            Stream(step * max(g.kernel[0] - 1, 0), window_rows),
        ),
        (Stream(written * g.output[2] * chunk, written * prod(g.output), handed=handed),),
    )
    flops = 2.0 * prod(g.output) * prod(g.kernel) * inputs
    beside = (Extra("vector", outputs, behind.vector), Extra("exp", outputs, behind.exp))
    return Workload("fma", vectors, (row, Layer(1, (), (), tasks)), flops, beside=beside)


def kernel_rows(em: Emitter, g: Geometry, y: Expr) -> tuple[Expr, Expr]:
    """The range of kh [start, start + extent) whose input row exists for output row ``y``."""
    k, d, h = g.kernel[0], g.dilation[0], g.source[1]
    top = em.index(y * g.strides[0] - g.padding[0])
    if em.known(top >= 0) is True and em.known(top + (k - 1) * d < h) is True:
        return 0, k
    start = em.let_index(tirx.max(0, tirx.floordiv(d - 1 - top, d)), "kh0")
    stop = em.let_index(tirx.min(k, tirx.floordiv(h - top + d - 1, d)), "kh1")
    return start, em.let_index(tirx.max(stop - start, 0), "khs")


class WindowLoops:
    """The emitter of one config of one windowed stage. ``rolled``: the epilogues of a block of
    columns are a loop, of windows that have no factor of their own.
    """

    scratch = Scratch(())

    def __init__(
        self,
        g: Geometry,
        source: str,
        tail: Epilogue,
        config: Config,
        cores: int,
        rolled: bool = False,
    ) -> None:
        self.g, self.source, self.tail, self.rolled = g, source, tail, rolled
        self.columns, self.chunk, self.rows = config["columns"], config["channels"], config["rows"]
        self.units, self.band = rows_count(g, self.chunk), band_height(g, self.chunk, cores)
        self.tasks = ceil(self.units / self.rows)

    def emit(self, em: Emitter, args: KernelArguments, reader: Reader, taps: Taps) -> None:
        self.em, self.args, self.reader, self.what = em, args, reader, taps
        g = self.g
        chunks = ceil(g.output[3] / self.chunk)
        with tasks_of_rows(em, args, self.units, self.rows) as unit:
            shape = (g.output[0], g.output[1] // self.band, chunks, self.band)
            n, band, chunk, local = unflatten(em, unit, shape)
            y = em.let_index(band * self.band + local, "y")
            start, extent = kernel_rows(em, g, y)
            # the first row of a task, or of a chunk of channels in a band
            alone = self.rows == 1 or isinstance(local, int)
            self.first = True if alone else tirx.any(floormod(unit, self.rows) == 0, local == 0)
            if g.layout == "NCHW":
                taps.prepare(em, self.first, chunk, 1)
                self.channel_first_row(n, chunk, y, start, extent)
                return
            last = g.output[3] - (chunks - 1) * self.chunk
            if last == self.chunk:
                self.row(n, y, start, extent, chunk * self.chunk, self.chunk)
                return
            em.branch(
                chunk < chunks - 1 if chunks > 1 else False,
                lambda: self.row(n, y, start, extent, chunk * self.chunk, self.chunk),
                lambda: self.row(n, y, start, extent, (chunks - 1) * self.chunk, last),
            )

    # channels last --------------------------------------------------------------------------------
    def row(self, n: Expr, y: Expr, start: Expr, extent: Expr, c0: Expr, width: int) -> None:
        em, g = self.em, self.g
        self.what.prepare(em, self.first, c0, width)
        begin, end = g.interior
        everything = list(range(g.kernel[1]))
        if end - begin < self.columns:  # less than one block: every column has its own taps
            self.border(n, y, 0, g.output[2], start, extent, c0, width)
            return
        self.border(n, y, 0, begin, start, extent, c0, width)
        blocks, rest = divmod(end - begin, self.columns)
        if blocks:
            with em.loop(blocks, "block") as block:
                self.block(
                    n,
                    y,
                    begin + block * self.columns,
                    [everything] * self.columns,
                    start,
                    extent,
                    c0,
                    width,
                )
        if rest:
            self.block(n, y, end - rest, [everything] * rest, start, extent, c0, width)
        self.border(n, y, end, g.output[2], start, extent, c0, width)

    def border(
        self,
        n: Expr,
        y: Expr,
        begin: int,
        end: int,
        start: Expr,
        extent: Expr,
        c0: Expr,
        width: int,
    ) -> None:
        """Emits output columns [begin, end), some of whose taps lie outside the image, also in
        blocks.
        """
        for x in range(begin, end, self.columns):
            taps = [self.g.taps(o) for o in range(x, min(x + self.columns, end))]
            self.block(n, y, x, taps, start, extent, c0, width)

    def block(
        self,
        n: Expr,
        y: Expr,
        x: Expr,
        own: Sequence[Sequence[int]],
        start: Expr,
        extent: Expr,
        c0: Expr,
        width: int,
    ) -> None:
        """Emits neighbouring outputs of ``width`` channels from ``c0``, each with its ``own``
        taps.
        """
        em, g = self.em, self.g
        columns, taps = len(own), sorted({kw for each in own for kw in each})
        serves: dict[
            int, list[tuple[int, int]]
        ] = {}  # input column of the block -> (output column, kw)
        for o, each in enumerate(own):
            for kw in each:
                serves.setdefault(o * g.strides[1] + kw * g.dilation[1], []).append((o, kw))
        left = em.let_index(x * g.strides[1] - g.padding[1], "left")
        top = em.let_index(y * g.strides[0] - g.padding[0], "top")
        for begin, count, lanes in vector_runs(width, em.lanes):
            with em.loop(count, "c", rolled=True) as cv:
                first = em.let_index(c0 + begin + cv * lanes, "c0")
                acc = em.registers(columns * lanes)
                self.clear(acc, columns, lanes)
                with em.loop(extent, "kh", rolled=True) as k:
                    kh = em.index(start + k)
                    row = em.index(top + kh * g.dilation[0])
                    if g.group == (1, 1):
                        self.accumulate(n, row, left, kh, taps, serves, first, acc, lanes)
                    else:
                        read = partial(self.source_value, n, row, left)
                        weight = partial(self.what.weight, em, kh)
                        combine = partial(self.what.combine, em)
                        mix(em, g.group, read, weight, combine, taps, serves, first, acc, lanes)
                self.finish_block(n, y, x, first, acc, columns, lanes)

    def finish_block(
        self, n: Expr, y: Expr, x: Expr, first: Expr, acc: Array, columns: int, lanes: int
    ) -> None:
        """Emits the epilogues of the sums of neighbouring outputs."""
        em = self.em
        if not self.rolled or columns == 1:
            for o in range(columns):
                scale = self.what.scale(em, y, x + o)
                with em.vector(lanes) as lane:
                    total = em.load(acc, [o * lanes + lane])
                    self.finish(n, y, x + o, first + lane, total, scale)
            return
        # in memory, so that a loop can count through them
        sums = em.registers(columns * lanes)
        for o in range(columns):
            with em.vector(lanes) as lane:
                em.store(sums, [o * lanes + lane], em.load(acc, [o * lanes + lane]))
        with em.loop(columns, "column", rolled=True) as o, em.vector(lanes) as lane:
            self.finish(n, y, x + o, first + lane, em.load(sums, [o * lanes + lane]), None)

    def source_value(self, n: Expr, row: Expr, left: Expr, p: int, c: Expr) -> Expr:
        """The input at a column of a block."""
        return self.reader.value(self.source, self.g.place(n, row, left + p, c))

    def accumulate(
        self,
        n: Expr,
        row: Expr,
        left: Expr,
        kh: Expr,
        taps: Sequence[int],
        serves: Mapping[int, list[tuple[int, int]]],
        first: Expr,
        acc: Array,
        lanes: int,
    ) -> None:
        """Emits one row of taps. Every input vector serves all columns of which it is a tap."""
        em = self.em
        with em.vector(lanes) as lane:
            weights = {kw: self.what.weight(em, kh, kw, first + lane) for kw in taps}
            weights = {kw: None if w is None else em.let(w, "w") for kw, w in weights.items()}
            for p, users in sorted(serves.items()):
                value = em.let(self.source_value(n, row, left, p, first + lane), "x")
                for o, kw in users:
                    total = em.load(acc, [o * lanes + lane])
                    total = self.what.combine(em, total, value, weights[kw])
                    em.store(acc, [o * lanes + lane], total)

    def clear(self, acc: Array, columns: int, lanes: int) -> None:
        for o in range(columns):
            with self.em.vector(lanes) as lane:
                self.em.store(acc, [o * lanes + lane], tirx.const(self.what.start, "float32"))

    def finish(self, n: Expr, y: Expr, x: Expr, c: Expr, total: Expr, scale: Expr | None) -> None:
        value = self.em.let(total if scale is None else total * scale)
        self.reader.finish(self.tail, self.g.place(n, y, x, c), value, self.args.output)

    # channels first -------------------------------------------------------------------------------
    def channel_first_row(self, n: Expr, c: Expr, y: Expr, start: Expr, extent: Expr) -> None:
        em, g = self.em, self.g
        begin, end = g.interior
        everything = list(range(g.kernel[1]))
        for x in range(begin):
            self.vector(n, c, y, x, 1, g.taps(x), start, extent)
        for first, count, lanes in vector_runs(end - begin, em.lanes):
            with em.loop(count, "x") as block:
                self.vector(
                    n, c, y, begin + first + block * lanes, lanes, everything, start, extent
                )
        for x in range(end, g.output[2]):
            self.vector(n, c, y, x, 1, g.taps(x), start, extent)

    def vector(
        self,
        n: Expr,
        c: Expr,
        y: Expr,
        x: Expr,
        lanes: int,
        taps: Sequence[int],
        start: Expr,
        extent: Expr,
    ) -> None:
        """Emits ``lanes`` neighbouring outputs of one channel."""
        em, g = self.em, self.g
        acc = em.registers(lanes)
        self.clear(acc, 1, lanes)
        top = em.let_index(y * g.strides[0] - g.padding[0], "top")
        with em.loop(extent, "kh") as k:
            kh = em.index(start + k)
            weights = [self.what.weight(em, kh, kw, c) for kw in taps]
            weights = [None if w is None else em.let(w, "w") for w in weights]
            with em.vector(lanes) as lane:
                total = em.load(acc, [lane])
                for kw, w in zip(taps, weights, strict=True):
                    column = (x + lane) * g.strides[1] - g.padding[1] + kw * g.dilation[1]
                    value = em.let(
                        self.reader.value(
                            self.source, g.place(n, top + kh * g.dilation[0], column, c)
                        ),
                        "x",
                    )
                    total = em.let(self.what.combine(em, total, value, w), "sum")
                em.store(acc, [lane], total)
        with em.vector(lanes) as lane:
            self.finish(n, y, x + lane, c, em.load(acc, [lane]), self.what.scale(em, y, x + lane))
