"""The parts that the memory-bound sketches share: tasks over rows, indices of a flat position, the
price.

A row is a run of trailing output axes that one inner loop covers; a task is a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, prod
from types import MappingProxyType

from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor import cost
from gtco.tensor.analysis.chains import Epilogue, epilogue, prologue_readable
from gtco.tensor.analysis.indices import floordiv, floormod
from gtco.tensor.cost import Vectors
from gtco.tensor.emit import scalar
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.space import Decision, Option
from gtco.tensor.stage import Operator, Stage
from gtco.tensor.workload import Extra, Layer, Stream, Workload

GATHER = 3.0  # a lane that is loaded or stored alone takes the time of so many vector instructions
UNROLLED = 16  # vectors of a row that are unrolled: a head of 128 has 16 of AVX2's
# If the chain of instructions to a value has LONG_CHAIN or more, it fills the window in which a CPU
# looks ahead, so the CPU has too few chains to choose from. SIDE vectors are then computed at a
# time. Chains beyond LONGEST_CHAIN are calls of the C library: they gain nothing, and the code
# grows.
LONG_CHAIN, LONGEST_CHAIN, SIDE = 8.0, 100.0, 4
TASK_ELEMENTS = 16384  # the least work worth handing out: a few microseconds


def vectorizable(stage: Stage) -> bool:
    """True if all element-wise operators of the stage may run in vectors."""
    return all(
        scalar.vectorizable(op, [stage.types[x].dtype for x in op.inputs])
        for op in stage.operators
        if pattern(op.kind) == ELEMENTWISE
    )


def in_vectors(stage: Stage, anchor: Operator) -> Epilogue | None:
    """The epilogue of an anchor, if the epilogue and a readable prologue may run in vectors; else
    None.
    """
    if not prologue_readable(stage, anchor.inputs) or not vectorizable(stage):
        return None
    return epilogue(stage, anchor.output)


def rows_per_task(rows: int, row_elements: int, cores: int) -> tuple[int, ...]:
    """Options for the rows of a task: enough work to pay for starting the task, and enough tasks to
    balance the cores.
    """
    if rows * row_elements <= TASK_ELEMENTS // 4:
        return (rows,)
    least = min(rows, max(1, TASK_ELEMENTS // max(row_elements, 1)))
    wanted = (least, 4 * least, ceil(rows / (4 * cores)), ceil(rows / cores))
    options = {min(max(w, 1), rows) for w in wanted if w >= least or w == wanted[0]}
    # so few rows that every core has a task
    most = max(1, ceil(rows / cores))
    return tuple(sorted({min(o, most) for o in options}))


def grain(
    chosen: Mapping[str, Option], units: int, work: int, target: Target
) -> Decision | None:
    """The number of units in a task, each a piece of the output of ``work`` elements; None if it is
    a decision.
    """
    if "rows" in chosen:
        return None
    return Decision("rows", "grain", rows_per_task(units, work, target.cores))


def unflatten(em: Emitter, flat: Expr, shape: Sequence[int]) -> list[Expr]:
    """The index into ``shape`` of a flat position. Each part is bound once, with its range."""
    index: list[Expr] = []
    for k in range(len(shape) - 1, -1, -1):
        if shape[k] == 1:
            index.append(0)
            continue
        if prod(shape[:k]) == 1:
            index.append(em.let_index(flat, "i"))
            flat = 0
            continue
        index.append(em.let_index(floormod(flat, shape[k]), "i"))
        flat = em.let_index(floordiv(flat, shape[k]), "i")
    return index[::-1]


def divisor_below(n: int, most: int) -> int:
    """The largest divisor of ``n`` up to ``most``, or ``n`` itself if that divisor is under a
    quarter of ``most``.
    """
    best = next(d for d in range(most, 0, -1) if n % d == 0)
    return best if best * 4 >= most else n


def vector_runs(length: int, lanes: int) -> list[tuple[int, int, int]]:
    """(begin, count, lanes) of the vectors that cover ``length`` positions: whole ones, then the
    rest as one shorter vector.
    """
    whole, rest = divmod(length, lanes)
    runs = [(0, whole, lanes)] if whole else []
    return [*runs, (whole * lanes, 1, rest)] if rest else runs


def wide_runs(length: int, lanes: int, side: int) -> list[tuple[int, int, int]]:
    """Like :func:`vector_runs`, with vectors ``side`` times as wide first. LLVM splits each of
    their instructions into ``side`` neighbours, none of which waits for another.
    """
    wide = length // (side * lanes) * side * lanes
    runs = [(0, wide // (side * lanes), side * lanes)] if wide else []
    return [*runs, *((wide + b, n, v) for b, n, v in vector_runs(length - wide, lanes))]


def whole_runs(length: int, lanes: int) -> list[tuple[int, int, int]]:
    """Like :func:`vector_runs`, but the last vector is whole too if there is another: it begins so
    early that it ends with the positions, and takes some of them a second time.
    """
    runs = vector_runs(length, lanes)
    if len(runs) > 1:
        runs[1] = (length - lanes, 1, lanes)
    return runs


def each_vector(em: Emitter, length: int, body: Callable[[Expr, int], None]) -> None:
    """``body(start, lanes)`` for the vectors that cover ``length`` positions; the last one may be
    shorter. A few vectors are emitted one after the other, more of them in a loop: a shape sets no
    limit, and LLVM takes minutes for a block of thousands of vectors.
    """
    for begin, count, lanes in vector_runs(length, em.lanes):
        if count > UNROLLED:
            with em.loop(count, "j") as j:
                body(begin + j * lanes, lanes)
        else:
            for i in range(count):
                body(begin + i * lanes, lanes)


@contextmanager
def _tasks(
    em: Emitter, args: KernelArguments, rows: int, per_task: int
) -> Iterator[tuple[Expr, Expr]]:
    """The loop over a kernel's tasks. Yields the first row of each and their number."""
    tasks = ceil(rows / per_task)
    # bounds for TVM's own analysis: without them its constants may exceed 32 bits
    begin, end = (em.let(tirx.max(tirx.min(x, tasks), 0), "t") for x in (args.begin, args.end))
    with em.range(begin, end, "task") as task:
        em.bind(task, tasks)
        if per_task == 1:
            yield task, 1
            return
        first = em.let_index(task * per_task, "first")
        whole = rows % per_task == 0
        yield first, per_task if whole else em.let_index(tirx.min(per_task, rows - first), "count")


@contextmanager
def tasks_of_rows(em: Emitter, args: KernelArguments, rows: int, per_task: int) -> Iterator[Expr]:
    """The loops over a kernel's tasks and the rows of each. Yields the row."""
    with _tasks(em, args, rows, per_task) as (first, count):
        if per_task == 1:
            yield first
            return
        with em.loop(count, "row") as local:
            em.bind(local, per_task)
            row = em.let(first + local, "row")
            em.bind(row, rows)
            yield row


def tasks_of_panels(
    em: Emitter,
    args: KernelArguments,
    rows: int,
    per_task: int,
    side: int,
    groups: int,
    body: Callable[[Expr, Expr, int], None],
) -> None:
    """Like :func:`tasks_of_rows`, in panels of up to ``groups`` groups of ``side`` rows, and the
    remaining rows one by one. ``body(first, groups, side)`` is called once for either kind.
    """
    if side == 1:
        with tasks_of_rows(em, args, rows, per_task) as row:
            body(row, 1, 1)
        return
    with _tasks(em, args, rows, per_task) as (first, count):
        whole = floordiv(count, side)
        with em.loop(floordiv(whole + (groups - 1), groups), "panel") as panel:
            em.bind(panel, ceil(per_task // side / groups))
            left = whole - panel * groups
            uneven = not isinstance(whole, int) or whole % groups
            here = em.let_index(tirx.min(left, groups)) if uneven else groups
            body(em.let_index(first + panel * (groups * side), "first"), here, side)
        if isinstance(count, int) and count % side == 0:
            return
        with em.loop(count - whole * side, "row") as local:
            em.bind(local, count % side if isinstance(count, int) else side - 1)
            body(em.let_index(first + (whole * side + local), "row"), 1, 1)


def chunks_of(extent: int, size: int) -> int:
    """The number of chunks of ``size`` positions in ``extent``; the last one has the remaining
    positions.
    """
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
    """The number of blocks of ``lanes`` positions that cover a span."""
    return (span[1] + (lanes - 1)) // lanes


def whole_block(
    em: Emitter, block: Expr, span: tuple[Expr, Expr], lanes: int, extent: int
) -> Expr:
    """The begin of a block of a span, early enough that the block is whole."""
    begin, length = span
    start = em.let(begin + tirx.min(block * lanes, length - lanes), "start")
    em.bind(start, extent - lanes + 1)
    return start


def stage_vectors(stage: Stage, lanes: int) -> Vectors:
    """Vector instructions of the stage's element-wise operators, with the store and the loads of
    further inputs; the caller counts the first load. They are counted once a stage, because the
    price of every config needs them.
    """
    known: Vectors | None = stage.found.get((stage_vectors, lanes))
    if known is not None:
        return known
    total = Vectors(stage.output.type.size / lanes)
    for op in stage.operators:
        wise = pattern(op.kind) == ELEMENTWISE
        each = cost.vectors(stage, (op,), lanes) if wise else Vectors(0.5)
        total = total.plus(each, op.type.size / lanes)
    stage.found[stage_vectors, lanes] = total
    return total


def vectors_at_once(stage: Stage, lanes: int) -> int:
    """The number of vectors of the output that a loop should compute side by side."""
    each = stage_vectors(stage, lanes).total * lanes / max(stage.output.type.size, 1)
    return SIDE if LONG_CHAIN <= each <= LONGEST_CHAIN else 1


def streaming_workload(
    stage: Stage,
    target: Target,
    tasks: int,
    passes: float,
    slow: float = 1.0,
    others: Mapping[str, float] = MappingProxyType({}),
) -> Workload:
    """The price of reading every input once and writing the output, each core its share.

    - ``passes``: extra vector instructions for an output or input vector;
    - ``others``: more of them, by their kind;
    - ``slow``: a factor for strided access.
    """
    lanes = target.lanes
    read = [(float(i.type.nbytes), i.constant) for i in stage.inputs]
    written = float(stage.output.type.nbytes)
    size = max([stage.output.type.size, *(i.type.size for i in stage.inputs)], default=1)
    per_task = max(1.0, size / lanes / tasks)
    resident, cores = sum(n for n, _ in read) + written, min(target.cores, tasks)

    def stream(nbytes: float, constant: bool = False) -> Stream:
        """A stream of bytes. Constants have left the caches since the last run of the model."""
        share = nbytes / tasks / per_task
        if constant:
            return Stream(share, resident, "DRAM")
        return Stream(share, resident, cores=cores, handed=target.elsewhere)

    inner = Layer(per_task, tuple(stream(slow * n, c) for n, c in read), (stream(written),))
    each = slow / tasks / per_task
    own = stage_vectors(stage, lanes)
    beside = {"exp": own.exp}
    for kind, more in others.items():
        beside[kind] = beside.get(kind, 0.0) + more * size / lanes
    flops = float(sum(op.type.size for op in stage.operators))
    return Workload(
        "vector",
        each * (own.vector + passes * size / lanes),
        (inner, Layer(1, (), (), tasks)),
        flops,
        beside=tuple(Extra(kind, each, units) for kind, units in beside.items() if units),
    )
