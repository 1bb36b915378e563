"""The loops that resizing and sampling share on a GPU: outputs that are sums of a few taps of an
image.

A thread takes one position of the output and some vectors of its channels (``points.cuh``). The
places and the weights of the taps are computed once for all of them. The taps' channels are read 16
bytes at once, side by side in a warp. No thread waits for another::

    for thread in images x rows x columns x shares of the channels:
      taps = rows, columns and weights of the position
      for vector of channels: output = epilogue(sum over taps of weight * image[row, column])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from tvm import tirx

from gtco.tensor.analysis.chains import Epilogue, shape_of
from gtco.tensor.analysis.images import nhwc, place
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.lambdas import Body
from gtco.tensor.cuda.neighbours import (
    HEADER,
    NearReader,
    each_lane,
    finish,
    function,
    side_by_side,
)
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.sketch.shared.cuda_lanes import Access, accesses, lines_and_traffic
from gtco.tensor.sketch.shared.cuda_loops import point_lines
from gtco.tensor.sketch.shared.cuda_streaming import launch
from gtco.tensor.space import Config, Decision, Option
from gtco.tensor.stage import Operator, Stage

VECTORS = (4, 2, 1)  # channels that a thread reads at once
REPEATS = (1, 2, 4)  # vectors of channels of a thread
THREADS = (64, 128, 256)
BESIDE = 40  # further registers, beside the taps' values


@dataclass(frozen=True)
class Tap:
    """A position of the image that counts.

    - ``weight``: None for 1;
    - ``there``: whether the position lies in the image; None if it always does.
    """

    row: Expr
    column: Expr
    weight: Expr | None = None
    there: Expr | None = None


# (image, row, column of the output) -> its taps
Find = Callable[[Body, Expr, Expr, Expr], list[Tap]]


@dataclass(frozen=True)
class Points:
    """One stage's outputs ``op`` of an image, with the epilogue ``tail``; each has ``taps`` taps.

    ``locating``: instructions that find the taps of one position.
    """

    stage: Stage
    op: Operator
    tail: Epilogue
    taps: int
    locating: float

    @property
    def image(self) -> str:
        return self.op.inputs[0]

    @property
    def layout(self) -> str:
        return str(self.op["layout"])

    @cached_property
    def output(self) -> tuple[int, int, int, int]:
        """Images, height, width, channels."""
        return nhwc(self.op.type.shape, self.layout)

    @cached_property
    def source(self) -> tuple[int, int, int, int]:
        return nhwc(shape_of(self.stage, self.image), self.layout)

    @cached_property
    def vectors(self) -> tuple[int, ...]:
        if self.layout != "NHWC":
            return (1,)
        channels = self.output[3]
        return tuple(n for n in VECTORS if n == 1 or (channels % n == 0 and self._even(n)))

    def _even(self, lanes: int) -> bool:
        def follow(probe: Probe, *at: Expr) -> None:
            n, y, x, row, column, c, lane = at
            probe.follow(self.image, [n, row, column, c * lanes + lane])
            probe.through(self.tail, [n, y, x, c * lanes + lane])

        extents = (*self.output[:3], *self.source[1:3], self.output[3] // lanes)
        return side_by_side(self.stage, extents, follow, lanes)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The decisions, in order:

        - vector: channels that a thread reads at once;
        - repeat: the number of such vectors that it makes of one position;
        - threads: those of a block.
        """
        if "vector" not in chosen:
            return Decision("vector", "registers", self.vectors)
        if "repeat" not in chosen:
            vectors = self.output[3] // int(chosen["vector"])
            options = tuple(n for n in REPEATS if vectors % n == 0)
            return Decision("repeat", "grain", options)
        if "threads" not in chosen:
            return Decision("threads", "block", THREADS)
        return None

    def total(self, config: Config) -> int:
        """Threads of all blocks together."""
        return prod(self.output) // (config["vector"] * config["repeat"])

    def blocks(self, config: Config) -> int:
        return ceil(self.total(config) / config["threads"])

    def workload(self, config: Config) -> Launch:
        vector, repeat = config["vector"], config["repeat"]
        a_vector = self.taps * (3.0 + 2.0 * vector)
        read = self.taps * 4.0 * prod(self.output)
        # the taps of neighbours overlap: a pixel comes from L2 about once a row of taps
        again = max(1.0, read / 4.0 / max(self.stage.types[self.image].nbytes, 1))
        traffic = again * self.stage.input_bytes + self.stage.output.type.nbytes
        taps, others = self._places
        lanes = float(self.total(config) * repeat)
        made = [*((x, lanes * self.taps) for x in taps), *((x, lanes) for x in others)]
        lines, scattered = lines_and_traffic(made, self._lanes(config), vector)
        return launch(
            self.stage,
            config["threads"],
            self.total(config) * (self.locating + repeat * a_vector),
            BESIDE + vector * self.taps,
            self.blocks(config),
            steps=2 + repeat,
            traffic=traffic + scattered,
            lines=lines,
        )

    @cached_property
    def _places(self) -> tuple[list[Access], list[Access]]:
        """The loads of a tap, and the loads and the store of an output, along channels and columns
        of the output. Taps of neighbouring outputs lie about as far apart as the widths of image
        and output say.
        """
        probe, wide = Probe(self.stage), self.source[2]
        n, y, x, c, row, column = probe.scope.variables((*self.output, *self.source[1:3]))
        probe.follow(self.image, place(self.layout, n, row, column, c))
        taps = accesses(probe, ((c, 1), (column, wide / self.output[2])))
        begin = len(probe.loads)
        probe.through(self.tail, place(self.layout, n, y, x, c))
        return taps, accesses(probe, ((c, 1), (x, 1)), begin)

    def _lanes(self, config: Config) -> list[tuple[int, int, int]]:
        """The axes along which lanes run."""
        vector = config["vector"]
        across = self.output[3] // (vector * config["repeat"])
        channels, columns = (0, across, vector), (1, self.output[2], 1)
        return [channels, columns] if self.layout == "NHWC" else [columns, channels]

    def build(self, config: Config, symbol: str, find: Find) -> CudaProgram:
        vector, threads = config["vector"], config["threads"]
        images, high, wide, channels = self.output
        vectors, last = channels // vector, self.layout == "NHWC"
        own = self.stage.types[self.image].dtype

        def body(b: Body) -> None:
            n, y, x, c = b.index
            taps = find(b, n, y, x)

            def put(v: Expr) -> list[Expr]:
                return place(self.layout, n, y, x, c * vector + v)

            def read(tap: Tap, v: Expr) -> list[Expr]:
                return place(self.layout, n, tap.row, tap.column, c * vector + v)

            def follow(probe: Probe, v: Expr) -> None:
                for tap in taps:
                    probe.follow(self.image, read(tap, v))
                probe.through(self.tail, put(v))

            def element(reader: NearReader, v: Expr) -> None:
                total: Expr = None
                for tap in taps:
                    value = convert(b.em, reader.value(self.image, read(tap, v)), own, "float32")
                    if tap.there is not None:
                        value = tirx.Select(tap.there, value, tirx.const(0, "float32"))
                    term = value if tap.weight is None else value * tap.weight
                    total = term if total is None else total + term
                result = convert(b.em, b.em.let(total, "total"), "float32", self.op.type.dtype)
                finish(b, reader, self.tail, put(v), result)

            each_lane(b, self.stage, vector, follow, element)

        names = [("n", images), ("row", high), ("column", wide), ("c", vectors)]
        text = function(arguments(self.stage), "element", names, body, {})
        sizes = (images, high, wide, vectors, config["repeat"])
        call = f"gtco::each_point<{', '.join(map(str, sizes))}, {'true' if last else 'false'}>"
        about = f"{self.taps} taps of {'x'.join(map(str, self.source))}"
        return CudaProgram(
            source(
                symbol, self.stage, ("points.cuh", HEADER), [text],
                f"{call}(block * {threads} + threadIdx.x, element);", threads, about,
            ),
            (self.blocks(config), 1, 1),
            threads,
            lines=point_lines(
                self.stage, self.op, (self.blocks(config), threads), self.taps, vector,
                config["repeat"],
            ),
        )  # fmt: skip
