"""Level 0: the kernels that are timed once per machine. Their operands are in L1, except for those
that read memory.

A micro-kernel is timed alone. Work of other kinds (:data:`gtco.search.calibration.rates.WORK`) is
timed in small stages that the sketches build. So a unit of work is the one that :class:`Workload`
counts, with the loops around it, and its cost is that of LLVM's code on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx

from gtco.machine.target import Target
from gtco.search.calibration.rates import WORK
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.emit.llvm_source import with_source
from gtco.tensor.emit.runs import copy_run
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.intrinsics.product import multiply, prepared
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.packing import packed_types
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Program, Sketch, build, configs
from gtco.tensor.stage import INT4, Operator, Stage, TensorType, make_attrs, make_stage
from gtco.tensor.workload import Workload

DEPTH = 128  # steps of k: the operands of every tile fit any L1
REPEATS = 1000  # passes over the operands in a call, which must take far longer than its overhead
ELEMENTS = 1024  # in each tensor of a small stage: 4 KB
STAGE_REPEATS = 1000  # runs of a small stage in one call
ROWS = 8  # packed rows, of DEPTH elements each
CHANGED = "gtco_changed"  # LLVM has to assume that it changes all memory behind a pointer
CHANGED_SOURCE = f"""\
define internal i32 @{CHANGED}(ptr %p) alwaysinline {{
  call void asm sideeffect "", "r,~{{memory}}"(ptr %p)
  ret i32 0
}}
"""


# micro-kernels ------------------------------------------------------------------------------------
def symbol(tile: MicroKernel) -> str:
    return "tile_" + tile.kernel.replace(":", "_")


def operand_types(tile: MicroKernel) -> tuple[TensorType, ...]:
    """The types of A, B and C as the micro-kernel reads and writes them, for DEPTH steps of k."""
    kind = tile.kind
    return (
        TensorType((tile.rows, DEPTH), kind.a.dtype),
        TensorType(
            (DEPTH // kind.b.step, kind.b.places(tile.columns * kind.b.step)),
            "int8" if kind.b.dtype == INT4 else kind.b.dtype,
        ),
        TensorType((tile.rows, tile.columns), kind.accumulator),
    )


def tile_kernel(tile: MicroKernel) -> Any:
    """A kernel that runs a micro-kernel REPEATS times over DEPTH steps of k."""

    def body(em: Emitter, args: KernelArguments) -> None:
        a, b = (Operand.of(args.inputs[name], [0, 0]) for name in "ab")
        with prepared(em, tile, tile.rows):
            multiply(em, tile, DEPTH, a, b, args.output, passes=REPEATS)

    a, b, c = operand_types(tile)
    return kernel(symbol(tile), {"a": a, "b": b}, c, 0, tile.lanes, body)


# memory, and the peak -----------------------------------------------------------------------------
def read_kernel(name: str, nbytes: int, target: Target) -> Any:
    chains, lanes = 8, target.lanes
    size = nbytes // 4

    def body(em: Emitter, args: KernelArguments) -> None:
        acc = em.registers(chains * lanes)
        for c in range(chains):
            em.store_vector(acc, [c * lanes], em.splat(0.0))
        with em.range(args.begin, args.end, "repeat"), em.loop(size // (chains * lanes), "i") as i:
            for c in range(chains):
                value = em.load_vector(args.inputs["x"], [(i * chains + c) * lanes])
                em.store_vector(acc, [c * lanes], em.load_vector(acc, [c * lanes]) + value)
        for c in range(chains):
            em.store_vector(args.output, [c * lanes], em.load_vector(acc, [c * lanes]))

    return kernel(
        f"read_{name}", {"x": TensorType((size,))}, TensorType((chains * lanes,)), 0, lanes, body
    )


def copy_kernel(name: str, nbytes: int, tasks: int, target: Target) -> Any:
    """A kernel that copies ``nbytes`` in ``tasks`` equal parts. It adds to the values so that LLVM
    does not call memcpy.
    """
    lanes = target.lanes
    part = nbytes // 4 // tasks

    def body(em: Emitter, args: KernelArguments) -> None:
        with em.range(args.begin, args.end, "task") as task, em.loop(part // lanes, "i") as i:
            at = [task * part + i * lanes]
            value = em.load_vector(args.inputs["x"], at)
            em.store_vector(args.output, at, value + em.splat(1.0))

    shape = TensorType((part * tasks,))
    return kernel(f"copy_{name}", {"x": shape}, shape, 0, lanes, body)


def peak_kernel(chains: int, steps: int, lanes: int) -> Any:
    """A kernel that does ``steps`` multiply-adds on each of ``chains`` vectors in registers."""

    def body(em: Emitter, args: KernelArguments) -> None:
        acc = em.registers(chains * lanes)
        factor = em.let(em.splat(em.load(args.inputs["x"], [0]) + 0.999))
        for c in range(chains):
            em.store_vector(acc, [c * lanes], em.load_vector(args.inputs["x"], [c * lanes]))
        with em.loop(steps, "step"):
            for c in range(chains):
                em.store_vector(
                    acc, [c * lanes], em.load_vector(acc, [c * lanes]) * factor + factor
                )
        for c in range(chains):
            em.store_vector(args.output, [c * lanes], em.load_vector(acc, [c * lanes]))

    return kernel(
        "peak", {"x": TensorType((chains * lanes,))}, TensorType((chains * lanes,)), 0, lanes, body
    )


# work of other kinds ------------------------------------------------------------------------------
@dataclass(frozen=True)
class TimedKernel:
    """A kernel that gives the rate of one kind of work.

    - ``units``: the work that it does, by the names of the table: of its own kind, and of kinds
      whose rates are already known;
    - ``types``: those of its operands, the output last;
    - ``workspace``: in bytes.
    """

    work: str
    function: Any
    units: Mapping[str, float]
    types: tuple[TensorType, ...]
    workspace: int = 0


def probes(target: Target, tile: MicroKernel) -> Iterator[TimedKernel]:
    """A kernel for each row of WORK, in its order. ``tile`` is a micro-kernel that is timed too."""
    shape = TensorType((ELEMENTS,))
    x, z = {"x": shape, "z": shape}, {"x": shape}
    residual = [  # like a stage between two products: few instructions per element
        Operator("add", ("x", "z"), "t", shape),
        Operator("relu", ("t",), "u", shape),
        Operator("multiply", ("u", "g"), "y", shape),
    ]
    yield _of_stage("vector", make_stage(residual, {**x, "g": shape}, []), "elementwise", target)
    exp = make_stage([Operator("exp", ("x",), "y", shape)], z, [])
    yield _of_stage("exp", exp, "elementwise", target)
    rows, row = TensorType((4, ELEMENTS // 4)), TensorType((ELEMENTS // 4,))
    norm = Operator("layer_norm", ("x", "g", "b"), "y", rows, make_attrs(epsilon=1e-5))
    normalised = make_stage([norm], {"x": rows, "g": row, "b": row}, [])
    yield _of_stage("reduce", normalised, "rows", target)
    side = 2 * target.lanes
    square = TensorType((side, side))
    permute = Operator("permute", ("x",), "y", square, make_attrs(axes=(1, 0)))
    turned = make_stage([permute], {"x": square}, [])
    yield _of_stage("shuffle", turned, "elementwise", target)
    yield _packing(target)
    a, b = TensorType((tile.rows, 2)), TensorType((2, 4 * tile.columns))
    c = TensorType((tile.rows, 4 * tile.columns))
    matmul = make_stage([Operator("matmul", ("a", "b"), "y", c)], {"a": a, "b": b}, ["b"])
    yield _of_stage("store", matmul, "gemm", target, {"tile": tile.name, "a": "direct"})


def _of_stage(
    work: str, stage: Stage, sketch: str, target: Target, wanted: Mapping[str, object] | None = None
) -> TimedKernel:
    """The probe of a small stage, built by that sketch as one task."""
    found = next(s for s in space_of(stage, target).sketches if s.name == sketch)
    config = _alone(found, wanted or {})
    program = build(found, config, f"probe_{work}")
    assert isinstance(program, Program) and program.tasks == 1, program
    types = packed_types(stage, program.packings).values()
    units = units_of(found.workload(config))
    function = repeated(program.function, STAGE_REPEATS)
    return TimedKernel(work, function, units, (*types, stage.output.type), program.workspace)


def _alone(sketch: Sketch, wanted: Mapping[str, object]) -> Config:
    """The first config with these choices that has only one task."""
    for config in configs(sketch):
        chosen = config.by_name
        if all(chosen[name] == option for name, option in wanted.items()):
            if prod(layer.parallel for layer in sketch.workload(config).layers) == 1:
                return config
    raise AssertionError(f"no config of '{sketch.name}' with {wanted} in one task")


def units_of(work: Workload) -> dict[str, float]:
    """The level-0 work of a whole workload, by kind."""
    runs = prod(layer.iterations * layer.parallel for layer in work.layers)
    found = {work.kernel: work.work * runs}
    inside = [(x.kernel, x.amount * x.units * runs) for x in work.beside]
    outside = [(x.kernel, x.amount * x.units) for x in (*work.extra, *work.fixed)]
    for name, units in (*inside, *outside):
        found[name] = found.get(name, 0.0) + units
    return {name: units for name, units in found.items() if units}


def _packing(target: Target) -> TimedKernel:
    """A kernel that copies rows as the packing of A does: from longer rows, side by side."""
    source, packed = TensorType((ROWS, 2 * DEPTH)), TensorType((ROWS, DEPTH))

    def body(em: Emitter, args: KernelArguments) -> None:
        x, y = args.inputs["x"], args.output
        with em.loop(ROWS, "r") as r:
            copy_run(
                em,
                DEPTH,
                lambda k: em.load(x, [r, k]),
                lambda k, value: em.store(y, [r, k], value),
            )

    function = kernel("probe_pack", {"x": source}, packed, 0, target.lanes, body)
    units = {"pack": 2.0 * ROWS * DEPTH / target.lanes}  # a load and a store
    return TimedKernel("pack", repeated(function, STAGE_REPEATS), units, (source, packed))


def repeated(function: Any, times: int) -> Any:
    """The kernel with its body run ``times`` times in one call. Each run treats its buffers as new;
    otherwise LLVM would compute only once what is the same in every run.
    """
    *buffers, _, _ = function.params
    changed = [tirx.Evaluate(tirx.call_extern("int32", CHANGED, b)) for b in buffers]
    loop = tirx.For(
        tirx.Var("again", "int32"),
        0,
        times,
        tirx.ForKind.SERIAL,
        tirx.SeqStmt([*changed, function.body]),
    )
    return with_source(function, CHANGED_SOURCE, loop)


assert WORK == ("vector", "exp", "reduce", "shuffle", "pack", "store")  # what probes() yields
