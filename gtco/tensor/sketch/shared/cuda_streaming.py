"""The parts that the memory-bound sketches for GPUs share: the stages they take, the number of
threads, the price.
"""

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

FLOATS = ("float32", "float16", "bfloat16")  # the dtypes that kernels read as float32
ALLOCATED = 128  # threads of four warps, one a partition: their registers are allocated together
COUNTED = 16  # lanes for which a price in vector instructions is asked


def floats(stage: Stage, tensors: Iterable[str]) -> bool:
    return all(stage.types[t].dtype in FLOATS for t in tensors)


def around(stage: Stage, op: Operator) -> Epilogue | None:
    """The epilogue of ``op``, if the stage is ``op`` with a prologue and an epilogue; else None."""
    return epilogue(stage, op.output) if prologue_readable(stage, op.inputs) else None


def number(x: float) -> str:
    """A float32 constant in C++."""
    return f"{float(np.float32(x))!r}f"


def operations(stage: Stage) -> float:
    """Instructions of the stage's element-wise operators: the sum of one thread's of each."""
    return sum(
        cost.vectors(stage, (op,), COUNTED).total * op.type.size
        for op in stage.operators
        if pattern(op.kind) == ELEMENTWISE
    )


def taken(registers: int, threads: int, target: GpuTarget) -> int:
    """Registers that a thread gets if it needs ``registers``: at most those that instructions
    address, and at most its share in a block of ``threads``. Launch bounds tell the compiler.
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
    indexing: float = 0.0,
    lines: float = 0.0,
) -> Launch:
    """The price of a kernel that reads each input once and writes the output.

    - ``work``: instructions of all threads beside those of element-wise operators;
    - ``traffic``: bytes that blocks ask for, if they ask for more than that;
    - ``steps``: the number of steps in a thread that wait for one another;
    - ``indexing``, ``lines``: as in :class:`Launch`.
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
        indexing=indexing,
        lines=lines,
    )
