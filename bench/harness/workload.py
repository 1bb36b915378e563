"""Makes a model ready for every system of a benchmark: a named model of ``models`` or an .onnx
file.

Ready means: it is exported to ONNX (named models, kept under the cache folder) and compiled by
gtco, seeded inputs are in a .npz file, and FLOPs are counted.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gtco.codegen.processes import python
from gtco.frontend.dimensions import Shapes, inputs_of, set_sizes
from gtco.frontend.onnx import read_message, read_onnx
from gtco.quantization.writing import write_model
from gtco.runtime.library import check_model, read_metadata, tensor_specs
from gtco.runtime.tensors import random_inputs
from gtco.runtime.variants import choose, dims_of
from gtco.support.errors import ModelError, OptionError
from gtco.support.onnx_messages import is_utf8
from gtco.support.sizes import flags

from ..models.names import WIDER
from . import kept
from .build import Build, build
from .flops import count_flops
from .peers import NEEDS_MODEL, SETTINGS, peer_of
from .process import child_environment
from .rounds import Contender, Progress

TORCH_NEEDS_SOURCE = (
    "an .onnx file has no torch source: give a model's name (python -m gtco.models list) to "
    "time torch"
)


@dataclass(frozen=True)
class Workload:
    """One model, ready to be timed.

    - ``onnx``: None if only the model's library is known
    - ``model``: its name in ``models``; None for a file
    - ``precision``: gtco's, and that of the peers that support it
    """

    name: str
    onnx: Path | None
    model: str | None
    inputs: Path
    build: Build
    flops: float | None
    notes: tuple[str, ...] = ()
    precision: str = "fp32"


def prepare(
    source: str,
    folder: Path,
    threads: int,
    shapes: Shapes | None = None,
    library: Path | None = None,
    progress: Progress = lambda text: None,
    precision: str = "fp32",
    target: str = "native",
) -> Workload:
    """Makes ``source`` (an .onnx path, a library's or a model's name) ready in ``folder``.

    ``library`` is its compiled form, if there is one already. Raises ``GtcoError`` for a bad
    source; the result says if the compile failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, model = Path(source), None
    if path.suffix == ".so":
        return prepare_library(path, folder, shapes or {})
    if path.suffix == ".onnx":
        if not path.is_file():
            raise ModelError(f"no such file: {path}")
        path = readable(path, folder)
        name = path.stem
    else:
        name = model = source
        path = export(source, folder, progress)
    inputs = folder / f"{name}.inputs.npz"
    np.savez(inputs, **make_inputs(path, shapes or {}))  # type: ignore[arg-type]
    if library is None:
        progress(f"compile {name}")
        suffix = "" if precision == "fp32" else f".{precision}"
        made = folder / f"{name}{suffix}.so"
        built = build(path, made, threads, shapes, precision, target=target)
    else:
        built = Build(str(library), 0.0, 0)
    flops, unknown = count_flops(path, shapes or {})
    notes = (
        (f"FLOPs of {len(unknown)} nodes unknown ({unknown[0]} ...): GFLOP/s not shown",)
        if unknown
        else ()
    )
    return Workload(
        name,
        path,
        model,
        inputs,
        built,
        None if unknown or not flops else flops,
        notes,
        precision,
    )


def readable(path: Path, folder: Path) -> Path:
    """The .onnx file, or a copy in ``folder`` of one whose path is not UTF-8: peers open no such
    path.
    """
    if is_utf8(path):
        return path
    name = os.fsencode(path.name).decode(errors="replace")
    return write_model(folder / name, read_onnx(path))


def check_library(library: Path, model: Path | None = None) -> dict[str, Any]:
    """The metadata of a library. Raises ``ArtifactError`` if it is not a model of gtco's,
    ``OptionError`` if its inputs are not those of the .onnx file ``model``. Runs no code of the
    library.
    """
    metadata = read_metadata(library)
    check_model(library, metadata)
    if model is None:
        return metadata
    wanted = [value.name for value in inputs_of(read_message(model)[0].graph)]
    found = [spec["name"] for spec in metadata["inputs"]]
    if sorted(wanted) != sorted(found):
        raise OptionError(
            f"--library {library} is of another model: its inputs are {', '.join(found) or 'none'},"
            f" and those of {model} {', '.join(wanted) or 'none'}"
        )
    return metadata


def prepare_library(library: Path, folder: Path, sizes: Shapes) -> Workload:
    """A library that is timed by itself, on seeded inputs. Its FLOPs are those that the library
    does. ``sizes`` choose the variant of a library of several shapes.
    """
    metadata = read_metadata(library)
    variant = choose(metadata, sizes, library)
    if variant is None:
        raise OptionError(
            f"{library} was compiled for several shapes: choose one with {flags(dims_of(metadata))}"
        )
    specs = tensor_specs(variant, "inputs")
    inputs = folder / f"{library.stem}.inputs.npz"
    np.savez(inputs, **random_inputs(specs))  # type: ignore[arg-type]
    flops = float(sum(step.get("flops") or 0 for step in variant["steps"])) or None
    notes = ("FLOPs are those that the library does, not those of the model as it was exported",)
    precision = metadata.get("precision", "fp32")
    built = Build(str(library.absolute()), 0.0, 0)
    return Workload(library.stem, None, None, inputs, built, flops, notes, precision)


def check_models(names: Sequence[str], folder: Path) -> None:
    """Raises ``ModelError`` for a name that is neither a file's nor a model's. Files that are
    exported in ``folder`` already need no torch, which alone knows the models.
    """
    asked = [
        name
        for name in names
        if Path(name).suffix not in (".onnx", ".so")
        and name not in WIDER
        and not (folder / f"{name}.onnx").exists()
    ]
    if not asked:
        return
    done = _ran("gtco.models", "list")
    known = {line.split()[0] for line in done.splitlines()[1:]}
    if unknown := [name for name in asked if name not in known]:
        raise ModelError(
            f"unknown model {', '.join(unknown)}: python -m gtco.models list has the names"
        )


def _ran(module: str, *arguments: str) -> str:
    """What a module prints in a process of its own, because it imports torch. Raises ``ModelError``
    with the last line of its errors.
    """
    done = subprocess.run(
        [*python(module), *arguments], env=child_environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ModelError(reason.removeprefix("error: "))
    return done.stdout


def export(name: str, folder: Path, progress: Progress = lambda text: None) -> Path:
    """The ONNX file of a named model. ``python -m bench.models.wide`` exports it if it does not
    exist or was exported with other versions. Without torch the file that is there is taken.
    """
    path, about = folder / f"{name}.onnx", kept.exporters()
    if not (path.exists() and about["torch"] is None) and not kept.current(path, about):
        progress(f"export {name}")
        try:
            _ran("gtco.bench.models.wide", name, str(path))
        except ModelError as error:
            raise ModelError(f"cannot export {name}: {error}") from None
        kept.note(path, about)
    return path


def make_inputs(path: Path, shapes: Shapes, seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs for a model: normal floats, integers from {0, 1} (ids and masks alike), by name
    in the graph's order.
    """
    inputs = inputs_of(read_message(path)[0].graph)
    set_sizes(inputs, shapes)
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for value in inputs:
        shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        random = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        arrays[value.name] = np.asarray(random).astype(dtype)
    return arrays


def candidates(
    workload: Workload, peers: Sequence[str], threads: int
) -> tuple[list[Contender], dict[str, str]]:
    """gtco and the requested peers as candidates, and the reason for each one that cannot run this
    workload.
    """
    job = {
        "threads": threads,
        "onnx": str(workload.onnx) if workload.onnx else None,
        "inputs": str(workload.inputs),
        "model": workload.model,
        "precision": workload.precision,
        "library": workload.build.library,
    }
    chosen: list[Contender] = []
    skipped: dict[str, str] = {}
    for name in ("gtco", *peers):
        if name == "gtco" and workload.build.error:
            skipped[name] = workload.build.error
        elif peer_of(name) in NEEDS_MODEL and workload.model is None:
            skipped[name] = TORCH_NEEDS_SOURCE
        else:
            chosen.append(Contender(name, {"system": name, **job}))
    return chosen, skipped


def check_peers(text: str, settings: Mapping[str, tuple[str, ...]] = SETTINGS) -> tuple[str, ...]:
    """The systems that a text such as ``onnxruntime,torch:channels-last`` names; a peer means all
    of its settings. Raises ``OptionError`` for an unknown name.
    """
    every = [system for several in settings.values() for system in several]
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in every]
    if unknown:
        raise OptionError(f"unknown peer {', '.join(unknown)}: choose from {', '.join(every)}")
    chosen = [system for name in names for system in settings.get(name, (name,))]
    return tuple(dict.fromkeys(chosen))
