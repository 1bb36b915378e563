"""Compares a library with what the model computes, and the output of every stage with the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.driver.backend import backend_of
from gtco.driver.reading import Source
from gtco.machine.target import target
from gtco.runtime.artifact import Artifact
from gtco.runtime.emulated import EmulatedModel
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.module import load
from gtco.support.options import CompileOptions
from gtco.tensor.stage import Stage

if TYPE_CHECKING:
    from gtco.driver.linking.layers import StageLosses
    from gtco.graph.graph import Graph
    from gtco.verification import VerificationReport

Opener = Callable[[Path], Any]


def model_compared(source: Source, library: Path, opened: Opener) -> VerificationReport:
    """The differences between the library and the model, wrong ones among them."""
    from gtco.frontend.onnx import OnnxSource, read_onnx
    from gtco.frontend.weights import whole
    from gtco.support.onnx_messages import is_utf8
    from gtco.verification import verify

    model = source.model
    if isinstance(model, str | Path) and not is_utf8(model):
        model = read_onnx(model)  # ONNX Runtime gets what is in the file
    if isinstance(model, OnnxSource):
        model = whole(model.skeleton, model.weights)
    with opened(library) as compiled:
        return verify(compiled, model, example_inputs=source.example_inputs, check=False)


def stages_compared(
    graph: Graph,
    plain: Graph,
    stages: Sequence[Stage],
    artifact: Callable[[Graph], Artifact | GpuArtifact],
    opened: Opener,
) -> StageLosses:
    """What the output of every stage of ``graph`` has lost beside ``plain``, the graph in float32.
    ``artifact`` gives that of a graph with the same stages and more outputs.
    """
    from gtco.driver.linking.layers import compared, losses, run_all, with_outputs

    kept, left_out = compared(stages)
    given, made = run_all(artifact(with_outputs(graph, kept)), opened)
    return losses(graph, plain, stages, given, made, left_out)


def opened_library(
    library: Path,
    options: CompileOptions,
    notes: list[str],
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """The library, or its variant of these sizes, to be run: here, or in an emulator if it is for
    another kind of CPU, which is a note.
    """
    isa = backend_of(target(options.target)).isa
    if isa.here:
        return load(library, threads=options.threads, dims=sizes)
    note = (
        f"verified by {isa.emulator} on this machine: the results are those of "
        "the instructions, and nothing is said about speed"
    )
    if note not in notes:
        notes.append(note)
    return EmulatedModel(library, options.threads, dims=sizes)
