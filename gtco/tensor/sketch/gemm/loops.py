"""The loops of a contraction's kernel; the picture is in :mod:`gtco.tensor.sketch.gemm.cpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvm import tirx

from gtco.tensor.emit.emitter import Expr
from gtco.tensor.emit.scratch import Piece
from gtco.tensor.intrinsics.emission import Operand, nibbles
from gtco.tensor.nest.emission import At, NestLoops
from gtco.tensor.nest.shape import Task
from gtco.tensor.sketch.gemm import norm_prologue
from gtco.tensor.sketch.gemm.facts import GemmFacts
from gtco.tensor.sketch.shared.pack import pack_columns, pack_rows
from gtco.tensor.space import Config
from gtco.tensor.stage import INT4


class GemmLoops(NestLoops):
    """The emitter of one config of one stage."""

    def __init__(self, sketch: GemmFacts, config: Config) -> None:
        self.sketch, nest = sketch, sketch.nest(config)
        super().__init__(nest, sketch.stage, sketch.view, sketch.tail, sketch.stores_columns)

    def pieces(self) -> Iterator[Piece]:
        """The scratch that a thread keeps beside its registers."""
        pieces = {piece.name: piece for piece in self.nest.pieces()}
        if "rows" in pieces:
            yield pieces.pop("rows")
        if self.sketch.norm is not None:  # its statistics
            yield Piece("mean", (self.shape.task_rows,))
            yield Piece("scale", (self.shape.task_rows,))
        yield from pieces.values()

    def begin(self, task: Task) -> None:
        """The statistics of the rows, if A is normalised."""
        norm, em, shape = self.sketch.norm, self.em, self.shape
        if norm is None:
            return
        row0 = em.let_index(shape.first_row(task.first_block), "row0")
        rows = em.let_index(shape.end_row(task.first_block + task.blocks) - row0, "rows")
        mean, scale = self.arrays["mean"], self.arrays["scale"]
        norm_prologue.statistics(self.reader, norm, row0, rows, mean, scale)
        normalised = norm_prologue.normalised(self.reader, norm, row0, mean, scale)
        self.reader.known[norm.output] = normalised

    def feed(self, at: At) -> None:
        """Packs rows of A with their prologue, and columns of a B that is not constant."""
        em, nest, batch, step = self.em, self.nest, at.task.batch, self.kind.step
        if nest.a.how == "packed":
            rows, into = self.height_of(at), self.arrays["rows"]
            pack_rows(self.reader, self.view, into, batch, at.row0, rows, at.kb, nest.kc, step)
        if nest.b.how == "packed":
            first, panels, into = at.task.first_panel, at.task.panels, self.arrays["panels"]
            with em.when(at.part == 0 if nest.kblocks == 1 else True):
                pack_columns(
                    self.reader, self.view, into, batch, first, panels, at.kb, nest.kc, step
                )

    def feed_panel(self, at: At) -> None:
        """Converts a block of k of a panel of constant B to the dtype that the row reads."""
        if self.nest.b.how != "widened":
            return
        em, stored, into = self.em, self.nest.stored, self.arrays["panel"]
        array = self.args.inputs[self.view.op.inputs[1]]
        start = em.let_index(self.place_of_b(at, at.whole_panel), "stored")
        wide, step = f"{into.dtype}x{em.lanes}", stored.step
        many, (depth, _) = stored.places(step), self.steps(at)
        with em.loop(em.index((depth + (step - 1)) // step), "steps") as number:
            k = em.index(number * step)
            scaled = self.scaled(at, k)
            for j in range(0, self.row.columns, em.lanes):
                value = array.buffer[em.ramp(start + k * self.b_step + j * many, em.lanes * many)]
                if stored.dtype == INT4:
                    words = em.let(tirx.reinterpret(f"int32x{em.lanes}", value), "words")
                    parts = [*nibbles(em, words)]
                else:
                    parts = [tirx.Cast(wide, value)]
                for n, vector in enumerate(scaled(j, parts)):
                    em.store_vector(into, [k + n, j], vector)

    def scaled(self, at: At, k: Expr) -> Callable[[int, Sequence[Expr]], Sequence[Expr]]:
        """Makes weights of steps: (step - zero point) * scale, with those of the block of k that
        step ``k`` lies in, for vectors from a column of the panel on. They stay steps if blocks
        have no scales.
        """
        sketch, em = self.sketch, self.em
        if sketch.scales is None:
            return lambda j, parts: parts
        block = em.let_index((at.kb * self.nest.kc + k) // self.view.op["block"], "block")
        place = (at.whole_panel * sketch.blocks + block) * self.row.columns
        start = em.let_index(place, "scales")

        def read(name: str, j: int) -> Expr:
            value = self.args.inputs[name].buffer[em.ramp(start + j, em.lanes)]
            return em.let(tirx.Cast(f"float32x{em.lanes}", value), "scale")

        def scaled(j: int, parts: Sequence[Expr]) -> Sequence[Expr]:
            scale = read(sketch.scales or "", j)
            if sketch.zeros is not None:
                zero = read(sketch.zeros, j)
                parts = [x - zero for x in parts]
            return [x * scale for x in parts]

        return scaled

    def rows_of_a(self, at: At) -> Operand:
        """A's rows of the block, in the packed copy or in an input."""
        if self.nest.a.how == "packed":
            packed = self.arrays["rows"]
            base = self.em.let_index(packed.flat([at.start - at.row0, 0]), "a_row")
            return Operand(packed.buffer, base, self.nest.lda)
        index = self.view.a_index(at.task.batch, at.start, at.kb * self.nest.kc)
        return self.in_place(0, index, "a_row")

    def panel_of_b(self, at: At) -> Operand:
        """The panel's block of k, as a constant, in the packed or widened copy or in an input."""
        how, columns = self.nest.b.how, self.row.columns
        if how == "panels":
            return super().panel_of_b(at)
        if how == "widened":
            panel = self.arrays["panel"]
            return Operand(panel.buffer, panel.flat([0, 0]), columns)
        if how == "packed":
            packed = self.arrays["panels"]
            base = self.em.let_index(packed.flat([at.panel, 0, 0]), "b_panel")
            return Operand(packed.buffer, base, columns)
        k, column = at.kb * self.nest.kc, at.whole_panel * columns
        return self.in_place(1, self.view.b_index(at.task.batch, k, column), "b_rows")

    def in_place(self, which: int, index: list[Expr], name: str) -> Operand:
        """The operand from an index on, where it lies in an input."""
        origin = self.reader.value(self.view.op.inputs[which], index)
        stride = (self.nest.a, self.nest.b)[which].stride
        return Operand(origin.source, self.em.let_index(origin.indices[0], name), stride)
