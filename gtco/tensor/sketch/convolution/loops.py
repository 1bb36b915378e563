"""The loops of a convolution's kernel; the picture is in
:mod:`gtco.tensor.sketch.convolution.cpu`."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import convert, literal
from gtco.tensor.emit.emitter import Expr
from gtco.tensor.emit.runs import copy_run
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.nest.emission import At, NestLoops
from gtco.tensor.nest.shape import Task
from gtco.tensor.sketch.convolution.facts import ConvolutionFacts
from gtco.tensor.space import Config


class ConvolutionLoops(NestLoops):
    """The emitter of one config of one stage. A batch of its nest is a group and an image."""

    def __init__(self, sketch: ConvolutionFacts, config: Config) -> None:
        product, nest = sketch.product, sketch.nest(config)
        self.conv, self.halo = sketch.view, sketch.halo(nest.lines[1], nest.row.kind)
        super().__init__(nest, sketch.stage, self.conv, product.tail, product.stores_columns)

    def begin(self, task: Task) -> None:
        """Copies the input rows that the task needs."""
        images = self.conv.result[0]
        self.image = self.em.let_index(task.batch % images, "image")
        self.group = self.em.let_index(task.batch // images, "group")
        self.copy_rows(self.group, self.image, task.first_line, task.lines)

    def copy_rows(self, group: Expr, image: Expr, row0: Expr, rows: Expr) -> None:
        """scratch[r] = the input's row under tap row r of the task's first output row, and so on;
        zeros outside the image.
        """
        em, view, halo = self.em, self.conv, self.halo
        (sh, _), (top, left, _, _) = view.op["strides"], view.op["padding"]
        (kh, _), (dh, _) = view.kernel, view.op["dilation"]
        height, width = view.image
        needed = em.index((rows - 1) * sh + (kh - 1) * dh + 1)
        inner = max(0, min(halo.width, width + left) - left)  # pixels of a row inside the image
        with em.loop(needed, "r") as r:
            y = em.let_index(row0 * sh + r - top, "y")

            def copy(r: Expr = r, y: Expr = y) -> None:
                self.clear(r, 0, min(left, halo.width))
                self.copy_row(group, image, r, y, left, inner)
                self.clear(r, left + inner, halo.width)

            inside = tirx.all(y >= 0, y < height) if view.padded else True
            em.branch(inside, copy, lambda r=r: self.clear(r, 0, halo.width))  # type: ignore[misc]

    def copy_row(self, group: Expr, image: Expr, r: Expr, y: Expr, left: int, inner: int) -> None:
        em, view, source = self.em, self.conv, self.conv.op.inputs[0]
        if inner <= 0:
            return
        if view.channels_first:
            with em.loop(self.halo.channels, "c") as c:
                copy_run(
                    em,
                    inner,
                    lambda x: self.reader.value(source, view.x_index(group, image, y, x, c)),
                    lambda x, value: self.put(r, left + x, c, self.read(value)),
                )
            return
        breaks = run_breaks(self.stage, view)
        with em.loop(inner, "x") as x:
            copy_run(
                em,
                self.halo.channels,
                lambda c: self.reader.value(source, view.x_index(group, image, y, x, c)),
                lambda c, value: self.put(r, left + x, c, self.read(value)),
                breaks,
            )

    def read(self, value: Expr) -> Expr:
        """A value of the input, converted to the dtype in which it is multiplied."""
        dtype = self.stage.types[self.view.op.inputs[0]].dtype
        return convert(self.em, value, dtype, self.kind.a.dtype)

    def clear(self, r: Expr, begin: int, end: int) -> None:
        """Writes zeros to pixels [begin, end) of a row of the scratch."""
        em, halo = self.em, self.halo
        zero = literal(0.0, self.kind.a.dtype)
        if end <= begin:
            return
        if self.conv.channels_first:
            with em.loop(halo.channels, "c") as c:
                copy_run(
                    em,
                    end - begin,
                    lambda x: zero,
                    lambda x, value: self.put(r, begin + x, c, value),
                )
            return
        copy_run(
            em,
            (end - begin) * halo.pixel,
            lambda e: zero,
            lambda e, value: self.put(r, begin, e, value),
        )

    def put(self, r: Expr, x: Expr, c: Expr, value: Expr) -> None:
        self.em.store(self.arrays["image"], [self.place(r, x, c)], value)

    def place(self, r: Expr, x: Expr, c: Expr) -> Expr:
        """The position of channel ``c`` of pixel ``x`` of row ``r`` in the scratch."""
        halo = self.halo
        if self.conv.channels_first:
            return (c * halo.rows + r) * halo.width + x
        return (r * halo.width + x) * halo.pixel + c

    def steps(self, at: At) -> tuple[Expr, int]:
        """A window is several runs of the copy."""
        return self.halo.depth, self.nest.kc // self.halo.depth

    def rows_of_a(self, at: At) -> Operand:
        """The windows of the block's pixels."""
        em, view, halo = self.em, self.conv, self.halo
        (sh, sw), (dh, dw), (kh, kw) = view.op["strides"], view.op["dilation"], view.kernel
        image = self.arrays["image"]
        base = em.let_index(image.flat([self.place(at.line * sh, at.start * sw, 0)]), "a_row")
        first = em.index(at.kb * (self.nest.kc // halo.depth))

        def along(k: Expr) -> Expr:
            run, step = first + em.index(k // halo.depth), em.index(k % halo.depth)
            if view.channels_first:
                return self.place(run % kh * dh, step * dw, run // kh)
            if halo.runs == kh:
                return self.place(run * dh, 0, step)
            return self.place(run // kw * dh, run % kw * dw, step)

        return Operand(image.buffer, base, self.nest.a.stride, along, dense=halo.step == 1)

    def batch_of_b(self, at: At) -> Expr:
        return self.conv.packed_batch(self.group)

    def index(self, at: At) -> Callable[[Expr, Expr], list[Expr]]:
        """A line is a row of the output."""
        view, row = self.conv, at.task.first_line + at.line
        first = view.group(self.group) * view.n
        return lambda m, n: view.place(self.image, row, m, first + n)
