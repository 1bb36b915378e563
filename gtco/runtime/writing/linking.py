"""Writes an artifact as ``NAME.so`` and ``NAME.h``: links kernels, weights, the table of the plan
and the C runtime.

All files are made in a staging folder and published when they are complete (``publish.py``), so
that an error, a full disk or Ctrl-C leaves nothing under the final name.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

from gtco.runtime.artifact import Artifact, check, code_of, isa_of
from gtco.runtime.elf import seal
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.gpu.table import GPU_SOURCES, gpu_plan_source, images_data, write_images
from gtco.runtime.publish import publish, staging, weights_name, write_error
from gtco.runtime.writing import c_objects
from gtco.runtime.writing.c_objects import CPU_SOURCES, write_objects
from gtco.runtime.writing.cross import compiler_for, flags_for
from gtco.runtime.writing.elf_object import closed
from gtco.runtime.writing.embedding import WEIGHTS_HEADER_BYTES, data_source, write_weights
from gtco.runtime.writing.metadata import metadata
from gtco.runtime.writing.table import CSRC, header_source, plan_source
from gtco.support.errors import BuildError
from gtco.support.toolchain import run_compiler

WEIGHTS_INSIDE_LIMIT = 1_900_000_000  # bytes
EXPORTS = (
    "gtco_open gtco_close gtco_num_inputs gtco_num_outputs gtco_input gtco_output gtco_set_shapes "
    "gtco_sized_input gtco_sized_output gtco_run gtco_run_shapes gtco_run_on gtco_wait "
    "gtco_profile gtco_num_steps gtco_num_threads gtco_launch_mode "
    "gtco_metadata gtco_artifact_metadata gtco_last_error gtco_status_string gtco_abi_version"
).split()
# An artifact needs only libc and libm (for GPUs also libdl, if that is not part of libc). It has no
# executable stack, and no symbol of another library gets into it by accident. Code that nobody
# calls is left out: TVM gives each object functions that convert float16.
LINK_FLAGS = (
    "-shared -pthread -static-libgcc -Wl,-z,defs -Wl,-z,now -Wl,-z,noexecstack -Wl,-Bsymbolic "
    "-Wl,--as-needed -Wl,--build-id=none -Wl,--version-script=exports.map -Wl,--strip-debug "
    "-Wl,--gc-sections"
).split()
# The functions that call kernels need no tables for unwinding, since kernels have none.
PLAN_FLAGS = ("-fno-asynchronous-unwind-tables",)


def write_artifact(
    artifact: Artifact | GpuArtifact,
    path: str | os.PathLike[str],
    *,
    weights_inside_limit: int = WEIGHTS_INSIDE_LIMIT,
) -> Path:
    """Writes ``path`` (ending in .so), the header beside it, and a weights file if the weights
    exceed the limit. If this raises, none of them is written.

    Raises as :func:`build_artifact` does. Returns the path.
    """
    target = Path(path).absolute()
    if target.suffix != ".so":
        raise BuildError(f"{target} must end in .so; write to {target.name}.so for example")
    with staging(target) as folder:
        build_artifact(artifact, folder, target, weights_inside_limit)
        publish(folder, target)
    return target


def publish_alone(folder: Path, artifact: Artifact | GpuArtifact, target: Path) -> None:
    """Writes the library as one file with any name and without a header; only gtco's own programs
    use this. ``folder`` is where the library is staged. Raises as :func:`build_artifact` does.
    """
    library = build_artifact(artifact, folder, target)
    library.with_suffix(".h").unlink()
    publish(folder, target)


def build_artifact(
    artifact: Artifact | GpuArtifact,
    staged: Path,
    target: Path,
    weights_inside_limit: int = WEIGHTS_INSIDE_LIMIT,
) -> Path:
    """Makes the files of ``target`` in the folder ``staged``, which holds nothing else. Returns the
    library there, which can be loaded and is not published yet.

    Raises :class:`BuildError` if there is no C compiler
    (:func:`gtco.runtime.writing.cross.compiler_for`), the compiler fails, or a file cannot be
    written; :class:`ShapeError` for symbolic shapes.
    """
    check(artifact)
    isa = isa_of(artifact)
    compiler = compiler_for(isa)
    inside = artifact.weights_bytes <= weights_inside_limit
    folder, library = staged / "build", staged / target.name
    try:
        folder.mkdir()
        identity = _build(artifact, target.name, folder, compiler, inside)
        os.rename(folder / "model.so", library)
        os.rename(folder / "model.h", library.with_suffix(".h"))
        if not inside:
            os.rename(folder / "weights", library.with_name(weights_name(library.name, identity)))
    except OSError as error:
        code = sum(map(len, code_of(artifact)))
        needed = artifact.weights_bytes * (2 if inside else 1) + 3 * code + (4 << 20)
        raise write_error(target, error, needed) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return library


def _build(
    artifact: Artifact | GpuArtifact, file_name: str, folder: Path, compiler: str, inside: bool
) -> bytes:
    """Makes model.so, model.h and, unless ``inside``, the weights file. Returns the identity."""
    weights_file = folder / "weights"
    with weights_file.open("wb") as file:
        identity = write_weights(artifact, file, 0 if inside else WEIGHTS_HEADER_BYTES)
    described = metadata(artifact)
    compressed = zlib.compress(described, 9)
    (folder / "metadata").write_bytes(compressed)
    (folder / "exports.map").write_text(
        "{ global: " + " ".join(f"{name};" for name in EXPORTS) + " local: *; };\n"
    )
    places = len(compressed), len(described)
    data = data_source(identity, places, artifact.weights_bytes if inside else None)
    objects = []
    if isinstance(artifact, Artifact):
        plan = plan_source(artifact, inside, identity, closed(artifact.kernels.values()))
        sources, library = CPU_SOURCES, "-lm"
        for number, code in enumerate(artifact.kernels.values()):
            objects.append(f"kernels_{number}.o")
            (folder / objects[-1]).write_bytes(code)
    else:
        plan = gpu_plan_source(artifact, inside, identity)
        sources, library = GPU_SOURCES, "-ldl"
        write_images(artifact, folder / "images")
        data += images_data("images")
    (folder / "plan.c").write_text(plan)
    (folder / "data.s").write_text(data)
    isa = isa_of(artifact)
    flags = flags_for(compiler, isa)
    run_compiler([compiler, *flags, "-c", "data.s", "-o", "data.o"], folder)
    if inside:
        weights_file.unlink()  # before the linker copies them once more
    first, *others = write_objects(sources, folder, compiler, isa)
    run_compiler(
        [
            compiler,
            *c_objects.COMPILE_FLAGS,
            *PLAN_FLAGS,
            *flags,
            f"-I{CSRC}",
            *LINK_FLAGS,
            first,  # a CPU's kernels stand behind it, and with them the functions that call them
            "plan.c",
            "data.o",
            *objects,
            *others,
            library,
            "-o",
            "model.so",
        ],
        folder,
    )
    seal(folder / "model.so")
    (folder / "model.h").write_text(header_source(artifact, file_name))
    return identity
