"""Sketch rule for contractions, structure SSRSRS: tasks (S S), blocks of k (R), panels and row
blocks (S), k (R), tile (S).

::

    for task in batch x row chunks x column chunks:          # parallel
      for kb in blocks of k:                                 # the block of B stays in L1 or L2
        pack rows of A (prologue, im2col), columns of B      # when the config says so
        for panel of nr columns in the task's columns:
          for block of mr (or mr - 1) rows in the task's rows:
            tile[mr, nr] (+)= A[mr, kc] x B[kc, nr]          # micro-kernel, in registers
            on the last kb: epilogue(tile) -> output

M = 197 costs no padding: rows are cut into blocks of two neighbouring heights, each with its own
micro-kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from tvm import tirx

from gtco.target import Target
from gtco.tensor.emit import Array, Emitter, Expr, KernelArguments, kernel
from gtco.tensor.expression import Epilogue, Reader, ancestors, epilogue, prologue_readable
from gtco.tensor.intrinsics.table import FmaTile, epilogue_vectors, micro_kernels, vectors
from gtco.tensor.sketch import norm_prologue
from gtco.tensor.sketch.contraction import (
    Contraction,
    ConvView,
    MatmulView,
    contraction,
    linear_rows,
)
from gtco.tensor.sketch.pack import pack_columns, pack_rows, run_breaks, unit_stride
from gtco.tensor.space import (
    Choice,
    Config,
    Decision,
    Layer,
    Program,
    Rejection,
    Stream,
    Workload,
    packed_types,
)
from gtco.tensor.stage import Operator, Stage

NORM_VECTORS = 12  # vector instructions of a layer_norm's three passes, on one vector
ALIGN = 16  # workspace pieces start at multiples of 16 floats (64 bytes)


def match(stage: Stage, target: Target) -> Gemm | None:
    """One contraction with a readable prologue and a one-to-one epilogue, else None."""
    anchors = [op for op in stage.operators if op.kind in ("matmul", "conv2d")]
    if len(anchors) != 1:
        return None
    op = anchors[0]
    if any(stage.types[t].dtype != "float32" for t in (*op.inputs, op.output)):
        return None
    view = contraction(stage, op)
    if view is None:
        return None
    norm = norm_prologue.find(stage, op.inputs[0])
    if norm is not None and not (isinstance(view, MatmulView) and view.folded):
        return None
    known = frozenset([norm.output] if norm else [])
    if not prologue_readable(stage, op.inputs, known):
        return None
    tail = epilogue(stage, op.output)
    if tail is None or stage.output.type.dtype != "float32":
        return None
    if isinstance(view, ConvView):
        if op.inputs[1] not in stage.constants:
            return None
        if not unit_stride(stage, view, "c") and unit_stride(stage, view, "kw"):
            view = contraction(stage, op, channels_first=True)
            assert isinstance(view, ConvView)
    return Gemm(stage, target, view, tail, norm)


@dataclass(frozen=True)
class Gemm:
    """A contraction on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target
    view: Contraction
    tail: Epilogue
    norm: Operator | None = None  # a layer_norm that makes A

    name = "gemm"
    structure = "SSRSRS"

    # the space ------------------------------------------------------------------------------------
    @cached_property
    def constant_b(self) -> bool:
        """B is known at compile time and laid out in panels then."""
        return self.view.op.inputs[1] in self.stage.constants and self.view.batch == 1

    @cached_property
    def direct_rows(self) -> int | None:
        """The row stride, in elements, where A's rows lie in an input as they are: no packing is
        needed then.
        """
        if self.norm is not None:
            return None
        if isinstance(self.view, ConvView) and (self.view.padded or self.view.kernel != (1, 1)):
            return None
        return _direct(self.stage, self.view)

    @cached_property
    def stores_columns(self) -> bool:
        """Do rows of C, not columns, lie side by side in the output (a transposed store)?"""
        probe = Emitter(1)
        b, m, n = (tirx.Var(x, "int32") for x in "bmn")
        for var, extent in ((b, self.view.batch), (m, self.view.m), (n, self.view.n)):
            probe.analyzer.bind(var, _range(extent))
        shape = tuple(int(d) for d in self.stage.output.type.shape)

        def flat(row: Expr) -> Expr:
            position: Expr = 0
            for extent, i in zip(
                shape, self.tail.forward(self.view.c_index(b, row, n)), strict=True
            ):
                position = position * extent + i
            return probe.index(position)

        return self.view.n > 1 and probe.index(flat(m + 1) - flat(m)) == 1

    def next_decision(self, chosen: Mapping[str, Choice]) -> Decision | None:
        v = self.view
        if "tile" not in chosen:
            return Decision("tile", tuple(t.name for t in self.tiles()))
        tile = FmaTile.parse(str(chosen["tile"]), self.target.lanes)
        if "chunks_m" not in chosen:
            return Decision("chunks_m", chunk_options(ceil(v.m / tile.rows), self.target.cores))
        if "chunks_n" not in chosen:
            return Decision("chunks_n", chunk_options(ceil(v.n / tile.columns), self.target.cores))
        if "a" not in chosen:
            return Decision(
                "a", ("direct", "packed") if self.direct_rows is not None else ("packed",)
            )
        if "kc" not in chosen:
            return Decision("kc", self.depth_options())
        if "prefetch" not in chosen:
            return Decision("prefetch", ("next", "none") if self.constant_b else ("none",))
        return None

    def tiles(self) -> list[FmaTile]:
        """Micro-kernels worth their place: full height, or the height that cuts m into equal
        blocks.
        """
        best: dict[tuple[int, int], FmaTile] = {}
        for tile in micro_kernels(self.target):
            if tile.rows > self.view.m or (tile.vectors - 1) * tile.lanes >= self.view.n:
                continue
            blocks = ceil(self.view.m / tile.rows)
            best.setdefault(
                (tile.vectors, blocks), tile
            )  # tallest first; equal block counts are the same program
        chosen = [
            t
            for t in best.values()
            if t.rows * t.vectors >= 8 or t.rows == self.view.m or t.rows >= self.view.m // 2
        ]
        return chosen or [min(best.values(), key=lambda t: -t.rows * t.vectors)]

    def depth_options(self) -> tuple[int, ...]:
        """Block sizes of k: multiples of what packing copies in one run, and all of k."""
        k, unit = self.view.k, self.depth_unit
        options = {k}
        if not isinstance(self.view, ConvView) and run_breaks(self.stage, self.view):
            return (k,)
        for wanted in (128, 256, 384, 512, 768, 1024):
            if wanted < k:
                blocks = ceil(k / wanted)
                options.add(min(k, ceil(k / blocks / unit) * unit))
        return tuple(sorted(options))

    @property
    def depth_unit(self) -> int:
        v = self.view
        if not isinstance(v, ConvView):
            return self.target.lanes
        return v.kernel[0] * v.kernel[1] if v.channels_first else v.channels

    # the price ------------------------------------------------------------------------------------
    def workload(self, config: Config) -> Workload:
        v, tile, shape = (
            self.view,
            FmaTile.parse(config["tile"], self.target.lanes),
            self.shape(config),
        )
        kc, kblocks = config["kc"], ceil(v.k / config["kc"])
        rows, panels, columns = shape.task_rows, shape.task_panels, tile.columns
        height = ceil(rows / shape.task_blocks)
        a_tile, b_panel, c_tile = 4.0 * height * kc, 4.0 * kc * columns, 4.0 * height * columns
        if config["a"] == "direct":
            stride = self.direct_rows or 0
            conflicts = stride * 4 % 4096 == 0 and height > 8
            followed = config["prefetch"] == "next" and stride == v.k and kblocks == 1
            a_stream = Stream(
                a_tile * (self.target.lanes if conflicts else 1),
                4.0 * rows * kc,
                chains=0 if followed else height,
            )
        else:
            a_stream = Stream(a_tile, 4.0 * rows * kc)
        partial = (Stream(c_tile, 4.0 * rows * panels * columns),) if kblocks > 1 else ()
        micro = Layer(
            shape.task_blocks, (a_stream, Stream(b_panel, b_panel + a_tile), *partial), partial
        )
        weights = Stream(b_panel, 4.0 * v.k * v.n, "DRAM" if self.constant_b else "")
        panel = Layer(panels, (weights,), overlapped=config["prefetch"] == "next")
        packed = Stream(4.0 * rows * kc, 4.0 * v.batch * v.m * v.k)
        copies = (packed,), (Stream(packed.nbytes, 4.0 * rows * kc),)
        block = Layer(kblocks, *(copies if config["a"] == "packed" else ()))
        task = Layer(
            1, (), (Stream(4.0 * rows * panels * columns, 4.0 * v.batch * v.m * v.n),), shape.tasks
        )
        lanes = self.target.lanes
        spill = 2.0 * kblocks + 2  # vectors stored and loaded between registers, tile and output
        extra = [("vector", v.batch * v.m * v.n / lanes * (spill + epilogue_vectors(self.tail)))]
        if config["a"] == "packed":
            each = 2 + vectors(ancestors(self.stage, v.op.inputs[0]))
            each += NORM_VECTORS if self.norm else 0
            extra.append(("vector", each * shape.tasks * rows * v.k / lanes))
        if not self.constant_b:
            extra.append(("vector", 2.0 * shape.tasks * v.k * panels * columns / lanes))
        return Workload(
            f"fma:{height}x{tile.vectors}",
            height * tile.vectors * kc,
            (micro, panel, block, task),
            v.flops,
            tuple(extra),
        )

    @property
    def signature(self) -> tuple[object, ...]:
        """All that the best config depends on; stages with other epilogues share it."""
        v = self.view
        return (
            type(v).__name__,
            v.batch,
            v.m,
            v.n,
            v.k,
            v.b_shape,
            self.direct_rows,
            self.constant_b,
            self.depth_unit,
            vectors(ancestors(self.stage, v.op.inputs[0])),
            self.norm is not None,
        )

    def shape(self, config: Config) -> TaskShape:
        tile = FmaTile.parse(config["tile"], self.target.lanes)
        return task_shape(self.view, tile, config["chunks_m"], config["chunks_n"])

    # the program ----------------------------------------------------------------------------------
    def build(self, config: Config, symbol: str) -> Program | Rejection:
        plan = _Plan(self, config)
        packings = (
            {self.view.op.inputs[1]: self.view.packing(plan.tile.columns)}
            if self.constant_b
            else {}
        )
        types = packed_types(self.stage, packings)
        function = kernel(
            symbol, types, self.stage.output.type, plan.workspace, self.target.lanes, plan.emit
        )
        return Program(function, plan.shape.tasks, plan.workspace, packings)


@dataclass(frozen=True)
class TaskShape:
    """How rows and panels are cut: ``blocks`` row blocks, the first ``taller`` of them one row
    higher than ``height``.
    """

    blocks: int
    height: int
    taller: int
    task_blocks: int
    panels: int
    task_panels: int
    chunks_m: int
    chunks_n: int
    tasks: int

    @property
    def task_rows(self) -> int:
        """Most rows that a task has."""
        return self.task_blocks * self.height + min(self.taller, self.task_blocks)

    @property
    def heights(self) -> tuple[int, ...]:
        if self.taller in (0, self.blocks):
            return (self.height + (self.taller > 0),)
        return self.height + 1, self.height


def task_shape(view: Contraction, tile: FmaTile, chunks_m: int, chunks_n: int) -> TaskShape:
    blocks = ceil(view.m / tile.rows)
    height, taller = divmod(view.m, blocks)
    panels = ceil(view.n / tile.columns)
    task_blocks, task_panels = ceil(blocks / chunks_m), ceil(panels / chunks_n)
    chunks_m, chunks_n = ceil(blocks / task_blocks), ceil(panels / task_panels)
    return TaskShape(
        blocks,
        height,
        taller,
        task_blocks,
        panels,
        task_panels,
        chunks_m,
        chunks_n,
        view.batch * chunks_m * chunks_n,
    )


def chunk_options(pieces: int, cores: int) -> tuple[int, ...]:
    """Numbers of chunks: one, and multiples of the core count; the largest chunk rounds up, so few
    numbers differ.
    """
    wanted = [1, *(cores * f for f in (1, 2, 3, 4, 6, 8, 16, 32, 64))]
    return tuple(sorted({ceil(pieces / ceil(pieces / min(w, pieces))) for w in wanted}))


def _direct(stage: Stage, view: Contraction) -> int | None:
    probe = Emitter(1)
    seen: list[tuple[str, Expr]] = []

    class Probe(Reader):
        def load(self, tensor: str, index: list[Expr]) -> Expr:  # type: ignore[override]
            flat: Expr = 0
            for extent, i in zip(self.shape(tensor), index, strict=True):
                flat = flat * extent + i
            seen.append((tensor, self.emitter.index(flat)))
            return tirx.const(0, "float32")

    op = stage.producers.get(view.op.inputs[0])
    while op is not None:
        if op.kind not in ("reshape", "identity", "slice", "permute"):
            return None
        op = stage.producers.get(op.inputs[0])
    m, k, b = (tirx.Var(x, "int32") for x in "mkb")
    for var, extent in ((m, view.m), (k, view.k), (b, view.batch)):
        probe.analyzer.bind(var, _range(extent))
    Probe(stage, probe, {}).value(view.op.inputs[0], view.a_index(b, m, k))
    found = linear_rows(seen[0][1], m, k)
    return found[1] if found else None


def _range(extent: int) -> object:
    import tvm

    return tvm.ir.Range(0, extent)


class _Plan:
    """One config of one stage, being emitted."""

    def __init__(self, sketch: Gemm, config: Config) -> None:
        self.sketch, self.config, self.view, self.stage = sketch, config, sketch.view, sketch.stage
        self.tile = FmaTile.parse(config["tile"], sketch.target.lanes)
        self.shape = sketch.shape(config)
        self.kc = config["kc"]
        self.kblocks = ceil(self.view.k / self.kc)
        self.packed_a = config["a"] == "packed"
        # a row stride that is a multiple of 1 KiB would put all rows of a tile into a few cache
        # sets
        self.lda = self.kc + (ALIGN if self.kc % 256 == 0 else -self.kc % ALIGN)
        size_a = self.shape.task_rows * self.lda if self.packed_a else 0
        # statistics of a normalising prologue, two floats a row
        self.offset_n = -(-size_a // ALIGN) * ALIGN
        padded_rows = -(-self.shape.task_rows // ALIGN) * ALIGN
        size_n = 2 * padded_rows if sketch.norm else 0
        self.scale_at = self.offset_n + padded_rows
        size_b = 0 if sketch.constant_b else self.shape.task_panels * self.kc * self.tile.columns
        tile_size = self.tile.rows * self.tile.columns
        tiles = self.shape.task_blocks * self.shape.task_panels if self.kblocks > 1 else 1
        self.offset_b = self.offset_n + size_n
        self.offset_c = self.offset_b + -(-size_b // ALIGN) * ALIGN
        self.tile_size = tile_size
        self.workspace = 4 * (self.offset_c + tiles * tile_size)

    def emit(self, em: Emitter, args: KernelArguments) -> None:
        view, shape = self.view, self.shape
        self.em, self.args = em, args
        self.reader = Reader(self.stage, em, args.inputs)
        with em.range(args.begin, args.end, "task") as task:
            em.analyzer.bind(task, _range(shape.tasks))
            chunk_n = em.let_index(task % shape.chunks_n, "chunk_n")
            rest = em.let_index(task // shape.chunks_n, "rest")
            chunk_m = em.let_index(rest % shape.chunks_m, "chunk_m")
            batch = em.let_index(rest // shape.chunks_m, "batch")
            first_block = em.let_index(chunk_m * shape.task_blocks, "first_block")
            blocks = em.let_index(
                self.share(first_block, shape.task_blocks, shape.blocks), "blocks"
            )
            first_panel = em.let_index(chunk_n * shape.task_panels, "first_panel")
            panels = em.let_index(
                self.share(first_panel, shape.task_panels, shape.panels), "panels"
            )
            row0 = em.let_index(self.first_row(first_block), "row0")
            rows = em.let_index(self.first_row(first_block + blocks) - row0, "rows")
            if (norm := self.sketch.norm) is not None:
                mean = args.scratch((shape.task_rows,), self.offset_n)
                scale = args.scratch((shape.task_rows,), self.scale_at)
                norm_prologue.statistics(self.reader, norm, row0, rows, mean, scale)
                self.reader.known[norm.output] = norm_prologue.normalised(
                    self.reader, norm, row0, mean, scale
                )
            with em.loop(self.kblocks, "kb") as kb:
                if self.packed_a:
                    packed = args.scratch((shape.task_rows, self.lda), 0)
                    pack_rows(self.reader, view, packed, batch, row0, rows, kb, self.kc)
                if not self.sketch.constant_b:
                    panel_buffer = args.scratch(
                        (shape.task_panels, self.kc, self.tile.columns), self.offset_b
                    )
                    pack_columns(
                        self.reader, view, panel_buffer, batch, first_panel, panels, kb, self.kc
                    )
                with em.loop(panels, "panel") as panel, em.loop(blocks, "block") as block:
                    self.tile_program(batch, kb, first_panel, panel, first_block, block, row0)

    def share(self, first: Expr, share: int, total: int) -> Expr:
        """Pieces left for a task that starts at ``first``."""
        return share if total % share == 0 else tirx.min(share, total - first)

    def first_row(self, block: Expr) -> Expr:
        shape = self.shape
        start = block * shape.height
        return start if shape.taller == 0 else start + tirx.min(block, shape.taller)

    def tile_program(
        self,
        batch: Expr,
        kb: Expr,
        first_panel: Expr,
        panel: Expr,
        first_block: Expr,
        block: Expr,
        row0: Expr,
    ) -> None:
        em, shape = self.em, self.shape
        this_block = em.let_index(first_block + block, "this_block")
        start = em.let_index(self.first_row(this_block), "start")
        where = (block * shape.task_panels + panel) * self.tile_size if self.kblocks > 1 else 0
        tile = Array(
            self.args.workspace.buffer,
            (self.tile.rows, self.tile.columns),
            "float32",
            em.let_index(self.offset_c + where, "tile"),
        )

        def micro(rows: int) -> Callable[[], None]:
            return lambda: self.micro_kernel(
                rows, tile, batch, kb, first_panel, panel, block, start, row0
            )

        if len(shape.heights) == 1:
            micro(shape.heights[0])()
        else:
            em.branch(this_block < shape.taller, micro(shape.heights[0]), micro(shape.heights[1]))
        height = (
            shape.heights[0]
            if len(shape.heights) == 1
            else tirx.Select(
                this_block < shape.taller,
                tirx.const(shape.heights[0], "int32"),
                tirx.const(shape.heights[1], "int32"),
            )
        )
        with em.when(kb == self.kblocks - 1 if self.kblocks > 1 else True):
            self.write(tile, batch, first_panel + panel, start, height)

    def micro_kernel(
        self,
        rows: int,
        tile: Array,
        batch: Expr,
        kb: Expr,
        first_panel: Expr,
        panel: Expr,
        block: Expr,
        start: Expr,
        row0: Expr,
    ) -> None:
        """tile[rows, columns] (+)= A[rows, kc] x B[kc, columns], accumulators in registers."""
        em, nv, lanes = self.em, self.tile.vectors, self.tile.lanes
        acc = em.registers(rows * nv * lanes)
        cells = [(i, j, (i * nv + j) * lanes) for i in range(rows) for j in range(nv)]

        def clear() -> None:
            for _, _, at in cells:
                em.store_vector(acc, [at], em.splat(0.0))

        def resume() -> None:
            for i, j, at in cells:
                em.store_vector(acc, [at], em.load_vector(tile, [i, j * lanes]))

        if self.kblocks == 1:
            clear()
        else:
            em.branch(kb == 0, clear, resume)
        depth = self.depth(kb)
        a = self.row_pointer(batch, kb, start, row0)
        b = self.panel_pointer(kb, first_panel, panel)
        with em.loop(depth, "k") as k:
            if self.config["prefetch"] == "next":
                self.prefetch(kb, first_panel + panel + 1, block, start, rows, depth, k)
            vectors = [em.let(b(k, j * lanes), "b") for j in range(nv)]
            for i in range(rows):
                value = em.let(em.splat(a(i, k)), "a")
                for j in range(nv):
                    at = (i * nv + j) * lanes
                    em.store_vector(acc, [at], em.load_vector(acc, [at]) + value * vectors[j])
        for i, j, at in cells:
            em.store_vector(tile, [i, j * lanes], em.load_vector(acc, [at]))

    def prefetch(
        self, kb: Expr, panel: Expr, block: Expr, start: Expr, rows: int, depth: Expr, k: Expr
    ) -> None:
        """A share of what comes next, a line or two a step of k: of the next panel, which all
        blocks' steps together cover, and of the next rows where they lie in an input.
        """
        em, view, columns = self.em, self.view, self.tile.columns
        share = ceil(columns / self.shape.task_blocks)
        base = (panel * view.k + kb * self.kc) * columns
        array = self.args.inputs[view.op.inputs[1]]
        em.prefetch(array, base + (block * depth + k) * share)
        if not self.packed_a and self.sketch.direct_rows == view.k and self.kblocks == 1:
            ahead = self.row_pointer(0, kb, start, start)
            em.prefetch_value(ahead(rows, k * rows))

    def depth(self, kb: Expr) -> Expr:
        if self.view.k % self.kc == 0:
            return self.kc
        return self.em.let_index(tirx.min(self.kc, self.view.k - kb * self.kc), "depth")

    def row_pointer(
        self, batch: Expr, kb: Expr, start: Expr, row0: Expr
    ) -> Callable[[int, Expr], Expr]:
        em = self.em
        if self.packed_a:
            base = em.let_index((start - row0) * self.lda, "a_row")
            packed = self.args.workspace.buffer
            return lambda i, k: packed[em.index(base + i * self.lda + k)]
        stride = self.sketch.direct_rows or 0
        origin = self.reader.value(
            self.view.op.inputs[0], self.view.a_index(batch, start, kb * self.kc)
        )
        base = em.let_index(origin.indices[0], "a_row")
        return lambda i, k: origin.source[em.index(base + i * stride + k)]

    def panel_pointer(
        self, kb: Expr, first_panel: Expr, panel: Expr
    ) -> Callable[[Expr, int], Expr]:
        em, columns = self.em, self.tile.columns
        if self.sketch.constant_b:
            array = self.args.inputs[self.view.op.inputs[1]]
            base = em.let_index(
                ((first_panel + panel) * self.view.k + kb * self.kc) * columns, "b_panel"
            )
            return lambda k, j: array.buffer[em.ramp(base + k * columns + j)]
        base = em.let_index(self.offset_b + panel * (self.kc * columns), "b_panel")
        return lambda k, j: self.args.workspace.buffer[em.ramp(base + k * columns + j)]

    def write(self, tile: Array, batch: Expr, panel: Expr, start: Expr, height: Expr) -> None:
        """Epilogue and store of a finished tile; the last panel may be narrower."""
        columns = self.tile.columns
        tail = self.view.n % columns
        store = self.write_columns if self.sketch.stores_columns else self.write_rows

        def cut(width: int) -> Callable[[], None]:
            return lambda: store(tile, batch, panel * columns, start, height, width)

        if tail == 0:
            cut(columns)()
        elif self.shape.panels == 1:
            cut(tail)()
        else:
            self.em.branch(panel < self.shape.panels - 1, cut(columns), cut(tail))

    def write_rows(
        self, tile: Array, batch: Expr, column: Expr, start: Expr, height: Expr, width: int
    ) -> None:
        """Row by row, vectors along n."""
        em, lanes = self.em, self.tile.lanes
        with em.loop(height, "row") as i:
            m = em.let_index(start + i, "m")
            for j in range(0, width, lanes):
                with em.vector(min(lanes, width - j)) as v:
                    self.element(tile, batch, i, j + v, m, column + j + v)

    def write_columns(
        self, tile: Array, batch: Expr, column: Expr, start: Expr, height: Expr, width: int
    ) -> None:
        """Column by column, vectors along m, where neighbours in m are neighbours in the output."""
        em = self.em

        def body(rows: int) -> Callable[[], None]:
            def emit() -> None:
                with em.loop(width, "column") as j, em.vector(rows) as v:
                    self.element(tile, batch, v, j, start + v, column + j)

            return emit

        heights = self.shape.heights
        if len(heights) == 1:
            body(heights[0])()
        else:
            em.branch(height == heights[0], body(heights[0]), body(heights[1]))

    def element(self, tile: Array, batch: Expr, i: Expr, j: Expr, m: Expr, n: Expr) -> None:
        value = self.em.load(tile, [i, j])
        index = self.view.c_index(batch, m, n)
        result, where = self.sketch.tail.value(self.reader, index, value)
        self.em.store(self.args.output, where, result)
