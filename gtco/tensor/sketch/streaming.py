"""What the memory-bound sketches share: tasks over rows, indices of a flat position, probing of
access patterns, the price.

A row is a run of trailing output axes that one inner loop covers; a task is a few rows. Probing
reads a stage's index maps with no code emitted, to learn how far neighbouring lanes lie apart in
every input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import detect_linear_equation

from gtco.target import Target
from gtco.tensor import cost, scalar
from gtco.tensor.emit import Emitter, Expr, KernelArguments
from gtco.tensor.expression import Epilogue, Reader, broadcast_index
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.space import Layer, Stream, Workload
from gtco.tensor.stage import Operator, Stage

GATHER = 3.0  # vector instructions' time of one lane that is loaded or stored alone
TASK_ELEMENTS = 16384  # the least work worth handing out: a few microseconds


def is_static(stage: Stage) -> bool:
    return all(t.static for t in stage.types.values())


def vectorizable(stage: Stage) -> bool:
    """May all element-wise operators of the stage stand in vectors?"""
    return all(
        scalar.vectorizable(op, [stage.types[x].dtype for x in op.inputs])
        for op in stage.operators
        if pattern(op.kind) == ELEMENTWISE
    )


def shape_of(stage: Stage, tensor: str) -> tuple[int, ...]:
    return tuple(int(d) for d in stage.types[tensor].shape)


def rows_per_task(rows: int, row_elements: int, cores: int) -> tuple[int, ...]:
    """Options for the rows of a task: enough work to pay for its handing out, enough tasks to
    balance the cores.
    """
    if rows * row_elements <= TASK_ELEMENTS // 4:
        return (rows,)
    least = min(rows, max(1, TASK_ELEMENTS // max(row_elements, 1)))
    wanted = (least, 4 * least, ceil(rows / (4 * cores)), ceil(rows / cores))
    options = {min(max(w, 1), rows) for w in wanted if w >= least or w == wanted[0]}
    # no more rows than what leaves every core a task
    most = max(1, ceil(rows / cores))
    return tuple(sorted({min(o, most) for o in options}))


def unflatten(em: Emitter, flat: Expr, shape: Sequence[int], name: str = "i") -> list[Expr]:
    """The index into ``shape`` of a flat position, each part bound once with its range."""
    index: list[Expr] = []
    for k in range(len(shape) - 1, -1, -1):
        if shape[k] == 1:
            index.append(0)
            continue
        if prod(shape[:k]) == 1:
            index.append(em.let_index(flat, name))
            flat = 0
            continue
        index.append(
            em.let_index(
                tirx.floormod(flat, shape[k]) if not isinstance(flat, int) else flat % shape[k],
                name,
            )
        )
        flat = em.let_index(
            tirx.floordiv(flat, shape[k]) if not isinstance(flat, int) else flat // shape[k], name
        )
    return index[::-1]


def split_flat(flat: Expr, shape: Sequence[int]) -> list[Expr]:
    """Like :func:`unflatten` as one expression a part, bound to nothing: lanes may vary in it."""
    index: list[Expr] = []
    for k in range(len(shape) - 1, -1, -1):
        if shape[k] == 1:
            index.append(0)
        elif prod(shape[:k]) == 1:
            index.append(flat)
        elif isinstance(flat, int):
            flat, part = divmod(flat, shape[k])
            index.append(part)
        else:
            index.append(tirx.floormod(flat, shape[k]))
            flat = tirx.floordiv(flat, shape[k])
    return index[::-1]


def divisor_below(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``; ``n`` itself where that would be under a quarter
    of ``most``.
    """
    best = max(d for d in range(1, most + 1) if n % d == 0)
    return best if best * 4 >= most else n


def vector_runs(length: int, lanes: int) -> list[tuple[int, int, int]]:
    """(begin, count, lanes) of the vectors that cover ``length`` positions: whole ones, then the
    rest as one.
    """
    whole, rest = divmod(length, lanes)
    runs = [(0, whole, lanes)] if whole else []
    return [*runs, (whole * lanes, 1, rest)] if rest else runs


@contextmanager
def tasks_of_rows(em: Emitter, args: KernelArguments, rows: int, per_task: int) -> Iterator[Expr]:
    """The loops over a kernel's tasks and the rows of each; yields the row."""
    tasks = ceil(rows / per_task)
    # bounds that TVM's own analysis sees too: without, its constants may outgrow 32 bits
    begin, end = (em.let(tirx.max(tirx.min(x, tasks), 0), "t") for x in (args.begin, args.end))
    with em.range(begin, end, "task") as task:
        bind_range(em, task, 0, tasks)
        if per_task == 1:
            yield task
            return
        first = em.let_index(task * per_task, "first")
        count = (
            per_task
            if rows % per_task == 0
            else em.let_index(tirx.min(per_task, rows - first), "count")
        )
        with em.loop(count, "row") as local:
            bind_range(em, local, 0, per_task)
            row = em.let(first + local, "row")
            bind_range(em, row, 0, rows)
            yield row


def chunks_of(extent: int, size: int) -> int:
    """Chunks of ``size`` positions of ``extent``; the last one takes what is left over."""
    return max(1, extent // size)


def chunk_span(em: Emitter, chunk: Expr, extent: int, size: int) -> tuple[Expr, Expr]:
    """Begin and length of a chunk of :func:`chunks_of`."""
    chunks = chunks_of(extent, size)
    if chunks == 1:
        return 0, extent
    begin = em.let_index(chunk * size, "begin")
    rest = extent - (chunks - 1) * size
    return begin, em.let_index(tirx.Select(chunk < chunks - 1, size, rest), "length")


def blocks_of(span: tuple[Expr, Expr], lanes: int) -> Expr:
    """Blocks of ``lanes`` positions that cover a span."""
    return (span[1] + (lanes - 1)) // lanes


def whole_block(
    em: Emitter, block: Expr, span: tuple[Expr, Expr], lanes: int, extent: int
) -> Expr:
    """Where a block of a span begins: early enough to be whole."""
    begin, length = span
    start = em.let(begin + tirx.min(block * lanes, length - lanes), "start")
    bind_range(em, start, 0, extent - lanes + 1)
    return start


def bind_range(em: Emitter, var: Any, low: int, extent: int) -> None:
    if isinstance(var, tirx.Var):
        em.analyzer.bind(var, tvm.ir.Range(low, low + extent))


@dataclass
class Probe(Reader):
    """Follows the index maps only: records each load's flat position and each condition that a
    range does not decide.
    """

    loads: list[tuple[str, Expr]] = field(default_factory=list)
    conditions: list[Expr] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # where the parts of concats begin that are read
    # what was followed already; holds the expressions, so that none gets another's id
    _seen: dict[tuple[object, ...], list[Expr]] = field(default_factory=dict)

    def value(self, tensor: str, index: Sequence[Expr]) -> Expr:
        self._follow(tensor, [self.emitter.index(i) for i in index])
        return 0

    def _follow(self, tensor: str, index: list[Expr]) -> None:
        """Through ``tensor`` at an index in simplest form. A tensor that several operators read at
        one symbolic index is followed once."""
        if not all(isinstance(i, int) for i in index):
            key = (tensor, *(i if isinstance(i, int) else id(i) for i in index))
            if key in self._seen:
                return
            self._seen[key] = index
        op = self.stage.producers.get(tensor)
        if tensor in self.known:
            self.known[tensor](index)
        elif op is None:
            self.load(tensor, index)
        elif pattern(op.kind) == ELEMENTWISE:
            for x in op.inputs:
                self._follow(x, broadcast_index(index, self.shape(x)))
        else:
            self.moved(op, index)

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        flat: Expr = 0
        for extent, i in zip(self.shape(tensor), index, strict=True):
            flat = flat * extent + i
        self.loads.append((tensor, self.emitter.index(flat)))
        return 0

    def concatenated(self, op: Operator, index: list[Expr]) -> Expr:
        axis, start = op["axis"], 0
        for x in op.inputs:
            stop = start + self.shape(x)[axis]
            if not (
                self.known_bool(index[axis] < start) is True
                or self.known_bool(index[axis] >= stop) is True
            ):
                if self.known_bool(index[axis] >= start) is not True:
                    self.conditions.append(index[axis] >= start)
                if self.known_bool(index[axis] < stop) is not True:
                    self.conditions.append(index[axis] < stop)
                self.parts.append(start)
                self.value(x, [*index[:axis], index[axis] - start, *index[axis + 1 :]])
            start = stop
        return 0

    def padded(self, op: Operator, index: list[Expr], shape: tuple[int, ...]) -> Expr:
        inner = [i - b for i, b in zip(index, op["before"], strict=True)]
        for i, n in zip(inner, shape, strict=True):
            for condition in (i >= 0, i < n):
                known = self.known_bool(condition)
                if known is False:
                    self.loads.append(("", 0))  # the padding's constant
                    return 0
                if known is None:
                    self.conditions.append(condition)
        return self.value(op.inputs[0], inner)

    def gathered(self, op: Operator, index: list[Expr], shape: tuple[int, ...]) -> Expr:
        axis, rank = op["axis"], len(self.shape(op.inputs[1]))
        self.value(op.inputs[1], index[axis : axis + rank])
        self.value(op.inputs[0], [*index[:axis], 0, *index[axis + rank :]])
        return 0

    def known_bool(self, condition: Expr) -> bool | None:
        return self.emitter.known(condition)


def probe_epilogue(probe: Probe, tail: Epilogue, index: Sequence[Expr]) -> None:
    """What the epilogue loads for the anchor's element at ``index``, and where its result goes,
    recorded like a load.
    """
    where = tail.positions([probe.emitter.index(i) for i in index])
    for op in tail.operators:
        for x in op.inputs:
            if x not in where:
                probe.value(x, broadcast_index(where[op.output], probe.shape(x)))
    output = tail.stage.output.output
    probe.load(output, where[output])


def strides(probe: Probe, var: Any) -> list[int | None]:
    """For each load, how far the next value of ``var`` lies in memory; None where that differs from
    place to place.
    """
    found: list[int | None] = []
    for _, flat in probe.loads:
        parts = (0, 0) if isinstance(flat, int) else detect_linear_equation(flat, [var])
        found.append(int(parts[0]) if len(parts) == 2 else None)
    return found


def depends_on(expr: Expr, var: Any) -> bool:
    """Does the variable occur in the expression?"""
    return isinstance(expr, tvm.ir.Expr) and any(
        v.same_as(var) for v in tirx.analysis.undefined_vars(expr)
    )


def stage_vectors(stage: Stage, lanes: int) -> float:
    """Vector instructions that the stage's element-wise operators take, with the store and the
    loads of what comes to a value; the first one's load is the caller's.
    """
    total = 0.0
    for op in stage.operators:
        each = cost.vectors(stage, (op,), lanes) if pattern(op.kind) == ELEMENTWISE else 0.5
        total += each * op.type.size / lanes
    return total + stage.output.type.size / lanes


def streaming_workload(
    stage: Stage, target: Target, tasks: int, passes: float, slow: float = 1.0
) -> Workload:
    """The price of reading every input once and writing the output: ``passes`` extra vector
    instructions an output or input
    vector, ``slow`` a factor for strided access."""
    lanes = target.lanes
    read = [float(i.type.nbytes) for i in stage.inputs]
    written = float(stage.output.type.nbytes)
    size = max([stage.output.type.size, *(i.type.size for i in stage.inputs)], default=1)
    per_task = max(1.0, size / lanes / tasks)
    loads = tuple(Stream(slow * n / tasks / per_task, sum(read) + written) for n in read)
    inner = Layer(per_task, loads, (Stream(written / tasks / per_task, sum(read) + written),))
    units = slow * (stage_vectors(stage, lanes) + passes * size / lanes) / tasks / per_task
    flops = float(sum(op.type.size for op in stage.operators))
    return Workload("vector", units, (inner, Layer(1, (), (), tasks)), flops)
