"""The loops that pooling and depthwise convolution share on a GPU: windows over images by
``window.cuh``.

A thread makes a strip of outputs below one another, of some neighbouring channels. An input is
read once for all windows of the strip that contain it. Neighbouring threads take neighbouring
channels or neighbouring columns, whichever lie side by side in memory, and none waits for
another::

    for thread in images x strips of rows x columns x vectors of channels:
      for column of taps, for input row that the strip covers:
        x = prologue(image)                       # 16 bytes a thread, side by side in a warp
        for output of the strip: total = combine(total, x, weight)
      epilogue(totals) -> output
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.indices import floordiv
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.analysis.window import Geometry
from gtco.tensor.cuda.arguments import Arguments
from gtco.tensor.cuda.neighbours import reading, side_by_side, storing
from gtco.tensor.cuda.program import Launch
from gtco.tensor.loops import Line
from gtco.tensor.sketch.shared.cuda_lanes import (
    DIVISION,
    REMAINDER,
    Access,
    accesses,
    lines_and_traffic,
)
from gtco.tensor.sketch.shared.cuda_loops import window_lines
from gtco.tensor.sketch.shared.cuda_streaming import launch
from gtco.tensor.space import Config, Decision, Option
from gtco.tensor.stage import Operator, Stage

VECTORS = (4, 2, 1)  # channels that a thread makes side by side
STRIPS = (1, 2, 4, 8)
SUMS = 16  # most registers of a thread for sums: weights and inputs need others
THREADS = (64, 128, 256)
BESIDE = 32  # further registers, beside sums, weights and one input
PLACING = 3  # integer operations of a load: its address, and whether its row lies in the image


@dataclass(frozen=True)
class Windows:
    """The windows of one stage over ``image``, with the epilogue ``tail``.

    - ``tap``, ``output``: instructions for a tap that was read, and for an output after its taps;
    - ``weighted``: True if each tap has a weight.
    """

    stage: Stage
    geometry: Geometry
    image: str
    tail: Epilogue
    tap: float = 1.0
    output: float = 0.0
    weighted: bool = False

    @cached_property
    def vectors(self) -> tuple[int, ...]:
        g = self.geometry
        if g.layout != "NHWC":
            return (1,)
        channels = g.output[3]
        return tuple(n for n in VECTORS if n == 1 or (channels % n == 0 and self._even(n)))

    def _even(self, lanes: int) -> bool:
        g = self.geometry

        def follow(probe: Probe, *at: Expr) -> None:
            n, y, x, row, column, c, i, lane = at
            channel = c * lanes + lane
            probe.follow(self.image, g.place(n, row, column, self.source(channel, i)))
            probe.through(self.tail, g.place(n, y, x, channel))

        extents = (*g.output[:3], *g.source[1:3], g.output[3] // lanes, g.group[0])
        return side_by_side(self.stage, extents, follow, lanes)

    def source(self, channel: Expr, i: Expr) -> Expr:
        """The input channel that is the ``i``-th of the group of an output channel."""
        inputs, outputs = self.geometry.group
        if (inputs, outputs) == (1, 1):
            return channel
        return floordiv(channel, outputs) * inputs + i

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The decisions, in order:

        - vector: channels of a thread;
        - strip: its outputs below one another;
        - threads: those of a block.
        """
        if "vector" not in chosen:
            return Decision("vector", "registers", self.vectors)
        if "strip" not in chosen:
            most = min(SUMS // int(chosen["vector"]), self.geometry.output[1])
            return Decision("strip", "registers", tuple(n for n in STRIPS if n <= most))
        if "threads" not in chosen:
            return Decision("threads", "block", THREADS)
        return None

    def total(self, config: Config) -> int:
        """Threads of all blocks together."""
        n, height, width, channels = self.geometry.output
        return n * ceil(height / config["strip"]) * width * (channels // config["vector"])

    def thread(self, config: Config) -> str:
        """A thread's number among those of all blocks."""
        return f"block * {config['threads']} + threadIdx.x"

    def blocks(self, config: Config) -> int:
        return ceil(self.total(config) / config["threads"])

    @cached_property
    def by_channels(self) -> bool:
        """True if neighbouring threads take neighbouring channels, False for neighbouring columns:
        the order in which their accesses touch fewer lines.
        """
        if self.vectors != (1,):
            return True
        reads = prod(self.geometry.kernel) * self.geometry.group[0]
        channels, columns = (
            lines_and_traffic(self._accesses(reads, 1), self._lanes(1, 1, by_channels), 1)[0]
            for by_channels in (True, False)
        )
        return channels < columns or (channels == columns and self.geometry.layout == "NHWC")

    @cached_property
    def _places(self) -> tuple[list[Access], list[Access]]:
        """The loads of a tap, and the loads and the store of an output, along channels, columns and
        rows of the output.
        """
        g, probe = self.geometry, Probe(self.stage)
        n, y, x, c, row, column, channel = probe.scope.variables((*g.output, *g.source[1:]))
        probe.follow(self.image, g.place(n, row, column, channel))
        inputs, outputs = g.group
        taps = accesses(
            probe, ((channel, inputs / outputs), (column, g.strides[1]), (row, g.strides[0]))
        )
        begin = len(probe.loads)
        probe.through(self.tail, g.place(n, y, x, c))
        return taps, accesses(probe, ((c, 1), (x, 1), (y, 1)), begin)

    def _accesses(self, loads: float, outputs: float) -> list[tuple[Access, float]]:
        """All accesses, each with the number of lanes that make it."""
        taps, others = self._places
        return [(x, loads) for x in taps] + [(x, outputs) for x in others]

    def _lanes(self, vector: int, strip: int, by_channels: bool) -> list[tuple[int, int, int]]:
        """The axes along which lanes run."""
        _, height, width, channels = self.geometry.output
        inside = [(1, width, 1), (2, ceil(height / strip), strip)]
        beside = (0, channels // vector, vector)
        return [beside, *inside] if by_channels else [*inside, beside]

    def workload(self, config: Config) -> Launch:
        g, strip, vector = self.geometry, config["strip"], config["vector"]
        (high, wide), inputs = g.kernel, g.group[0]
        rows = (strip - 1) * g.strides[0] + (high - 1) * g.dilation[0] + 1
        rows = min(rows, strip * high)
        taps, total = inputs * wide, self.total(config)
        # a load of each vector of inputs and of weights, and a conversion of each element
        read = (1 + vector) * taps * (rows + (high if self.weighted else 0))
        work = total * (read + vector * strip * (self.tap * taps * high + self.output))
        # a thread finds its image, row, column and channel
        indexing = total * (3 * (DIVISION + REMAINDER) + PLACING * taps * rows)
        again = max(1.0, rows / (strip * g.strides[0]))  # rows that the next strip reads too
        lines, scattered = lines_and_traffic(
            self._accesses(total * taps * rows, total * strip),
            self._lanes(vector, strip, self.by_channels),
            vector,
        )
        return launch(
            self.stage,
            config["threads"],
            float(work),
            BESIDE + vector * (strip + high),
            self.blocks(config),
            steps=1 + taps * ceil(rows / 8),
            traffic=again * self.stage.input_bytes + self.stage.output.type.nbytes + scattered,
            indexing=float(indexing),
            lines=lines,
        )

    def kind(self, config: Config) -> str:
        """The template argument."""
        g = self.geometry
        top, left, bottom, right = g.padding
        pairs = (g.kernel, g.strides, g.dilation, (top, left), (bottom, right),
                 g.source[1:3], g.output[1:3])  # fmt: skip
        sizes = ", ".join(f"gtco::Size<{high}, {wide}>" for high, wide in pairs)
        last = "true" if self.by_channels else "false"
        own = f"{g.output[0]}, {g.output[3]}, {config['strip']}, {config['vector']}, {last}"
        return f"gtco::Window<gtco::Sliding<{sizes}>, {own}>"

    def lambdas(self, args: Arguments, vector: int) -> tuple[str, str]:
        """The lambdas ``value`` and ``store``."""
        g = self.geometry
        (images, high, wide, _), c = g.output, ("c", g.output[3] // vector)

        def read(n: Expr, row: Expr, column: Expr, c: Expr, i: Expr, v: Expr) -> list[Expr]:
            return g.place(n, row, column, self.source(c * vector + v, i))

        def put(n: Expr, y: Expr, x: Expr, c: Expr, v: Expr) -> list[Expr]:
            return g.place(n, y, x, c * vector + v)

        n = ("n", images)
        where = [n, ("row", g.source[1]), ("column", g.source[2]), c, ("i", g.group[0])]
        return (
            reading(args, self.stage, self.image, "value", where, read, vector),
            storing(args, self.stage, self.tail, "store", [n, ("row", high), ("column", wide), c],
                    put, vector),
        )  # fmt: skip

    def lines(self, config: Config, op: Operator) -> tuple[Line, ...]:
        """The loops of ``op`` in words."""
        g, strip = self.geometry, config["strip"]
        rows = (strip - 1) * g.strides[0] + (g.kernel[0] - 1) * g.dilation[0] + 1
        return window_lines(
            self.stage,
            op,
            (self.blocks(config), config["threads"]),
            strip,
            config["vector"],
            g.group[0] if op.kind == "conv2d" else 1,
            g.kernel,
            rows,
        )

    def about(self) -> str:
        g = self.geometry
        windows = "x".join(map(str, g.kernel))
        return f"windows of {windows} over {'x'.join(map(str, g.source))}, {prod(g.output)} outputs"
