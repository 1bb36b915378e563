"""Kernels for AArch64 on this machine: compiled and linked as for a board, and run by qemu-user,
many in one process.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.codegen.llvm import has_no_alias, object_code
from gtco.machine.isa import AARCH64
from gtco.machine.target import ARM_TARGETS, Target
from gtco.runtime.writing.cross import compiler_for, emulator_of
from gtco.support.errors import BuildError
from gtco.tensor.space import Program
from gtco.tensor.stage import Stage, TensorType

PROGRAM = Path(__file__).with_name("run_kernels.c")
SECONDS = 300  # of one run


def tools() -> tuple[str, str]:
    """The cross compiler and the emulator; the test is skipped where one is missing."""
    try:
        compiler = compiler_for(AARCH64)
    except BuildError as error:
        pytest.skip(str(error))
    emulator = emulator_of(AARCH64)
    if emulator is None:
        pytest.skip("no qemu-aarch64, or no C library for it: apt install qemu-user")
    return compiler, emulator


def emulated(emulator: list[str], command: list[str], folder: Path) -> None:
    """Runs a program for AArch64, with the emulator's name and options, in the folder."""
    done = subprocess.run(
        [*emulator, "-L", AARCH64.libraries, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def featured(*features: str, cores: int = 3) -> Target:
    """An AArch64 with these features and some cores."""
    return replace(ARM_TARGETS["aarch64"], features=features, cores=cores)


@dataclass
class Job:
    """A kernel with its inputs, and later its output."""

    symbol: str
    program: Program
    arrays: Sequence[np.ndarray]
    output: TensorType
    inputs: tuple[tuple[str, TensorType], ...]
    off: int = 0
    result: np.ndarray | None = None


@dataclass
class Batch:
    """Kernels that run in one process of the emulator. ``cpu``: the one that it emulates."""

    target: Target
    cpu: str = "max"
    jobs: list[Job] = field(default_factory=list)

    def add(
        self, stage: Stage, program: Program, arrays: Sequence[np.ndarray], off: int = 4
    ) -> Job:
        """``off``: bytes by which the output is off a line, as a user's may be."""
        inputs = tuple((i.name, i.type) for i in stage.inputs)
        symbol = str(program.function.attrs["global_symbol"])
        assert symbol not in {job.symbol for job in self.jobs}
        self.jobs.append(Job(symbol, program, arrays, stage.output.type, inputs, off))
        return self.jobs[-1]

    def run(self, folder: Path) -> None:
        """Runs every kernel, and puts each job's ``result`` in place."""
        compiler, emulator = tools()
        folder.mkdir(parents=True, exist_ok=True)
        # apart, so that each is generated as a compile does it, which builds one at a time
        functions: dict[bool, list[Any]] = {}
        for job in self.jobs:
            function = job.program.function
            functions.setdefault(has_no_alias(function), []).append(function)
        objects = [f"k{number}.o" for number in range(len(functions))]
        for name, some in zip(objects, functions.values(), strict=True):
            (folder / name).write_bytes(object_code(some, self.target))
        flags = [compiler, "-O1"]
        shared = ["-shared", "-nostdlib", "-o", "k.so", *objects, "-lgcc"]
        subprocess.run([*flags, *shared], cwd=folder, check=True)
        libm = ["-Wl,--no-as-needed", "-lm", "-ldl"]
        subprocess.run([*flags, str(PROGRAM), "-o", "run", *libm], cwd=folder, check=True)
        with (folder / "jobs").open("wb") as file:
            for job in self.jobs:
                file.write(b"".join(_described(job)))
        emulated([emulator, "-cpu", self.cpu], ["./run", "./k.so", "jobs", "results"], folder)
        data, at = (folder / "results").read_bytes(), 0
        for job in self.jobs:
            found = np.frombuffer(data[at : at + job.output.nbytes], np.dtype(job.output.dtype))
            job.result = found.reshape([int(d) for d in job.output.shape])
            at += job.output.nbytes
        assert at == len(data)


def _described(job: Job) -> list[bytes]:
    parts = [
        struct.pack(
            "<64s5q",
            job.symbol.encode(),
            len(job.inputs),
            job.output.nbytes,
            job.program.workspace,
            job.program.tasks,
            job.off,
        )
    ]
    for (name, type_), array in zip(job.inputs, job.arrays, strict=True):
        assert array.shape == tuple(type_.shape) and array.dtype == np.dtype(type_.dtype)
        if name in job.program.packings:
            array = job.program.packings[name].apply(array)
        data = np.ascontiguousarray(array).tobytes()
        parts += [struct.pack("<q", len(data)), data]
    return parts
