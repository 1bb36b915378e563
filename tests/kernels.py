"""Kernels as numpy functions, for the tests: build a sketch's program, link it, and call it on
memory that ends before an inaccessible page.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.machine.target import TARGETS, TILES, V4, Target, cpu_flags, cpu_target, detect
from gtco.runtime.plan import round_up
from gtco.tensor import space
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.packing import Packing
from gtco.tensor.reference import evaluate
from gtco.tensor.sketch.shared import streaming
from gtco.tensor.space import Config, Program, Sketch, configs
from gtco.tensor.stage import Stage, TensorType
from tests.fences import before_fence, fenced

TOLERANCE = 3e-5  # of the largest value: three operators after sums of some hundred products
SUMMED = 2e-6  # of the largest sum of a product of some hundred steps
ROUNDED = 2.0**-8  # of a number that is stored as bfloat16: half a unit of its last place

GUARD = 256  # bytes before an output or workspace
GUARD_BYTE = 0xA5


EMULATED = "emulated tiles"  # the name of :func:`emulating`, beside those of gtco's targets


def emulating() -> Target:
    """A server with a tile unit, whose instructions are functions that do the same. Its other
    instructions are this machine's, so its code runs on every machine with AVX-512.
    """
    here, server = detect(), TARGETS["graniterapids"]
    features = (*(f for f in here.features if f not in TILES), *TILES)
    return replace(server, mcpu=here.mcpu, features=features, emulated=TILES)


def machine_called(name: str) -> Target:
    """The target of that name, or :func:`emulating`."""
    return emulating() if name == EMULATED else cpu_target(name)


def runnable(name: str) -> Target:
    """The target; the test is skipped if this CPU cannot run its code."""
    chosen = machine_called(name)
    if chosen.lanes == 16 and not set(V4).issubset(detect().features):
        pytest.skip(f"{name} needs AVX-512, which this CPU lacks")
    if "avxvnni" in chosen.features and "avx_vnni" not in cpu_flags():
        pytest.skip(f"{name} needs AVX-VNNI, which this CPU lacks")
    return chosen


def targets() -> list[str]:
    """The targets of the numerical tests, with 8 and 16 lanes."""
    return ["x86-64-v3", "x86-64-v4"]


def guarded(nbytes: int, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A byte array after guard bytes, and the whole memory; ``offset`` moves the array off the
    64-byte boundary. After it come less than 64 guard bytes, and then an inaccessible page.
    """
    whole = before_fence(GUARD + round_up(offset + nbytes))
    whole[:] = GUARD_BYTE
    start = GUARD + offset
    return whole[start : start + nbytes], whole


def shifted(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins ``offset`` bytes after a multiple of 64. A kernel may read behind it as
    far as if it began there.
    """
    whole = before_fence(round_up(offset) + round_up(array.nbytes))
    part = whole[offset : offset + array.nbytes]
    part[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return part.view(array.dtype).reshape(array.shape)


def check_guard(part: np.ndarray, whole: np.ndarray, what: str) -> None:
    start = part.ctypes.data - whole.ctypes.data
    before, after = whole[:start], whole[start + part.size :]
    assert (before == GUARD_BYTE).all(), f"{what}: bytes before it were overwritten"
    assert (after == GUARD_BYTE).all(), f"{what}: bytes behind it were overwritten"


@dataclass(frozen=True)
class Built:
    """A linked kernel: callable on arrays in the order of the stage's inputs."""

    library: Any
    symbol: str
    inputs: tuple[tuple[str, TensorType], ...]
    output: TensorType
    tasks: int
    workspace: int
    packings: Mapping[str, Packing]

    def __call__(self, *arrays: np.ndarray, unaligned: bool = False) -> np.ndarray:
        """Runs all tasks, in two halves (in reverse order) if there are several, and checks the
        guards. A kernel that reads or writes beyond the line of 64 bytes in which a buffer ends
        faults. ``unaligned``: the output is off the boundary of 64 bytes, and then, in a second
        run that must give the same, the inputs are, as callers' memory may be.
        """
        result = self._run(arrays, 0, 4 if unaligned else 0)
        if unaligned:
            assert self._run(arrays, 16, 0).tobytes() == result.tobytes()
        return result

    def _run(self, arrays: Sequence[np.ndarray], shift: int, out_shift: int) -> np.ndarray:
        held = []
        for (name, type_), array in zip(self.inputs, arrays, strict=True):
            assert array.shape == tuple(type_.shape) and array.dtype == np.dtype(type_.dtype), (
                f"{name}: {array.dtype}{array.shape} given, {type_} expected"
            )
            if name in self.packings:
                array = self.packings[name].apply(array)
            held.append(shifted(array, shift) if shift else fenced(array))
        out, out_whole = guarded(self.output.nbytes, out_shift)
        work, work_whole = guarded(self.workspace)
        work[:] = 0xFF  # NaN, because scratch is not zeroed
        middle = self.tasks // 2
        ranges = [(middle, self.tasks), (0, middle)] if self.tasks > 1 else [(0, self.tasks)]
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*held, out, work)]
        before = [a.copy() for a in held]
        for begin, end in ranges:
            getattr(self.library, self.symbol)(
                *pointers, ctypes.c_int64(begin), ctypes.c_int64(end)
            )
        check_guard(out, out_whole, "output")
        check_guard(work, work_whole, "workspace")
        for array, copy in zip(held, before, strict=True):
            assert array.tobytes() == copy.tobytes(), "the kernel wrote to an input"
        return (
            out.view(np.dtype(self.output.dtype))
            .reshape([int(d) for d in self.output.shape])
            .copy()
        )


def build(sketch: Sketch, config: Config, machine: Target) -> Built:
    """The sketch's program for this config, linked and callable."""
    return build_all([(sketch, config)], machine)[0]


def build_each(
    sketch: Sketch, configs: Iterable[Config], machine: Target
) -> list[tuple[Config, Built]]:
    """Each config and its program, in one object."""
    chosen = list(configs)
    return list(zip(chosen, build_all([(sketch, c) for c in chosen], machine), strict=True))


def build_all(chosen: Iterable[tuple[Sketch, Config]], machine: Target) -> list[Built]:
    """The program of each sketch with its config. One object holds all of them: that takes less
    time to compile and link than an object for each.
    """
    return _linked(
        [(sketch, _program(sketch, config, n)) for n, (sketch, config) in enumerate(chosen)],
        machine,
    )


def _program(sketch: Sketch, config: Config, number: int) -> Program:
    program = space.build(sketch, config, f"kernel_{number}_under_test")
    assert isinstance(program, Program), f"rejected: {program}"
    return program


def _linked(programs: Sequence[tuple[Sketch, Program]], machine: Target) -> list[Built]:
    library = load([program.function for _, program in programs], machine)
    symbols = [str(program.function.attrs["global_symbol"]) for _, program in programs]
    pairs = zip(symbols, programs, strict=True)
    return [linked(library, symbol, sketch.stage, program) for symbol, (sketch, program) in pairs]


def linked(library: Any, symbol: str, stage: Stage, program: Program) -> Built:
    """A program that is linked as ``symbol``."""
    return Built(
        library,
        symbol,
        tuple((i.name, i.type) for i in stage.inputs),
        stage.output.type,
        program.tasks,
        program.workspace,
        program.packings,
    )


def elementwise_kernel(
    function: Callable[[Emitter, Any], Any],
    size: int,
    machine: Target,
    explicit: bool = False,
    dtype: str = "float32",
) -> Built:
    """``out[i] = function(in[i])``, in vectorized loops or on explicit vectors; ``size`` is a
    multiple of the lanes.
    """
    types = TensorType((size,)), TensorType((size,), dtype)

    def body(em: Emitter, args: KernelArguments) -> None:
        with em.loop(size // em.lanes, "block") as block:
            if explicit:
                x = em.load_vector(args.inputs["x"], [block * em.lanes])
                em.store_vector(args.output, [block * em.lanes], function(em, x))
            else:
                with em.vector(em.lanes) as lane:
                    em.store(
                        args.output,
                        [block * em.lanes + lane],
                        function(em, em.load(args.inputs["x"], [block * em.lanes + lane])),
                    )

    program = kernel("kernel_under_test", {"x": types[0]}, types[1], 0, machine.lanes, body)
    library = load([program], machine)
    return Built(library, "kernel_under_test", (("x", types[0]),), types[1], 1, 0, {})


def reference(stage: Stage, arrays: Sequence[np.ndarray], precise: bool = True) -> np.ndarray:
    """The stage's output by ``gtco.tensor.reference``; float arrays are first widened to
    float64.
    """
    return _values(stage, arrays, precise)[stage.output.output]


def allowed(stage: Stage, arrays: Sequence[np.ndarray]) -> float:
    """How far a right kernel's output may be off, over its largest value. Weights of a softmax are
    stored as bfloat16, so the error of attention is a share of V's largest value. The sum over V
    may be much smaller than that. The error of a large product is a share of the largest sum, which
    a tanh behind it makes smaller.
    """
    values, tolerance = _values(stage, arrays), TOLERANCE
    last = _largest(values[stage.output.output])
    for op in stage.operators:
        if op.kind == "matmul" and op.type.dtype == "float32":
            tolerance = max(tolerance, SUMMED * _largest(values[op.output]) / last)
        if op.kind == "attention" and stage.types[op.inputs[0]].dtype == "bfloat16":
            v, summed = (_largest(values[x]) for x in (op.inputs[2], op.output))
            tolerance = max(tolerance, ROUNDED * max(1.0, v / summed))
    return tolerance


def _largest(array: np.ndarray) -> float:
    wide = np.abs(array.astype(np.float64))
    return float(wide[np.isfinite(wide)].max(initial=1e-30))


def _values(
    stage: Stage, arrays: Sequence[np.ndarray], precise: bool = True
) -> dict[str, np.ndarray]:
    """Every tensor of the stage, by name."""
    values = {
        i.name: a.astype(np.float64) if precise and a.dtype == np.float32 else a
        for i, a in zip(stage.inputs, arrays, strict=True)
    }
    for op in stage.operators:
        values[op.output] = evaluate(op, *(values[x] for x in op.inputs))
    return values


def some_kernels(sketch: Sketch, machine: Target) -> list[Built]:
    """The sketch's first config and its last. Also the config with the most tasks, from a space in
    which hardly any work is too little for its own task.
    """
    return [kernel for _, kernel in some_kernels_of([sketch], machine)]


def some_kernels_of(sketches: Sequence[Sketch], machine: Target) -> list[tuple[int, Built]]:
    """:func:`some_kernels` of each sketch, with its position among them, in one object."""
    programs: list[tuple[Sketch, Program]] = []
    places = []
    for place, sketch in enumerate(sketches):
        every = list(configs(sketch))
        ends = dict.fromkeys((every[0], every[-1]))
        for config in ends:
            programs.append((sketch, _program(sketch, config, len(programs))))
        with small_tasks():
            if (config := finest(sketch)) not in ends:
                programs.append((sketch, _program(sketch, config, len(programs))))
        places += [place] * (len(programs) - len(places))
    return list(zip(places, _linked(programs, machine), strict=True))


@contextmanager
def small_tasks() -> Iterator[None]:
    """The spaces of small stages also get configs with many tasks, like those of large stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "TASK_ELEMENTS", 1)
        yield


def finest(sketch: Sketch) -> Config:
    """The last option of each decision, or the least if the decision says how much work a task
    has.
    """
    chosen: dict[str, int | str] = {}
    while decision := sketch.next_decision(chosen):
        chosen[decision.name] = decision.options[0 if decision.role == "grain" else -1]
    return Config(sketch.name, tuple(chosen.items()))


def config_with(sketch: Sketch, **choices: int | str) -> Config:
    """The config with these choices, and with the first option of every other decision."""
    chosen: dict[str, int | str] = {}
    while decision := sketch.next_decision(chosen):
        choice = choices.get(decision.name, decision.options[0])
        assert choice in decision.options, f"{decision.name}={choice}: {decision.options}"
        chosen[decision.name] = choice
    assert chosen.keys() >= choices.keys(), f"of {choices} there are {chosen}"
    return Config(sketch.name, tuple(chosen.items()))


def first_config(sketch: Sketch) -> Config:
    return next(iter(configs(sketch)))


def random_inputs(stage: Stage, seed: int, scale: float = 1.0) -> list[np.ndarray]:
    """Fresh arrays for the stage's inputs. The seed is printed, so that a failure can be
    repeated.
    """
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arrays = []
    for i in stage.inputs:
        shape = tuple(int(d) for d in i.type.shape)
        match np.dtype(i.type.dtype).kind:
            case "f":
                arrays.append((rng.standard_normal(shape) * scale).astype(i.type.dtype))
            case "b":
                arrays.append(rng.integers(0, 2, shape).astype(bool))
            case _ if i.type.dtype == "int4":
                arrays.append(rng.integers(-8, 8, shape).astype(np.dtype("int4")))
            case _:
                arrays.append(
                    rng.integers(-9 if np.dtype(i.type.dtype).kind == "i" else 0, 9, shape).astype(
                        i.type.dtype
                    )
                )
    return arrays


def fresh_seed() -> int:
    return secrets.randbelow(1 << 31)


def assert_close(
    got: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-5, least: float = 1e-30
) -> None:
    """Checks that the largest difference is within ``tolerance`` of the largest finite magnitude,
    or of ``least`` where sums may cancel, and that NaN and infinities are in the same places.
    """
    assert got.shape == wanted.shape
    wide, want = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(wide[~finite], want[~finite])
    if finite.any():
        scale = max(np.abs(want[finite]).max(), least)
        error = np.abs(wide - want)[finite].max() / scale
        assert error <= tolerance, f"relative error {error:.3g} over {tolerance:.3g}"
