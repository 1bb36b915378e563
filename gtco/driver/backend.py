"""What a compile asks of the kind of machine that it is for. :func:`backend_of` alone asks
whether a machine is a CPU or a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import exists
from typing import TYPE_CHECKING

from gtco.machine.cores import allowed_cores
from gtco.machine.gpu import GpuTarget, lacking
from gtco.machine.isa import X86_64, Isa, host
from gtco.machine.target import Machine, Target
from gtco.runtime.gpu.driver import gpu
from gtco.runtime.gpu.table import GPU_SOURCES
from gtco.runtime.writing.c_objects import CPU_SOURCES
from gtco.runtime.writing.cross import emulator_of
from gtco.support.errors import ArtifactError, GtcoError, OptionError, ShapeError
from gtco.support.options import EFFORTS, GPU_PRECISIONS, PRECISIONS, CompileOptions, Tune
from gtco.support.sizes import several
from gtco.tensor.stage import NARROW_INDICES

if TYPE_CHECKING:
    from gtco.codegen.generate import Generated
    from gtco.codegen.workers import Workers
    from gtco.driver.linking.launching import Launching
    from gtco.graph.graph import Graph

# Kernels for GPUs index tensors of fewer elements, and number as many threads as whole blocks have.
MOST_ELEMENTS = (1 << 31) - 1024


class Backend(ABC):
    """A kind of machine, for one machine of it."""

    machine: Machine
    c_sources: Sequence[str]  # sources of the C runtime for its libraries
    dump_suffix: str  # suffix of the files that --dump writes for kernels
    isa: Isa = X86_64  # instruction set of the library
    computes_float16: bool  # False: float16 models are computed in float32
    widens_bytes: bool  # True: kernels multiply float32 by int8 weights

    @property
    @abstractmethod
    def builders(self) -> int:
        """How many processes build kernels where the options do not say."""

    @abstractmethod
    def check_options(self, options: CompileOptions) -> None:
        """Raises :class:`OptionError` if an option does not go with the machine, or if code cannot
        be made for it here.
        """

    @abstractmethod
    def check_loadable(self, options: CompileOptions) -> None:
        """Raises :class:`ArtifactError` if this process cannot open what is compiled."""

    @abstractmethod
    def check_tuning(self, asked: str) -> None:
        """Raises :class:`OptionError` if a compile cannot measure; ``asked`` names the option."""

    @abstractmethod
    def check_indices(self, graph: Graph) -> None:
        """Raises :class:`ShapeError` if a tensor has more elements than kernels can index."""

    def launching(
        self, generated: Generated, graph: Graph, options: CompileOptions, workers: Workers
    ) -> Launching | None:
        """How the model is launched; None where there is one way only."""
        return None

    def precision_notes(self, precision: str) -> list[str]:
        """Notes about a number format that the machine has but does not multiply fast."""
        return []

    def check(self, options: CompileOptions) -> None:
        """Everything that can be said of the options before the work is done."""
        if options.records is not None and options.tune == "off" and not exists(options.records):
            raise OptionError(
                f"records={str(options.records)!r}: the file does not exist. {self._records_made()}"
            )
        self.check_options(options)

    @abstractmethod
    def _records_made(self) -> str:
        """Why this compile does not make the file of records, and what does."""

    def effort(self, wanted: str | Tune) -> Tune | None:
        """The effort of measuring; None if nothing is measured. Raises :class:`OptionError`."""
        if wanted == "off":
            return None
        effort = EFFORTS.get(wanted) if isinstance(wanted, str) else wanted
        if not isinstance(effort, Tune):
            raise OptionError(
                f"tune={wanted!r}: known are off, {', '.join(EFFORTS)}, and a gtco.Tune"
            )
        self.check_tuning(f"tune={wanted}" if isinstance(wanted, str) else "tuning")
        return effort


class CpuBackend(Backend):
    c_sources = CPU_SOURCES
    dump_suffix = "txt"
    computes_float16 = False
    widens_bytes = True

    def __init__(self, machine: Target) -> None:
        self.machine: Target = machine
        self.isa = machine.isa

    @property
    def builders(self) -> int:
        return self.machine.cores if self.isa.here else allowed_cores()

    def _records_made(self) -> str:
        return (
            "With tune='off' nothing is measured, so it is not made. Make one with gtco tune "
            "--records"
        )

    def check_options(self, options: CompileOptions) -> None:
        name = self.machine.name
        if options.precision not in (*PRECISIONS, "int8"):
            raise OptionError(
                f"precision {options.precision} is for GPUs (--target cuda:...): CPUs multiply "
                "float16 no faster than float32, and a float16 file keeps its weights in float16 "
                f"at any precision. '{name}' has {', '.join(PRECISIONS)}, int8"
            )
        for_gpus = {
            f"launches={options.launches}": options.launches != "graph",
            "--no-ptx (ptx=False)": not options.ptx,
        }
        for option, given in for_gpus.items():
            if given:
                raise OptionError(
                    f"{option} is for GPUs (--target cuda:...), and '{name}' is a CPU: leave it out"
                )

        verifies = options.verify or options.verify_layers
        if verifies and not self.isa.here and emulator_of(self.isa) is None:
            raise OptionError(
                f"--verify (verify=True) runs the library, and '{name}' is for {self.isa.name}, "
                f"which this machine is not: install {self.isa.emulator} (Debian, Ubuntu: apt "
                f"install qemu-user {self.isa.package}), which runs it here, or compile without "
                "it and compare where the library is to run: gtco.verification.verify"
            )

    def check_loadable(self, options: CompileOptions) -> None:
        """A library checks the CPU's instructions when it is opened."""
        if not self.isa.here:
            raise ArtifactError(
                f"compile_model opens what it makes, and '{self.machine.name}' is for "
                f"{self.isa.name}, which this machine is not: gtco.compile_to_file(model, "
                "'model.so', ...) compiles for it, and gtco.load('model.so') opens it there"
            )

    def check_tuning(self, asked: str) -> None:
        if self.machine.name != "native" and not self.machine.cpu:  # no machine of a farm
            raise OptionError(
                f"{asked}: tuning runs on this machine, and '{self.machine.name}' may be another "
                "one. Tune where the library will run, or leave it off"
            )

    def check_indices(self, graph: Graph) -> None:
        """Kernels for CPUs index as wide as their tensors need, but for those that TVM writes."""
        for op in graph.operators.values():
            large = [x for x in (*op.inputs, op.output) if graph.types[x].size > NARROW_INDICES]
            if op.kind == "relax" and large:
                kind = graph.types[large[0]]
                raise ShapeError(
                    f"node '{op.name or op.output}' ({op['op']}): the tensor '{large[0]}' ({kind}) "
                    f"has {kind.size / 1e9:.1f} billion elements, and this operator is compiled "
                    "for at most 2^30: compile for a smaller batch or image"
                )


class GpuBackend(Backend):
    c_sources = GPU_SOURCES
    dump_suffix = "cu"
    computes_float16 = True
    widens_bytes = False

    def __init__(self, machine: GpuTarget) -> None:
        self.machine: GpuTarget = machine
        self.isa = host() or X86_64

    @property
    def builders(self) -> int:
        return allowed_cores()

    def _records_made(self) -> str:
        return (
            f"A compile for '{self.machine.name}' measures nothing, so it is not made. Make "
            "candidates with gtco candidates, time them with gtco measure where the GPU is, and "
            "read the times with gtco records import"
        )

    def check_options(self, options: CompileOptions) -> None:
        if options.precision == "int8":
            raise OptionError(
                f"precision int8 is for CPUs, and '{self.machine.name}' is a GPU: compile for fp16"
            )
        if options.verify_layers:
            raise OptionError(
                "--verify-layers (verify_layers=True) compares libraries for CPUs, and "
                f"'{self.machine.name}' is a GPU: leave it out; --verify compares the outputs"
            )
        if options.threads:
            raise OptionError(
                f"threads={options.threads}: '{self.machine.name}' is a GPU, whose kernels take "
                "the threads that they are picked for; leave it out"
            )
        if options.launches == "persistent" and several(options.dims):
            raise OptionError(
                "--launches persistent (launches='persistent'): one kernel has the steps of one "
                "shape, and --dim (dims) asks for several: leave it out, and each shape is "
                "launched as a graph, or compile a library for each shape"
            )
        if options.verify:
            with _without_gpu(
                OptionError,
                "--verify (verify=True) runs the library, and no GPU is here to run it ({error}): "
                "compile without it, or where the GPU is",
            ):
                self._check_gpu(options)
        from gtco.codegen import nvrtc

        nvrtc.library()

    def _check_gpu(self, options: CompileOptions) -> None:
        """Raises :class:`ArtifactError` if this machine's first GPU does not run such code."""
        found = gpu(0)
        if not self.machine.runs_on(found.major, found.minor, options.ptx):
            none = "" if options.ptx else " without PTX"
            images = ", ".join(self.machine.images)
            raise ArtifactError(f"{found} does not run code for {images}{none}")

    def check_loadable(self, options: CompileOptions) -> None:
        with _without_gpu(
            ArtifactError,
            f"compile_model opens what it makes, and no GPU is here for '{self.machine.name}' "
            "({error}): gtco.compile_to_file(model, 'model.so', ...) compiles without one, and "
            "gtco.load('model.so') opens it where the GPU is",
        ):
            self._check_gpu(options)

    def check_tuning(self, asked: str) -> None:
        raise OptionError(
            f"{asked}: '{self.machine.name}' is a GPU, where a compile measures nothing: a model "
            "of the machine picks the kernels. For GPUs there is gtco candidates, which makes what "
            "gtco measure times where the GPU is; gtco compile --records follows what came of it"
        )

    def check_indices(self, graph: Graph) -> None:
        for name, kind in graph.types.items():
            if kind.size >= MOST_ELEMENTS:
                raise ShapeError(
                    f"the tensor '{name}' ({kind}) has {kind.size / 1e9:.1f} billion elements, and "
                    f"kernels for GPUs such as '{self.machine.name}' index fewer than 2^31 - 1024: "
                    "compile for a smaller batch or image"
                )

    def launching(
        self, generated: Generated, graph: Graph, options: CompileOptions, workers: Workers
    ) -> Launching | None:
        from gtco.driver.linking.launching import launching

        return launching(generated, graph, self.machine, options, workers)

    def precision_notes(self, precision: str) -> list[str]:
        if precision == "fp32":
            return []
        images = self.machine.images
        without = lacking(f"mma:{GPU_PRECISIONS[precision]}", images)
        if not without:
            return []
        others = [image for image in images if image not in without]
        asked, old = precision, " and ".join(without)
        same = f" on {' and '.join(others)} too, which have the same programs" if others else ""
        leave = f", and so does {asked} where {old} is left out" if others else ""
        return [
            f"products of {asked} run on CUDA cores{same}, since Tensor Cores of {old} do not "
            f"multiply that format: --precision fp16 uses Tensor Cores{leave}"
        ]


@contextmanager
def _without_gpu(error: type[GtcoError], message: str) -> Iterator[None]:
    """Says ``message``, with the reason as its ``{error}``, where there is no GPU."""
    try:
        yield
    except ArtifactError as reason:
        raise error(message.replace("{error}", str(reason))) from reason


def backend_of(machine: Machine) -> Backend:
    """The backend of a machine."""
    return GpuBackend(machine) if isinstance(machine, GpuTarget) else CpuBackend(machine)
