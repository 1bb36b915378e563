"""Sketch rule for writing rows into a tensor at given indices (ScatterND, ScatterElements).

::

    for task in blocks of the output's rows:      # parallel: a task owns its rows
      copy the data's rows
      for u in updates, in order:                 # every task reads all indices
        if the row index[u] is the task's:
          for vector of the row:
            output[index[u]] = combine(output[index[u]], updates[u])

If several updates go to one row, the last one wins. Sums are taken in the order of the updates,
with any number of threads. An update to a row outside the tensor is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import is_static
from gtco.tensor.emit.arithmetic import extreme
from gtco.tensor.emit.emitter import Array, Emitter, Expr, KernelArguments
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.streaming import (
    each_vector,
    grain,
    streaming_workload,
    tasks_of_rows,
)
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Workload

SUMS = ("float32", "float64", "int32", "int64")  # the dtypes in which rows are combined
BLOCK = 1024  # least elements of a block of rows


def match(stage: Stage, target: Target) -> Scatter | None:
    """The stage as one ``scatter``, else None."""
    op = stage.output
    if len(stage.operators) != 1 or op.kind != "scatter" or not is_static(stage):
        return None
    if 0 in (op.type.size, stage.types[op.inputs[1]].size):
        return None
    if op["reduction"] != "update" and op.type.dtype not in SUMS:
        return None
    return Scatter(stage, target)


@dataclass(frozen=True)
class Scatter:
    """Rows written by their owners on a CPU; see the module's text for the loops."""

    stage: Stage
    target: Target

    name = "scatter"
    structure = "SR"

    @property
    def op(self) -> Operator:
        return self.stage.output

    @property
    def rows(self) -> int:
        return int(self.op["rows"])

    @property
    def length(self) -> int:
        """The elements of a row."""
        return self.op.type.size // self.rows

    @property
    def updates(self) -> int:
        return self.stage.types[self.op.inputs[1]].size

    @cached_property
    def block(self) -> int:
        """The rows of a unit."""
        return min(self.rows, ceil(BLOCK / self.length))

    @property
    def units(self) -> int:
        return ceil(self.rows / self.block)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return grain(chosen, self.units, self.block * self.length, self.target)

    def workload(self, config: Config) -> Workload:
        tasks = ceil(self.units / config["rows"])
        looked = 2.0 * tasks * self.updates  # each task reads each index, one lane at a time
        passes = 1.0 + looked * self.target.lanes / self.op.type.size
        return streaming_workload(self.stage, self.target, tasks, passes)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        per_task = config["rows"]

        def body(em: Emitter, args: KernelArguments) -> None:
            with tasks_of_rows(em, args, ceil(self.units / per_task), 1) as task:
                first = em.let_index(task * (per_task * self.block), "first")
                stop = em.let_index(tirx.min(first + per_task * self.block, self.rows), "stop")
                self.copy(em, args, first, stop)
                self.write(em, args, first, stop)

        return program(symbol, self.stage, self.target, ceil(self.units / per_task), body)

    def flat(self, args: KernelArguments) -> tuple[Array, Array, Array, Array]:
        """Data, indices, updates and output, each as a vector."""
        names = [*self.op.inputs]
        arrays = [args.inputs[name] for name in names] + [args.output]
        data, index, updates, output = (
            Array(a.buffer, (max(self.stage.types[n].size, 1),), a.dtype)
            for a, n in zip(arrays, [*names, self.op.output], strict=True)
        )
        return data, index, updates, output

    def copy(self, em: Emitter, args: KernelArguments, first: Expr, stop: Expr) -> None:
        """Copies the task's rows, a block at a time."""
        data, _, _, output = self.flat(args)
        together = self.block * self.length
        with em.range(0, tirx.floordiv(stop - first, self.block), "block") as block:
            em.bind(block, self.units)
            begin = em.let_index((first + block * self.block) * self.length, "begin")
            self._copied(em, data, output, begin, together)
        rest = self.rows % self.block * self.length
        if rest:
            with em.when(stop >= self.rows):
                self._copied(em, data, output, self.rows * self.length - rest, rest)

    def _copied(self, em: Emitter, data: Array, output: Array, begin: Expr, count: int) -> None:
        def store(at: Expr, lanes: int) -> None:
            with em.vector(lanes) as lane:
                em.store(output, [begin + at + lane], em.load(data, [begin + at + lane]))

        each_vector(em, count, store)

    def write(self, em: Emitter, args: KernelArguments, first: Expr, stop: Expr) -> None:
        _, index, updates, output = self.flat(args)
        with em.loop(self.updates, "u") as u:
            wide = em.let(tirx.Cast("int64", em.load(index, [u])), "wide")
            begin, end = (tirx.Cast("int64", place) for place in (first, stop))
            with em.when(tirx.all(wide >= begin, wide < end)):
                row = em.let(tirx.Cast(em.index_dtype, wide), "row")
                em.bind(row, self.rows)

                def store(begin: Expr, lanes: int) -> None:
                    with em.vector(lanes) as lane:
                        value = em.load(updates, [u * self.length + begin + lane])
                        at = [row * self.length + begin + lane]
                        em.store(output, at, self.combined(em, em.load(output, at), value))

                each_vector(em, self.length, store)

    def combined(self, em: Emitter, old: Expr, new: Expr) -> Expr:
        dtype = self.op.type.dtype
        match self.op["reduction"]:
            case "update":
                return new
            case "add":
                return old + new
            case "mul":
                return old * new
            case "max":
                return extreme(em, old, new, dtype, tirx.max)
        return extreme(em, old, new, dtype, tirx.min)
