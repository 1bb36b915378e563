"""A library for another instruction set, run here by qemu-user, to see that it is right. An
emulator says nothing about speed.
"""

from __future__ import annotations

import struct
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtco.runtime.elf import read_contents
from gtco.runtime.tensors import aligned_empty
from gtco.runtime.variants import SizedModel, choose, described_variants
from gtco.runtime.writing.cross import compiler_for, emulator_of, flags_for
from gtco.runtime.writing.table import CSRC
from gtco.support.errors import ArtifactError, InputError
from gtco.support.toolchain import run_compiler

CPU = "max"  # what qemu emulates: every feature that it knows
PROGRAM = "run_emulated.c"


class EmulatedModel:
    """A compiled model in a process of the emulator, with the attributes of
    :class:`gtco.runtime.module.Model` that verification asks for: ``inputs``, ``outputs``,
    ``metadata``, ``stages`` and ``run``.
    """

    def __init__(
        self,
        path: Path,
        threads: int = 0,
        *,
        dims: Mapping[str, int] | None = None,
        cpu: str = CPU,
    ) -> None:
        """Opens the library as :func:`gtco.load` does on a machine that has its instruction set;
        ``cpu`` is a name of qemu's. A library of several shapes needs ``dims``. Raises
        :class:`ArtifactError` if it cannot be opened there, or there is no emulator, and
        :class:`BuildError` without a C compiler for it.
        """
        self.path = path.absolute()
        contents = read_contents(self.path)
        self.metadata: dict[str, Any] = contents.metadata
        chosen = choose(self.metadata, dims or {}, self.path)
        if chosen is None:
            raise InputError(f"{path} has several shapes: say which one (dims) is to be run")
        self.sized = SizedModel(chosen)
        self.inputs, self.outputs = self.sized.inputs, self.sized.outputs
        self.stages = self.sized.stages
        isa = contents.isa
        emulator = emulator_of(isa)
        if emulator is None:
            raise ArtifactError(
                f"{path} is for {isa.name}, and {isa.emulator} is not here to run it: install it "
                f"(Debian, Ubuntu: apt install qemu-user {isa.package})"
            )
        compiler = compiler_for(isa)
        folder = tempfile.TemporaryDirectory(prefix="gtco-emulated-")
        source, program = str(CSRC / PROGRAM), str(Path(folder.name) / "run")
        flags = [*flags_for(compiler, isa), "-std=gnu11", "-O1", f"-I{CSRC}"]
        run_compiler([compiler, *flags, source, "-o", program, "-ldl"], Path(folder.name))
        command = [emulator, "-cpu", cpu, "-L", isa.libraries, program, str(self.path)]
        self._process = subprocess.Popen(
            [*command, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._close = weakref.finalize(self, _end, self._process, folder)
        try:
            self._answer()
            if len(described_variants(self.metadata)) > 1:
                sizes = [size for spec in self.inputs for size in spec.shape]
                self._ask(b"s", struct.pack(f"<{len(sizes)}q", *sizes))
                self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs by name. Raises :class:`InputError` if an input does not fit."""
        results = self._run(b"r", [inputs[spec.name] for spec in self.inputs])
        return {spec.name: y for spec, y in zip(self.outputs, results, strict=True)}

    def timed(self, values: Sequence[Any], results: Sequence[np.ndarray]) -> list[float]:
        """As :meth:`gtco.runtime.module.Model.timed`; the seconds are the emulator's, and no
        measure of anything.
        """
        for array, found in zip(results, self._run(b"p", values), strict=True):
            array[...] = found
        return list(np.frombuffer(self._read(8 * len(self.stages)), np.float64))

    def close(self) -> None:
        self._close()

    def __enter__(self) -> EmulatedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, command: bytes, values: Sequence[Any]) -> list[np.ndarray]:
        arrays = self.sized.read(values)
        self._ask(command, *(np.ascontiguousarray(x).tobytes() for x in arrays))
        self._answer()
        results = [aligned_empty(spec) for spec in self.outputs]
        for array in results:
            data = self._read(array.nbytes)
            array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
        return results

    def _ask(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        try:
            for part in parts:
                self._process.stdin.write(part)
            self._process.stdin.flush()
        except OSError:
            self._ended()

    def _answer(self) -> None:
        """Reads whether it went well. Raises :class:`ArtifactError` with the runtime's text."""
        status, size = struct.unpack("<ii", self._read(8))
        text = self._read(size).decode(errors="replace")
        if status:
            raise ArtifactError(f"{self.path}: {text}")

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            self._ended()
        return data

    def _ended(self) -> None:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise ArtifactError(f"{self.path}: the emulated process ended with {how}")


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    """Ends the process, which is only this object's."""
    process.kill()
    process.communicate()
    folder.cleanup()
