"""Many compiles of the same models and stages with NVRTC, in which everything is done once. A model
is read once for all targets and precisions. A text is compiled once an architecture for all models
and targets that have it. On request, images are kept for other processes and later runs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtco.codegen import nvrtc
from gtco.codegen.build import gpu_kernel, program_of
from gtco.codegen.cuda import Compiler
from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob
from gtco.codegen.nvrtc import Image, compile_cuda, library
from gtco.codegen.sass import MachineCode, machine_code
from gtco.driver.compilation import Among, Compilation, silent
from gtco.driver.linking.persistent import persistent
from gtco.driver.phases import Built, Lowered, Simplified
from gtco.machine.cores import allowed_cores
from gtco.machine.gpu import GpuTarget, gpu_target
from gtco.machine.target import Machine
from gtco.runtime.gpu.plan import PersistentKernel
from gtco.support.options import CompileOptions
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Rejection


class Images:
    """The images that NVRTC makes, kept in a folder by everything that they depend on: the text,
    the architecture, our headers, the options, how an image is read, and NVRTC's version. A kept
    image is the same as a new one, so a check proves as much with it, and a check that ended early
    can continue.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        made_with = hashlib.sha256(nvrtc.version().encode())
        for path in [Path(nvrtc.__file__), *sorted(nvrtc.DEVICE.rglob("*.cuh"))]:
            made_with.update(path.read_bytes())
        self.made_with = made_with.digest()

    def compiled(self, source: str, arch: str, ptx: bool) -> Image:
        """As :func:`gtco.codegen.nvrtc.compile_cuda`."""
        key = hashlib.sha256(self.made_with + f"{arch}\n{source}".encode()).hexdigest()
        path = self.folder / key
        try:
            image: Image = pickle.loads(zlib.decompress(path.read_bytes()))
        except FileNotFoundError:
            image = compile_cuda(source, arch, not arch.endswith("a"))
            whole = path.with_name(f"{key}.{os.getpid()}.{threading.get_ident()}")
            whole.write_bytes(zlib.compress(pickle.dumps(image), 1))
            whole.replace(path)
        return image if ptx else replace(image, ptx=b"")


class Compiling:
    """Workers that compile in threads of this process and keep all cores busy, because NVRTC needs
    none of Python's locks. ``programs`` has those of all jobs so far, by symbol and target.
    """

    def __init__(self, compiler: Compiler = compile_cuda) -> None:
        library()
        self.compiler = compiler
        self.pool = ThreadPoolExecutor(allowed_cores())
        self.programs: dict[tuple[str, str], CudaProgram] = {}
        self.answers: dict[tuple[str, tuple[str, ...], str], Future[Any]] = {}

    def build(self, jobs: Iterable[Job | ProgramJob]) -> Iterator[Kernel | Failure]:
        waiting = []
        for job in jobs:
            assert isinstance(job.target, GpuTarget)
            program: Any = (
                job.program
                if isinstance(job, ProgramJob)
                else program_of(job, space_of(job.stage, job.target))
            )
            if isinstance(program, Rejection):
                yield Failure(job.symbol, program.detail, program.reason)
                continue
            self.programs[job.symbol, job.target.name] = program
            known = (job.symbol, job.target.images, program.source)
            if known not in self.answers:
                self.answers[known] = self.pool.submit(
                    gpu_kernel, job, program, job.target, self.compiler
                )
            waiting.append(self.answers[known])
        for answer in waiting:
            yield answer.result()

    def machine_codes(self, cubins: Sequence[bytes]) -> list[dict[str, MachineCode]]:
        """The machine code of each image, by kernel. The tools that read it are processes."""
        return list(self.pool.map(machine_code, cubins))


class Once:
    """A model and its example inputs, read once for all compilations of it."""

    def __init__(self, model: Any, example: Any) -> None:
        self.model, self.example = model, example
        self.imported: Any = None
        self.simplified: dict[tuple[Machine, str], Simplified] = {}  # the str is a precision

    def compiled(
        self, folder: Path, target: str, compiling: Compiling, **options: Any
    ) -> tuple[Compilation, Built]:
        """The model with its kernels for the target."""
        chosen = CompileOptions(target=target, **options)
        run = _Shared(self, folder / "model.so", chosen)
        fused = run.to_stages(gpu_target(target))
        return run, run.generate(fused, compiling)  # type: ignore[arg-type]


def persistent_kernel(built: Built, compiling: Compiling) -> PersistentKernel:
    """The one kernel for the whole model; the model must have one."""
    target = built.policy.target
    assert isinstance(target, GpuTarget)
    found = persistent(built.generated, 2, target, compiling)  # type: ignore[arg-type]
    assert not isinstance(found, Rejection), found
    return found[0]


class _Shared(Compilation):
    def __init__(self, once: Once, output: Path, options: CompileOptions) -> None:
        super().__init__(once.model, output, once.example, options, silent)
        self.once = once

    def read(self, machine: Machine) -> Any:
        if self.once.imported is None:
            self.once.imported = super().read(machine)
        return self.once.imported

    def canonical(
        self, lowered: Lowered, machine: Machine, among: Among | None = None
    ) -> Simplified:
        known = machine, lowered.facts.precision
        if known not in self.once.simplified:
            self.once.simplified[known] = super().canonical(lowered, machine, among)
        simple = self.once.simplified[known]
        return replace(simple, graph=simple.graph.copy())
