"""Writes a compiled model as ``NAME.so`` and ``NAME.h``: links the kernels, the weights, the plan's
table and the C runtime.

All files are made in a staging folder and published when they are complete (``publish.py``), so
that an error, a full disk or Ctrl-C leaves nothing under the final name. Weights are streamed to a
file once and get into the library through ``.incbin``. Above a limit they stay in a file of their
own, because code reaches data in its library only within 2 GB.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gtco.machine.isa import X86_64, Isa, host
from gtco.runtime import c_objects
from gtco.runtime.c_objects import CPU_SOURCES, write_objects
from gtco.runtime.cross import compiler_for, flags_for
from gtco.runtime.elf import ABI_VERSION, CONTENTS_NOTE, ID_NOTE, NOTE_NAME, seal
from gtco.runtime.elf_object import closed
from gtco.runtime.gpu_plan import GpuArtifact, GpuStep
from gtco.runtime.gpu_table import (
    GPU_SOURCES,
    check_launches,
    gpu_plan_source,
    image_sizes,
    images_data,
    write_images,
)
from gtco.runtime.plan import ALIGNMENT, DTYPES, Batch, Cover, Step, TensorSpec, Variant
from gtco.runtime.publish import publish, staging, weights_name, write_error
from gtco.runtime.table import CSRC, header_source, normalize_features, plan_source
from gtco.support.errors import BuildError, ShapeError
from gtco.support.sizes import Range
from gtco.support.toolchain import run_compiler

WEIGHTS_INSIDE_LIMIT = 1_900_000_000  # bytes
WEIGHTS_MAGIC, WEIGHTS_HEADER_BYTES = b"GTCOWGT1", 4096  # csrc/weights.c
MAX_STEPS, MAX_TASKS = 0xFFFD, 2**31 - 1  # what fits in the pool's word, csrc/thread_pool.c
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


@dataclass(frozen=True)
class Artifact:
    """A model ready to be written.

    - ``kernels``: file name → bytes of a position-independent ELF object of ``isa``; one object may
      hold several symbols
    - ``weights``: packed arrays and their byte offsets (multiples of 64, no overlap), to which
      weight buffers refer
    - ``variants``: of a model of several shapes, one for each; its ``inputs`` and ``outputs`` then
      have symbolic sizes, and its ``steps`` are empty. A model of one shape has none
    - ``cover``: the range of sizes that the variants together run, if there is one
    - ``ranges``: dimensions whose sizes in the variants are a range, by name
    - ``batch``: if the samples run in parts; ``steps`` are those of one part
    - ``cpu_features``: the instruction sets that the kernels need, by LLVM's names; they are
      checked when the model is opened
    - ``threads``: 0 means all that the process may use
    - ``metadata``: JSON, shown by ``gtco inspect``
    - ``isa``: the instruction set of the kernels and of the runtime
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    kernels: Mapping[str, bytes]
    weights: Sequence[tuple[int, np.ndarray]] = ()
    cpu_features: tuple[str, ...] = ()
    threads: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()
    cover: Cover | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    batch: Batch | None = None
    isa: Isa = X86_64

    @property
    def weights_bytes(self) -> int:
        return max((offset + array.nbytes for offset, array in self.weights), default=0)


def write_artifact(
    artifact: Artifact | GpuArtifact,
    path: str | os.PathLike[str],
    *,
    cc: str | None = None,
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
        build_artifact(artifact, folder, target, cc, weights_inside_limit)
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
    cc: str | None = None,
    weights_inside_limit: int = WEIGHTS_INSIDE_LIMIT,
) -> Path:
    """Makes the files of ``target`` in the folder ``staged``, which holds nothing else. Returns the
    library there, which can be loaded and is not published yet.

    ``cc`` is the C compiler; None means that of :func:`gtco.runtime.cross.compiler_for`. Raises
    :class:`BuildError` if there is no compiler, the compiler fails, or a file cannot be written;
    :class:`ShapeError` for symbolic shapes.
    """
    _check(artifact)
    isa = isa_of(artifact)
    compiler = compiler_for(isa, cc)
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


def isa_of(artifact: Artifact | GpuArtifact) -> Isa:
    """The instruction set of the library. That of a library for GPUs is this
    machine's.
    """
    return artifact.isa if isinstance(artifact, Artifact) else host() or X86_64


def code_of(artifact: Artifact | GpuArtifact) -> list[bytes]:
    """The machine code of the kernels, for all architectures."""
    if isinstance(artifact, Artifact):
        return list(artifact.kernels.values())
    more = artifact.persistent.images.values() if artifact.persistent else ()
    return [*(cubin for image in artifact.images.values() for cubin in image.values()), *more]


def variants_of(artifact: Artifact | GpuArtifact) -> Sequence[Variant]:
    """The variants, of which every artifact has one at least."""
    own = Variant(
        artifact.inputs,
        artifact.outputs,
        artifact.steps,
        artifact.arena_bytes,
        batch=artifact.batch if isinstance(artifact, Artifact) else None,
    )
    return artifact.variants or (own,)


def _check(artifact: Artifact | GpuArtifact) -> None:
    variants = variants_of(artifact)
    for variant in variants:
        _check_variant(artifact, variant)
    number = sum(len(variant.calls) for variant in variants)
    if number > MAX_STEPS:
        raise BuildError(f"the plan has {number} steps; {MAX_STEPS} is the most")
    if isinstance(artifact, GpuArtifact):
        check_launches(artifact)
    end = 0
    for offset, array in sorted(artifact.weights, key=lambda w: w[0]):
        if offset % ALIGNMENT or offset < end:
            raise BuildError(
                f"the weights at offset {offset} are misaligned or overlap those before them"
            )
        end = offset + array.nbytes


def _check_variant(artifact: Artifact | GpuArtifact, variant: Variant) -> None:
    for spec in (*variant.inputs, *variant.outputs):
        if spec.dtype not in DTYPES:
            raise BuildError(
                f"tensor {spec.name!r} has dtype {spec.dtype}, which an artifact cannot describe"
            )
        symbols = [d for d in spec.shape if not isinstance(d, int)]
        if symbols:
            raise ShapeError(
                f"tensor {spec.name!r} has the symbolic size {symbols[0]!r}; a variant serves one "
                "shape: give the size a value"
            )
    # on a GPU the counters are behind the tensors of all variants
    arena = artifact if isinstance(artifact, GpuArtifact) else variant
    limits = {
        "input": len(variant.inputs),
        "output": len(variant.outputs),
        "arena": arena.arena_bytes,
        "weight": artifact.weights_bytes,
    }
    steps: Sequence[Step | GpuStep] = variant.steps
    for number, step in enumerate(steps):
        if isinstance(step, Step) and not 1 <= step.tasks <= MAX_TASKS:
            raise BuildError(
                f"step {number} ({step.kernel}) has {step.tasks} tasks; 1 to {MAX_TASKS} are "
                "possible"
            )
        for ref in step.buffers:
            # An empty tensor may lie at the very end of the arena or the weights.
            end_counts = ref.kind in ("arena", "weight")
            if not 0 <= ref.index < limits[ref.kind] + end_counts:
                raise BuildError(
                    f"step {number} ({step.kernel}) refers to {ref.kind} {ref.index}, which does "
                    "not exist"
                )
            if end_counts and ref.index % ALIGNMENT:
                raise BuildError(
                    f"step {number} ({step.kernel}): {ref.kind} offset {ref.index} is not a "
                    "multiple of 64"
                )
    written = {ref.index for step in steps for ref in step.buffers if ref.kind == "output"}
    for index, spec in enumerate(variant.outputs):
        if index not in written:
            raise BuildError(f"no step writes output {index} ({spec.name!r})")


def _build(
    artifact: Artifact | GpuArtifact, file_name: str, folder: Path, compiler: str, inside: bool
) -> bytes:
    """Makes model.so, model.h and, unless ``inside``, the weights file. Returns the identity."""
    weights_file = folder / "weights"
    with weights_file.open("wb") as file:
        identity = _write_weights(artifact, file, 0 if inside else WEIGHTS_HEADER_BYTES)
    metadata = _metadata(artifact)
    compressed = zlib.compress(metadata, 9)
    (folder / "metadata").write_bytes(compressed)
    (folder / "exports.map").write_text(
        "{ global: " + " ".join(f"{name};" for name in EXPORTS) + " local: *; };\n"
    )
    places = len(compressed), len(metadata)
    data = _data_source(identity, places, artifact.weights_bytes if inside else None)
    objects = []
    if isinstance(artifact, Artifact):
        plan = plan_source(
            name=artifact.name,
            inputs=artifact.inputs,
            outputs=artifact.outputs,
            variants=variants_of(artifact),
            features=normalize_features(artifact.cpu_features, artifact.isa),
            threads=artifact.threads,
            weights_bytes=artifact.weights_bytes,
            weights_inside=inside,
            identity=identity,
            closed=closed(artifact.kernels.values()),
            cover=artifact.cover,
            ranges=artifact.ranges,
        )
        sources, library = CPU_SOURCES, "-lm"
        for number, code in enumerate(artifact.kernels.values()):
            objects.append(f"kernels_{number}.o")
            (folder / objects[-1]).write_bytes(code)
    else:
        plan = gpu_plan_source(artifact, variants_of(artifact), inside, identity)
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
    stem = file_name.removesuffix(".so")
    (folder / "model.h").write_text(
        header_source(
            artifact.name or stem,
            file_name,
            artifact.inputs,
            artifact.outputs,
            variants_of(artifact),
            artifact.cover,
            artifact.ranges,
        )
    )
    return identity


def _write_weights(artifact: Artifact | GpuArtifact, file: BinaryIO, header: int) -> bytes:
    """Streams the weights to the file and returns their SHA-256, which also covers their places."""
    digest = hashlib.sha256()
    at = 0
    file.write(bytes(header))
    for offset, array in sorted(artifact.weights, key=lambda w: w[0]):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        file.write(bytes(offset - at))
        file.write(data)
        digest.update(struct.pack("<QQ", offset, array.nbytes))
        digest.update(data)
        at = offset + array.nbytes
    if header:
        file.seek(0)
        file.write(WEIGHTS_MAGIC + struct.pack("<q", artifact.weights_bytes) + digest.digest())
    return digest.digest()


def _steps(variant: Variant) -> dict[str, Any]:
    """The steps for the metadata, and where the parts begin that go through them."""
    steps = [
        {
            **step.info,
            "kernel": step.kernel,
            **_launch_info(step),
            "buffers": [[ref.kind, ref.index] for ref in step.buffers],
        }
        for step in variant.steps
    ]
    return {"steps": steps, **({"parts": variant.batch.firsts} if variant.batch else {})}


def _metadata(artifact: Artifact | GpuArtifact) -> bytes:
    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in specs]

    own: dict[str, Any] = {
        "name": artifact.name,
        "abi": ABI_VERSION,
        "inputs": tensors(artifact.inputs),
        "outputs": tensors(artifact.outputs),
        "arena_bytes": artifact.arena_bytes,
        "weights_bytes": artifact.weights_bytes,
    }
    if artifact.cover:
        own["range"] = artifact.cover.to_json()
    if artifact.ranges:
        own["ranges"] = {
            name: {"low": sizes.low, "high": sizes.high, "step": sizes.step}
            for name, sizes in artifact.ranges.items()
        }
    if artifact.variants:
        own["variants"] = [
            {
                "sizes": dict(variant.sizes),
                "inputs": tensors(variant.inputs),
                "outputs": tensors(variant.outputs),
                "arena_bytes": variant.arena_bytes,
                **_steps(variant),
            }
            for variant in artifact.variants
        ]
    else:
        own |= _steps(variants_of(artifact)[0])
    if isinstance(artifact, Artifact):
        own["cpu_features"] = list(normalize_features(artifact.cpu_features, artifact.isa))
        if artifact.isa is not X86_64:
            own["isa"] = artifact.isa.name
        own["threads"] = artifact.threads
    else:
        own["images"] = image_sizes(artifact)
        own["launches"] = "persistent" if artifact.persistent else "graph"
        if artifact.persistent:
            own["persistent"] = {
                **artifact.persistent.info,
                "kernel": artifact.persistent.symbol,
                "threads": artifact.persistent.threads,
                "shared": artifact.persistent.shared,
                "prefetched_bytes": sum(n for _, n in artifact.persistent.prefetches),
            }
    taken = own.keys() & artifact.metadata.keys()
    if taken:
        raise BuildError(
            f"the metadata may not set {', '.join(sorted(taken))}: the artifact sets them itself"
        )
    try:
        return json.dumps({**artifact.metadata, **own}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BuildError(f"the metadata of the model or of a step is not JSON: {error}") from error


def _launch_info(step: Step | GpuStep) -> dict[str, Any]:
    if isinstance(step, Step):
        return {"tasks": step.tasks, "workspace": step.workspace}
    return {"grid": list(step.grid), "threads": step.threads, "shared": step.shared}


def _data_source(identity: bytes, metadata: tuple[int, int], weights_bytes: int | None) -> str:
    """Assembly for the data of the library: gtco's notes (see elf.py), the metadata and, if
    ``weights_bytes`` is given, the weights. ``metadata``: its bytes in the file, and as text.
    """
    inside = weights_bytes is not None
    lines = [
        *_note(ID_NOTE, 8 + len(identity)),
        f".long {ABI_VERSION}, 0",
        f".byte {', '.join(map(str, identity))}",
        *_note(CONTENTS_NOTE, 64),
        f".quad gtco_the_metadata - ., {metadata[0]}",
        f".quad gtco_the_weights - ., {weights_bytes}" if inside else ".quad 0, 0",
        ".zero 32",
        ".section .rodata",
        ".globl gtco_the_metadata",
        ".hidden gtco_the_metadata",
        "gtco_the_metadata:",
        '.incbin "metadata"',
        ".balign 8",
        ".globl gtco_the_metadata_bytes",
        ".hidden gtco_the_metadata_bytes",
        "gtco_the_metadata_bytes:",
        f".quad {metadata[0]}, {metadata[1]}",
        ".bss",
        ".globl gtco_the_metadata_text",
        ".hidden gtco_the_metadata_text",
        "gtco_the_metadata_text:",
        f".zero {metadata[1] + 1}",
    ]
    if inside:
        # A section of its own: the linker puts it behind the code's own constants, which stay close
        # to the code.
        lines += [
            '.section .gtco_weights,"a",@progbits',
            ".balign 4096",
            ".globl gtco_the_weights",
            ".hidden gtco_the_weights",
            "gtco_the_weights:",
            '.incbin "weights"',
            f".zero {ALIGNMENT}",
        ]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _note(kind: int, size: int) -> list[str]:
    return [
        '.section .note.gtco,"a",@note',
        ".balign 4",
        f".long {len(NOTE_NAME)}, {size}, {kind}",
        '.asciz "gtco"',
        ".balign 4",
    ]
