"""Copies operands of a contraction into scratch: rows of A (with any prologue, im2col included),
and columns of B.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from tvm import tirx

from gtco.tensor.analysis.contraction import Contraction, ConvView
from gtco.tensor.analysis.placement import run_breaks
from gtco.tensor.emit.bfloat16 import literal, pair
from gtco.tensor.emit.emitter import Array, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.runs import copy_run, put
from gtco.tensor.sketch.shared.im2col import Im2col

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
    if isinstance(view, ConvView):
        Im2col(reader, view, packed, batch).pack(row0, rows, kb, kc)
    else:
        _pack_matrix(reader, view, packed, batch, row0, rows, kb, kc)
    if view.k % step:
        last = ceil(view.k / kc) - 1
        with em.when(kb == last if last else True), em.loop(rows, "r") as r:
            end = view.k - last * kc
            with em.vector(-end % step, "l") as k:
                em.store(packed, [r, end + k], literal(0.0, packed.dtype))


def _pack_matrix(
    reader: Reader,
    view: Contraction,
    packed: Array,
    batch: Expr,
    row0: Expr,
    rows: Expr,
    kb: Expr,
    kc: int,
) -> None:
    """The rows of a matrix."""
    em = reader.emitter
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
                lambda k, value: put(reader, view, packed, [r, k], value),
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
                        lambda k, value: put(reader, view, packed, [r, k], value),
                    )


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
