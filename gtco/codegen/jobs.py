"""The jobs that the driver sends to the processes that build kernels, and the kernels or failures
that they send back. This module does not import TVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gtco.codegen.nvrtc import Image
from gtco.codegen.outlines import Arguments, Outline
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.loops import Line
from gtco.tensor.packing import Packing
from gtco.tensor.space import Config
from gtco.tensor.stage import Stage


@dataclass(frozen=True)
class Job:
    """A kernel to build. ``text``: give also the lowered TIR or the CUDA C++, for a dump. ``ptx``:
    for a kernel for GPUs, give PTX beside its machine code. ``arguments``: which of its numbers it
    reads from an array. ``outlined``: build no code, and give an :class:`Outlined`.
    """

    symbol: str
    stage: Stage
    config: Config
    target: Machine
    text: bool = False
    ptx: bool = False
    arguments: Arguments | None = None
    outlined: bool = False


@dataclass(frozen=True)
class ProgramJob:
    """A kernel for GPUs whose program exists already: that of a whole model. It gets no PTX,
    because a driver would take as long to compile it as gtco does.
    """

    symbol: str
    program: CudaProgram
    target: GpuTarget
    text: bool = False


@dataclass(frozen=True)
class Kernel:
    """A built kernel: its object file, what the runtime must know, and the layouts of its constant
    inputs. ``tiles``: it multiplies in the tile unit. ``lines``: its loops in words. ``numbers``
    (of the dtype ``numbers_dtype``): what it reads from the array that is its last buffer;
    without a dtype it has no such array.
    """

    symbol: str
    code: bytes
    tasks: int
    workspace: int
    packings: dict[str, Packing]
    text: str = ""
    tiles: bool = False
    lines: tuple[Line, ...] = ()
    numbers: tuple[int, ...] = ()
    numbers_dtype: str = ""

    @property
    def nbytes(self) -> int:
        return len(self.code)


@dataclass(frozen=True, kw_only=True)
class Outlined(Kernel):
    """A kernel that was not compiled: its outline, and what a :class:`Kernel` says beside its
    code.
    """

    outline: Outline
    code: bytes = b""


@dataclass(frozen=True, kw_only=True)
class GpuKernel(Kernel):
    """A kernel for GPUs: instead of an object file it has machine code by architecture, and it says
    how it is launched (:class:`gtco.tensor.cuda.program.CudaProgram`). ``source`` is its CUDA C++,
    from which a model's persistent kernel is made. ``scratch`` and ``counters`` are those of the
    program.
    """

    images: Mapping[str, Image]
    grid: tuple[int, int, int]
    threads: int
    shared: int
    source: str
    scratch: int = 0
    counters: int = 0
    code: bytes = b""
    tasks: int = 1
    workspace: int = 0

    @property
    def nbytes(self) -> int:
        return sum(len(image.cubin) + len(image.ptx) for image in self.images.values())


@dataclass(frozen=True)
class Failure:
    """Why a job gave no kernel: a rejection, an exception, or the crash of its process.
    ``rejected`` is the reason under which a rejection is counted.
    """

    symbol: str
    reason: str
    rejected: str = ""
