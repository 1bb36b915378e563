"""Products of few columns and any M and K: vectors lie along k, and the sums of a row are folded at
its end.

With one column to sixteen, a panel of one vector of columns has mostly zeros. If there are at most
:data:`gtco.tensor.nest.open.FEW_COLUMNS`, B is [n][k] instead, k up to a whole vector with zeros,
and a tile of rows x n vectors of sums goes along k::

    for task in chunks of rows:                     # parallel
      for block of the task, of two heights:
        for v in vectors of k: sums[height, n] += A[height, v] * B[n, v]
        C[height, n] = the sums of each vector
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.emit.fold import add
from gtco.tensor.nest.open import FIELDS, FewColumns
from gtco.tensor.nest.open_loops import LOAD, OpenLoops, any_size


def columns_kernel(nest: FewColumns, symbol: str) -> Any:
    """The kernel of a nest, with the arguments of
    :func:`gtco.tensor.nest.open_loops.open_kernel`.
    """
    return any_size(
        symbol,
        len(FIELDS),
        nest.lanes,
        lambda em, args: _Loops(nest.rows, em, args, nest.columns).emit(),
    )


class _Loops(OpenLoops):
    def __init__(self, rows: int, em: Emitter, args: KernelArguments, columns: int) -> None:
        super().__init__(rows, em, args)
        self.columns = columns

    def emit(self) -> None:
        em, of = self.em, self.of
        with em.range(self.args.begin, self.args.end, "task") as task:
            first = em.let(task * of["task_blocks"], "first")
            end = em.let(tirx.min(first + of["task_blocks"], of["blocks"]), "end")
            with em.range(first, end, "block") as block:
                start = em.let(self.first_row(block), "start")
                self.heights(block, lambda rows: self.product(rows, start))

    def product(self, rows: int, start: Expr) -> None:
        """C[rows, columns] of a block."""
        em, of, lanes = self.em, self.of, self.em.lanes
        row = em.let(start * of["k"], "a_row")
        whole = em.let(tirx.truncdiv(of["k"], tirx.const(lanes, "int64")), "whole")
        left = em.let(of["k"] - whole * lanes, "left")
        stride = em.let(self.up(of["k"], tirx.const(lanes, "int64")) * lanes, "stride")
        sums = em.registers(rows * self.columns * lanes)
        places = [
            (i, j, (i * self.columns + j) * lanes) for i in range(rows) for j in range(self.columns)
        ]
        for _, _, at in places:
            em.store_vector(sums, [at], em.splat(0.0))

        def step(v: Expr, part: bool) -> None:
            b = [
                em.let(self.b.buffer[tirx.Ramp(v * lanes + j * stride, 1, lanes)], "b")
                for j in range(self.columns)
            ]
            for i in range(rows):
                at = row + i * of["k"] + v * lanes
                a = self.a.buffer[tirx.Ramp(at, 1, lanes)]
                if part:
                    where = tirx.address_of(self.a.buffer[at])
                    count = tirx.Cast("int32", left)
                    a = tirx.call_extern(f"float32x{lanes}", LOAD, where, count)
                a = em.let(a, "a")
                for j in range(self.columns):
                    place = (i * self.columns + j) * lanes
                    em.store_vector(sums, [place], em.load_vector(sums, [place]) + a * b[j])

        with em.loop(whole, "v") as v:
            step(v, False)
        with em.when(left > 0):
            step(whole, True)
        for i, j, at in places:
            total = em.reduce_vector(em.load_vector(sums, [at]), add)
            T.buffer_store(self.out.buffer, total, [(start + i) * of["n"] + j])
