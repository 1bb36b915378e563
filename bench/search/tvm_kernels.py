"""Makes programs of TVM's MetaSchedule for a stage into steps of a gtco library, so that they are
timed as gtco's kernels are: by the same threads and runtime, with weights as cold.

A scheduled function is a sequence of loop nests. Each becomes a kernel. Its tasks are the
iterations of its outermost loop, if that loop is parallel. Results that one nest leaves for another
are in the arena. If MetaSchedule chose the layout of a constant, it is laid out beforehand, as gtco
packs its own.

``python -m bench.search.tvm_kernels FD`` is a worker that builds them
(:mod:`gtco.codegen.workers`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from gtco.codegen.jobs import Failure, Kernel
from gtco.machine.target import Target
from gtco.runtime.artifact import Artifact
from gtco.runtime.plan import BufferRef, Step, TensorSpec, round_up
from gtco.support.errors import InternalError, UnsupportedError, describe
from gtco.tensor.stage import ITEM_BYTES, Stage, TensorType
from gtco.tuning.timing import values

PREPROC = "meta_schedule.layout_rewrite_preproc"  # TVM's mark on the copy into a chosen layout
Layout = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class TvmJob:
    """A scheduled module to build, as JSON, and a name with which its symbols begin."""

    symbol: str
    module: str
    target: Target


@dataclass(frozen=True)
class Nest:
    """A kernel of a program. Its tensors are the stage's inputs, its output and the program's
    intermediate ones, in this order.
    """

    symbol: str
    tasks: int
    workspace: int


@dataclass(frozen=True, kw_only=True)
class TvmKernels(Kernel):
    """The result of a job: the nests in order, in one object, and the bytes of each intermediate
    tensor.
    """

    nests: tuple[Nest, ...]
    intermediates: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A program that computes a stage: gtco's kernel, or TVM's."""

    code: bytes
    nests: tuple[Nest, ...]
    intermediates: tuple[int, ...] = ()
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # of inputs, by number
    numbers: np.ndarray | None = None  # that the kernel reads from its last buffer

    @staticmethod
    def of(kernel: Kernel, stage: Stage) -> Program:
        """The program of one of gtco's kernels."""
        layouts = {
            n: kernel.packings[i.name].apply
            for n, i in enumerate(stage.inputs)
            if i.name in kernel.packings
        }
        nest = Nest(kernel.symbol, kernel.tasks, kernel.workspace)
        numbers = np.array(kernel.numbers, kernel.numbers_dtype) if kernel.numbers_dtype else None
        return Program(kernel.code, (nest,), layouts=layouts, numbers=numbers)

    @staticmethod
    def of_tvm(kernels: TvmKernels, module: Any) -> Program:
        return Program(kernels.code, kernels.nests, kernels.intermediates, layouts(module))


# building -----------------------------------------------------------------------------------------
def build(job: TvmJob) -> TvmKernels:
    """The module's nests as kernels of gtco's ABI, compiled with gtco's options."""
    import tvm
    from tvm import s_tir, tirx

    from gtco.codegen.llvm import llvm_target, object_code
    from gtco.tensor.relax.bridge import LOWERING, PlainFunction, declared, in_order, pointer

    from .tvm_stage import vectorizable

    lowering = [
        tirx.transform.BindTarget(llvm_target(job.target)),
        s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True),
        *(make() for make in LOWERING),
    ]
    vectors = [
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
    ]
    module = tvm.ir.transform.Sequential(lowering)(tvm.ir.load_json(job.module))
    module["main"] = vectorizable(module["main"], job.target.lanes)
    module = tvm.ir.transform.Sequential(vectors)(module)
    function = module["main"]
    before: list[Any] = []
    made: list[Any] = []  # intermediate tensors
    loops: list[Any] = []
    for statement in in_order([_unmarked(function.body)]):
        statement = _unmarked(statement)
        if isinstance(statement, tirx.AllocBuffer):
            made.append(statement.buffer)
        elif isinstance(statement, tirx.Bind | tirx.DeclBuffer):
            before.append(statement)
        else:
            loops.append(statement)
    functions, nests = [], []
    for number, loop in enumerate(loops):
        plain = PlainFunction(f"{job.symbol}_{number}")
        taken = [pointer(f"p{n}", str(p.dtype)) for n, p in enumerate([*function.params, *made])]
        bound: list[Any] = []
        for parameter, data in zip([*function.params, *made], taken, strict=True):
            bound += declared(parameter, data)
        statements, tasks = plain.cut([*bound, *before, plain.placed(loop)])
        functions.append(plain.function(taken, statements))
        nests.append(Nest(plain.symbol, tasks, plain.size))
    sizes = tuple(prod(int(d) for d in b.shape) * ITEM_BYTES[str(b.dtype)] for b in made)
    return TvmKernels(
        symbol=job.symbol,
        code=object_code(functions, job.target),
        tasks=1,
        workspace=0,
        packings={},
        nests=tuple(nests),
        intermediates=sizes,
    )


def _unmarked(statement: Any) -> Any:
    """The statement without attributes: they are for passes of TVM that have already run."""
    from tvm import tirx

    return _unmarked(statement.body) if isinstance(statement, tirx.AttrStmt) else statement


def serve(connection: Connection) -> None:
    """Answers jobs until the socket closes."""
    while True:
        try:
            job: TvmJob = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            made: TvmKernels | Failure = build(job)
        except Exception as error:
            made = Failure(job.symbol, describe(error))
        try:
            connection.send(made)
        except ConnectionError:
            return


# layouts of constants -----------------------------------------------------------------------------
def layouts(module: Any) -> dict[int, Layout]:
    """The layouts that a scheduled module wants its parameters in, by their number."""
    import tvm_ffi
    from tvm import s_tir

    function = module["main"]
    found: dict[int, Layout] = {}

    def visit(block: Any) -> None:
        if PREPROC not in block.annotations:
            return
        store = block.body
        variables = [axis.var for axis in block.iter_vars]
        source = [n for n, p in enumerate(function.params) if p.same_as(store.value.source)]
        if len(source) != 1:
            raise UnsupportedError("a layout that TVM chose for something other than a parameter")
        read = [variables.index(i) for i in store.value.indices]
        if read != list(range(len(variables))):
            raise UnsupportedError("a layout that TVM reads its parameter for out of order")
        found[source[0]] = _layout(variables, store.indices, [int(d) for d in store.buffer.shape])

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, visit))
    return found


def _layout(variables: Sequence[Any], indices: Sequence[Any], shape: Sequence[int]) -> Layout:
    """``laid[indices(i)] = array[i]``."""

    def lay(array: np.ndarray) -> np.ndarray:
        grid = np.indices(array.shape, sparse=True)
        where = dict(zip(variables, grid, strict=True))
        laid = np.zeros(shape, array.dtype)
        laid[tuple(np.broadcast_to(evaluated(i, where), array.shape) for i in indices)] = array
        return laid

    return lay


def evaluated(expression: Any, where: Mapping[Any, np.ndarray]) -> np.ndarray:
    """An index expression for all values of its variables at once."""
    from tvm import tirx

    match expression:
        case tirx.IntImm():
            return np.asarray(int(expression.value))
        case tirx.Var():
            return where[expression]
        case tirx.Cast():
            return evaluated(expression.value, where)
    a, b = (evaluated(x, where) for x in (expression.a, expression.b))
    match expression:
        case tirx.Add():
            return a + b
        case tirx.Sub():
            return a - b
        case tirx.Mul():
            return a * b
        case tirx.FloorDiv():
            return a // b
        case tirx.FloorMod():
            return a % b
    raise UnsupportedError(f"a layout that TVM chose with {type(expression).__name__}")


# timing -------------------------------------------------------------------------------------------
def artifact(
    stage: Stage, programs: Sequence[Program], target: Target, threads: int
) -> tuple[Artifact, list[range]]:
    """A library that runs the first of the stage's programs, then all of them, and the first again,
    as :mod:`gtco.tuning.trial` does; and the steps of each of these runs. The result of a run is
    the output with its number; :mod:`gtco.tuning.timing` compares them.
    """
    random = np.random.default_rng(0)
    arrays = [values(random, i.type) if i.constant else None for i in stage.inputs]
    inputs: dict[TensorType, int] = {}
    weights: list[tuple[int, np.ndarray]] = []
    steps: list[Step] = []
    runs: list[range] = []
    end = 0
    for program in (programs[0], *programs, programs[0]):
        refs = []
        for n, (i, array) in enumerate(zip(stage.inputs, arrays, strict=True)):
            if array is None:
                refs.append(BufferRef("input", inputs.setdefault(i.type, len(inputs))))
                continue
            laid = program.layouts[n](array) if n in program.layouts else array
            refs.append(BufferRef("weight", end))
            weights.append((end, laid))
            end = round_up(end + laid.nbytes)
        refs.append(BufferRef("output", len(runs)))
        runs.append(range(len(steps), len(steps) + len(program.nests)))
        place = 0
        for nbytes in program.intermediates:
            refs.append(BufferRef("arena", place))
            place += round_up(nbytes)
        if program.numbers is not None:
            refs.append(BufferRef("weight", end))
            weights.append((end, program.numbers))
            end = round_up(end + program.numbers.nbytes)
        steps += [Step(n.symbol, tuple(refs), n.tasks, n.workspace) for n in program.nests]
    objects: dict[str, bytes] = {}
    for program in programs:
        symbol = program.nests[0].symbol
        if objects.setdefault(symbol, program.code) != program.code:
            raise InternalError(f"two programs to be timed are called {symbol}")
    arena = max(sum(map(round_up, program.intermediates)) for program in programs)
    return Artifact(
        name="trials",
        inputs=tuple(TensorSpec(f"x{n}", t.dtype, t.sizes) for t, n in inputs.items()),
        outputs=tuple(
            TensorSpec(f"y{n}", stage.output.type.dtype, stage.output.type.sizes)
            for n in range(len(runs))
        ),
        steps=tuple(steps),
        arena_bytes=arena,
        kernels={f"{symbol}.o": code for symbol, code in objects.items()},
        weights=weights,
        cpu_features=target.features,
        threads=threads,
        metadata={
            "trials": [list(range(len(runs)))],
            "rounded": [False],
            "quantized": [False],
            "numbers": [],
        },
    ), runs


if __name__ == "__main__":
    from gtco.support.torchless import import_tvm

    import_tvm()
    from . import tvm_kernels  # what crosses processes is not of __main__

    tvm_kernels.serve(Connection(int(sys.argv[1])))
