"""What the memory-bound sketches for GPUs share: which stages, how many threads, the price."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import numpy as np

from gtco.machine.gpu import MOST_REGISTERS, GpuTarget
from gtco.tensor import cost
from gtco.tensor.analysis.chains import Epilogue, epilogue, prologue_readable
from gtco.tensor.cuda.program import Launch
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.stage import Operator, Stage

FLOATS = ("float32", "float16", "bfloat16")  # what kernels read as float32
ALLOCATED = 128  # threads of four warps, one on each partition, which have registers together
COUNTED = 16  # lanes that a price in vector instructions is asked for


def floats(stage: Stage, tensors: Iterable[str]) -> bool:
    return all(stage.types[t].dtype in FLOATS for t in tensors)


def around(stage: Stage, op: Operator) -> Epilogue | None:
    """The epilogue behind ``op``, where that and a prologue are all that is around it."""
    return epilogue(stage, op.output) if prologue_readable(stage, op.inputs) else None


def number(x: float) -> str:
    """A float32 constant of C++."""
    return f"{float(np.float32(x))!r}f"


def operations(stage: Stage) -> float:
    """Instructions of the stage's element-wise operators, one thread's of each added up."""
    return sum(
        cost.vectors(stage, (op,), COUNTED).total * op.type.size
        for op in stage.operators
        if pattern(op.kind) == ELEMENTWISE
    )


def taken(registers: int, threads: int, target: GpuTarget) -> int:
    """Registers of a thread that would like so many: no more than instructions name, nor than a
    block of so many threads leaves it, which launch bounds tell the compiler.
    """
    whole = ceil(threads / ALLOCATED) * ALLOCATED
    return min(registers, MOST_REGISTERS, target.registers_sm // whole)


def launch(
    stage: Stage,
    threads: int,
    work: float,
    registers: int,
    blocks: int,
    *,
    shared: int = 0,
    steps: int = 1,
    traffic: float = 0.0,
) -> Launch:
    """The price of a kernel that reads each input once and writes the output.

    ``work``: instructions of all threads beside those of element-wise operators; ``traffic``: bytes
    that blocks ask for, where they ask for more; ``steps``: what waits for one another in a thread.
    """
    read = float(stage.input_bytes)
    written = float(stage.output.type.nbytes)
    return Launch(
        blocks=blocks,
        threads=threads,
        shared=shared,
        registers=registers,
        unit="fma",
        work=0.0,
        vector=work + operations(stage),
        read=read,
        written=written,
        traffic=max(traffic, read + written),
        flops=float(sum(op.type.size for op in stage.operators)),
        steps=steps,
    )
