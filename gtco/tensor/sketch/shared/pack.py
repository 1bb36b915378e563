"""Copies operands of a contraction into scratch: rows of A (with any prologue, im2col included),
and columns of B.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.contraction import Contraction, ConvView
from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import convert, literal, pair
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.reader import Reader

RUN_COST = 3.0  # vector instructions that start a run of neighbours: its place, its border
MOVE_COST = 3.0  # loading and storing a vector takes the time of so many vector instructions


def row_vectors(view: Contraction, each: float, lanes: int) -> float:
    """Vector instructions that pack one row of A, ``each`` a vector. A run shorter than a vector
    (three channels, or elements that are gathered) costs as much as a whole one.
    """
    if not isinstance(view, ConvView):
        return each * (view.k if view.gathered else ceil(view.k / lanes))
    return view.k / view.run * (RUN_COST + each * ceil(view.run / lanes))


def pack_rows(
    reader: Reader,
    view: Contraction,
    packed: Array,
    batch: Expr,
    row0: Expr,
    rows: Expr,
    kb: Expr,
    kc: int,
    step: int = 1,
) -> None:
    """packed[r, k] = A[row0 + r, kb * kc + k] for the rows of a task, in the dtype of ``packed``;
    zeros beyond the last k up to a whole ``step``.
    """
    em = reader.emitter
    if view.k % step:
        last = ceil(view.k / kc) - 1
        with em.when(kb == last if last else True), em.loop(rows, "r") as r:
            end = view.k - last * kc
            with em.vector(-end % step, "l") as k:
                em.store(packed, [r, end + k], literal(0.0, packed.dtype))
    if isinstance(view, ConvView):
        _pack_conv(reader, view, packed, batch, row0, rows, kb, kc)
        return
    full = view.k % kc == 0
    breaks = run_breaks(reader.stage, view)
    assert not breaks or kc == view.k
    with em.loop(rows, "r", rolled=not isinstance(rows, int)) as r:
        m = em.let_index(row0 + r, "m")
        if full:
            copy_run(
                em,
                kc,
                lambda k: reader.value(view.op.inputs[0], view.a_index(batch, m, kb * kc + k)),
                lambda k, value: _put(reader, view, packed, [r, k], value),
                breaks,
            )
        else:
            last = ceil(view.k / kc) - 1
            for width, condition in ((kc, kb < last), (view.k - last * kc, kb >= last)):
                with em.when(condition):
                    copy_run(
                        em,
                        width,
                        lambda k: reader.value(
                            view.op.inputs[0], view.a_index(batch, m, kb * kc + k)
                        ),
                        lambda k, value: _put(reader, view, packed, [r, k], value),
                    )


def _put(
    reader: Reader, view: Contraction, packed: Array, index: Sequence[Expr], value: Expr
) -> None:
    """Stores a value of A in the dtype in which it is multiplied."""
    em, dtype = reader.emitter, reader.stage.types[view.op.inputs[0]].dtype
    em.store(packed, index, convert(em, value, dtype, packed.dtype))


def copy_run(
    em: Emitter,
    length: int,
    read: Callable[[Expr], Expr],
    write: Callable[[Expr, Expr], None],
    breaks: Sequence[int] = (),
) -> None:
    """Copies ``length`` neighbours: whole vectors in a loop, then the rest as a shorter vector.

    ``breaks`` cut the run into pieces that are copied one after the other.
    """
    if breaks:
        for begin, end in itertools.pairwise([0, *breaks, length]):
            copy_run(
                em,
                end - begin,
                lambda k, begin=begin: read(begin + k),  # type: ignore[misc]
                lambda k, value, begin=begin: write(begin + k, value),  # type: ignore[misc]
            )
        return
    whole = length // em.lanes * em.lanes
    if whole:
        with em.loop(whole // em.lanes, "v") as v, em.vector(em.lanes, "l") as lane:
            write(v * em.lanes + lane, read(v * em.lanes + lane))
    if length > whole:
        with em.vector(length - whole, "l") as lane:
            write(whole + lane, read(whole + lane))


def _pack_conv(
    reader: Reader,
    view: ConvView,
    packed: Array,
    batch: Expr,
    row0: Expr,
    rows: Expr,
    kb: Expr,
    kc: int,
) -> None:
    """im2col. In a block of k, k runs over whole groups of neighbours: (kh, kw) x channels, or
    channels x (kh, kw).
    """
    em = reader.emitter
    height, width = view.kernel
    source = view.op.inputs[0]
    breaks = run_breaks(reader.stage, view)
    group = height * width if view.channels_first else view.channels
    groups = view.k // group
    per_block = kc // group
    with em.loop(rows, "r", rolled=not isinstance(rows, int)) as r:
        m = em.let_index(row0 + r, "m")
        pixel = [em.let_index(p, "p") for p in view.pixel(m)]
        first = em.let_index(kb * per_block, "first")
        count = (
            per_block
            if groups % per_block == 0
            else em.let_index(tirx.min(per_block, groups - first), "count")
        )
        with em.loop(count, "g") as g:
            if view.channels_first:
                c = em.let_index(first + g, "c")
                with em.loop(height, "kh") as kh:
                    row, column = view.source(batch, pixel, kh, 0)
                    _row_run(
                        reader,
                        view,
                        packed,
                        batch,
                        r,
                        (g * height + kh) * width,
                        pixel[0],
                        em.let_index(row, "row"),
                        em.let_index(column, "column"),
                        c,
                    )
            else:
                position = em.let_index(first + g, "position")
                kh, kw = em.let_index(position // width, "kh"), em.let_index(position % width, "kw")
                row, column = (em.let_index(x, "x") for x in view.source(batch, pixel, kh, kw))

                def copy(r: Expr = r, g: Expr = g, row: Expr = row, column: Expr = column) -> None:
                    copy_run(
                        em,
                        group,
                        lambda c: reader.value(
                            source, view.x_index(batch, pixel[0], row, column, c)
                        ),
                        lambda c, value: _put(reader, view, packed, [r, g * group + c], value),
                        breaks,
                    )

                def zero(r: Expr = r, g: Expr = g) -> None:
                    copy_run(
                        em,
                        group,
                        lambda c: literal(0.0, packed.dtype),
                        lambda c, value: em.store(packed, [r, g * group + c], value),
                    )

                em.branch(_inside(view, row, column), copy, zero)


def _row_run(
    reader: Reader,
    view: ConvView,
    packed: Array,
    batch: Expr,
    r: Expr,
    at: Expr,
    image: Expr,
    row: Expr,
    column: Expr,
    c: Expr,
) -> None:
    """Copies one row of a channel's window: as a vector inside the image, element by element at the
    border.
    """
    em = reader.emitter
    width, dilation = view.kernel[1], view.op["dilation"][1]
    source = view.op.inputs[0]

    def inside() -> None:
        with em.vector(width, "kw") as kw:
            _put(
                reader,
                view,
                packed,
                [r, at + kw],
                reader.value(source, view.x_index(batch, image, row, column + kw * dilation, c)),
            )

    def border() -> None:
        with em.loop(width, "kw") as kw:
            x = em.let_index(column + kw * dilation, "x")
            em.branch(
                _inside(view, row, x),
                lambda: _put(
                    reader,
                    view,
                    packed,
                    [r, at + kw],
                    reader.value(source, view.x_index(batch, image, row, x, c)),
                ),
                lambda: em.store(packed, [r, at + kw], literal(0.0, packed.dtype)),
            )

    whole = (
        tirx.all(_inside(view, row, column), _inside(view, row, column + (width - 1) * dilation))
        if view.padded
        else True
    )
    em.branch(whole, inside, border)


def _inside(view: ConvView, row: Expr, column: Expr) -> Expr:
    if not view.padded:
        return True
    height, width = view.image
    return tirx.all(row >= 0, row < height, column >= 0, column < width)


def pack_columns(
    reader: Reader,
    view: Contraction,
    packed: Array,
    batch: Expr,
    first_panel: Expr,
    panels: Expr,
    kb: Expr,
    kc: int,
    step: int = 1,
) -> None:
    """packed[p, k, j] = B[kb * kc + k, (first_panel + p) * nr + j], zero beyond n. If ``packed``
    holds pairs, its k-th element is those of 2 k and 2 k + 1, zero beyond k, up to a whole
    ``step``.
    """
    em = reader.emitter
    columns, pairs = packed.shape[2], packed.dtype == "int32"
    depth = kc if view.k % kc == 0 else em.let_index(tirx.min(kc, view.k - kb * kc), "depth")
    last, rest = ceil(view.n / columns) - 1, view.n % columns

    def fill(p: Expr, width: int) -> None:
        def element(k: Expr, j: Expr) -> Expr:
            n = (first_panel + p) * columns + j
            return reader.value(view.op.inputs[1], view.b_index(batch, kb * kc + k, n))

        def row(k: Expr, value: Callable[[Expr], Expr]) -> None:
            for j in range(0, columns, em.lanes):
                lanes = max(0, min(em.lanes, width - j))
                if lanes:
                    with em.vector(lanes, "l") as lane:
                        em.store(packed, [p, k, j + lane], value(j + lane))
                if lanes < em.lanes:
                    with em.vector(em.lanes - lanes, "l") as lane:
                        zero = tirx.const(0, packed.dtype)
                        em.store(packed, [p, k, j + lanes + lane], zero)

        if not pairs:
            with em.loop(depth, "k") as k:
                row(k, lambda j: element(k, j))
            return
        if view.k > 1:  # no loop whose indices are known to lie outside of the operand
            with em.loop(em.index(depth // 2), "k") as k:
                row(k, lambda j: pair(element(2 * k, j), element(2 * k + 1, j)))
        blocks = ceil(view.k / kc)
        end = view.k - (blocks - 1) * kc  # elements of the last block
        if view.k % 2:  # the last element is alone
            with em.when(kb == blocks - 1 if blocks > 1 else True):
                row(end // 2, lambda j: tirx.Cast("int32", element(end - 1, j)))
        if (filled := ceil(end / 2)) < (whole := ceil(end / step) * step // 2):
            with (
                em.when(kb == blocks - 1 if blocks > 1 else True),
                em.loop(whole - filled, "k") as k,
            ):
                row(filled + k, lambda j: tirx.const(0, "int32"))

    with em.loop(panels, "p") as p:
        if rest == 0:
            fill(p, columns)
        else:
            em.branch(first_panel + p < last, lambda: fill(p, columns), lambda: fill(p, rest))
