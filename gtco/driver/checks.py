"""What is asked of a compile's arguments, so that what is wrong is said before the work is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.machine.gpu import GpuTarget, lacking
from gtco.machine.target import Machine
from gtco.runtime.driver import gpu_name
from gtco.support.errors import ArtifactError, ModelError, OptionError, ShapeError
from gtco.support.options import (
    EFFORTS,
    GPU_PRECISIONS,
    PRECISIONS,
    CompileOptions,
    Tune,
    check_place,
)

if TYPE_CHECKING:
    from gtco.graph.graph import Graph

MOST_ELEMENTS = 1 << 31  # and no GPU's kernel indexes as many
LARGEST = 1 << 37  # bytes of one tensor: no machine runs a model of larger ones


PROGRAM = ".pt2"  # what torch.export.save writes


def is_onnx(model: Any) -> bool:
    if isinstance(model, str | os.PathLike):
        return Path(model).suffix != PROGRAM
    if isinstance(model, bytes | bytearray):
        return True
    if type(model).__module__.partition(".")[0] == "onnx" or type(model).__name__ == "ModelProto":
        return True
    if type(model).__name__ == "ExportedProgram" or callable(getattr(model, "parameters", None)):
        return False
    raise ModelError(
        f"cannot compile a {type(model).__name__}: give an ONNX file's path, bytes or ModelProto, "
        "a torch nn.Module with example_inputs, or a torch ExportedProgram"
    )


def source_of(model: Any) -> Any:
    """The model, with every path as a ``Path`` and all bytes as ``bytes``."""
    if isinstance(model, str | os.PathLike):
        return Path(model)
    return bytes(model) if isinstance(model, bytearray) else model


def check_source(model: Any) -> None:
    """Can a model that is a file be opened?"""
    if isinstance(model, Path):
        try:
            model.open("rb").close()
        except (OSError, ValueError) as error:  # no path has a zero byte
            said = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot read {str(model)!r}: {said}") from error


def check_machine(options: CompileOptions, machine: Machine) -> None:
    """Do the options go with the machine, and can code be made for it here?"""
    on_gpu = isinstance(machine, GpuTarget)
    if options.records is not None and options.tune == "off" and not options.records.exists():
        measures = f"a compile for '{machine.name}'" if on_gpu else "with tune='off' a compile"
        make = "candidates, gtco measure and gtco records import make" if on_gpu else "tune makes"
        raise OptionError(
            f"records={str(options.records)!r}: there is no such file, and {measures} measures "
            f"nothing to put there; gtco {make} one"
        )
    if not isinstance(machine, GpuTarget):
        if options.precision not in PRECISIONS:
            raise OptionError(
                f"precision {options.precision} is for GPUs (--target cuda:...): CPUs multiply "
                f"float16 no faster than float32. '{machine.name}' has {', '.join(PRECISIONS)}"
            )
        if options.launches != "graph":
            raise OptionError(
                f"launches={options.launches} is for GPUs (--target cuda:...), and "
                f"'{machine.name}' is a CPU: leave it out"
            )
        if not options.ptx:
            raise OptionError(
                f"--no-ptx (ptx=False) is for GPUs (--target cuda:...), and '{machine.name}' is a "
                "CPU: leave it out"
            )
        if options.untrusted:
            raise OptionError(
                f"--untrusted (untrusted=True) is for GPUs (--target cuda:...), and "
                f"'{machine.name}' is a CPU: leave it out"
            )
        return
    if options.threads:
        raise OptionError(
            f"threads={options.threads}: '{machine.name}' is a GPU, whose kernels take the threads "
            "that they are picked for; leave it out"
        )
    if options.verify:
        try:
            gpu_name(0)
        except ArtifactError as error:
            raise OptionError(
                f"--verify (verify=True) runs the library, and no GPU is here to run it ({error}): "
                "compile without it, or where the GPU is"
            ) from error
    from gtco.codegen import nvrtc

    nvrtc.library()


def precision_notes(options: CompileOptions, machine: Machine) -> list[str]:
    """Where the format that was asked for is one that Tensor Cores do not multiply."""
    if not isinstance(machine, GpuTarget) or options.precision == "fp32":
        return []
    without = lacking(f"mma:{GPU_PRECISIONS[options.precision]}", machine.images)
    if not without:
        return []
    others = [image for image in machine.images if image not in without]
    asked, old = options.precision, " and ".join(without)
    same = f" on {' and '.join(others)} too, which have the same programs" if others else ""
    leave = f", and so does {asked} where {old} is left out" if others else ""
    return [
        f"products of {asked} run on CUDA cores{same}, since Tensor Cores of {old} do not multiply "
        f"that format: --precision fp16 uses Tensor Cores{leave}"
    ]


def check_loadable(machine: Machine) -> None:
    """Can what is compiled for the machine be opened here?"""
    if isinstance(machine, GpuTarget):
        try:
            gpu_name(0)
        except ArtifactError as error:
            raise ArtifactError(
                f"compile_model opens what it makes, and no GPU is here for '{machine.name}' "
                f"({error}): gtco.compile_to_file(model, 'model.so', ...) compiles without one, "
                "and gtco.load('model.so') opens it where the GPU is"
            ) from error


def effort_of(wanted: str | Tune, machine: Machine) -> Tune | None:
    """What is to be measured; None where nothing is."""
    if wanted == "off":
        return None
    effort = EFFORTS.get(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(effort, Tune):
        raise OptionError(
            f"tune={wanted!r}: known are off, {', '.join(EFFORTS)}, and a gtco.Tune"
        )
    asked = f"tune={wanted}" if isinstance(wanted, str) else "tuning"
    if isinstance(machine, GpuTarget):
        raise OptionError(
            f"{asked}: '{machine.name}' is a GPU, where a compile measures nothing: a model of the "
            "machine picks the kernels. For GPUs there is gtco candidates, which makes what gtco "
            "measure times where the GPU is; gtco compile --records follows what came of it"
        )
    if machine.name != "native":
        raise OptionError(
            f"{asked}: candidates are timed on the machine that compiles, which target "
            f"'{machine.name}' need not be; tune where the library is to run, or leave it off"
        )
    return effort


def check_output(path: Path) -> None:
    if path.suffix != ".so":
        raise OptionError(f"the output '{path}' must end in .so")
    check_place(path)


def check_bundle(path: Path, model: Any) -> None:
    """The file that candidates go to; a slip of the hand is no reason to lose the model."""
    if path.suffix != ".bundle":
        raise OptionError(
            f"the output '{path}' must end in .bundle, as what gtco measure takes is called"
        )
    check_place(path)
    if isinstance(model, Path) and path.exists() and path.samefile(model):
        raise OptionError(f"the output '{path}' is the model itself: give another name")


def check_sizes(graph: Graph) -> None:
    for name, kind in graph.types.items():
        if kind.nbytes > LARGEST:
            raise ShapeError(
                f"the tensor '{name}' ({kind}) would take {kind.nbytes / 1e9:.0f} GB: look at the "
                "sizes of the inputs and at those that operators such as Pad, Tile, Expand and "
                "Resize are given"
            )


def check_indices(graph: Graph, machine: Machine) -> None:
    """Kernels for GPUs count elements in 32 bits."""
    for name, kind in graph.types.items() if isinstance(machine, GpuTarget) else ():
        if kind.size >= MOST_ELEMENTS:
            raise ShapeError(
                f"the tensor '{name}' ({kind}) has {kind.size / 1e9:.1f} billion elements, and "
                f"kernels for GPUs such as '{machine.name}' index at most 2^31 - 1: compile for a "
                "smaller batch or image"
            )


def check_dump(folder: Path | None) -> None:
    """The folder is made, and can be written."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(
            f"--dump: cannot write in the folder '{folder}': {error.strerror or error}. Choose "
            "another one"
        ) from error
