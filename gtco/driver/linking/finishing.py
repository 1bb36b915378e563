"""The steps from the kernels of one model at one size to its library: linking, and comparing where
that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.codegen.generate import Generated
from gtco.driver.compilation import Compilation
from gtco.driver.compiled import CompileReport
from gtco.driver.linking.assembly import assemble, in_parts
from gtco.driver.linking.verifying import model_compared, opened_library, stages_compared
from gtco.driver.phases import Built
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu.plan import GpuArtifact, GpuStep
from gtco.runtime.plan import Step
from gtco.runtime.writing.linking import build_artifact

if TYPE_CHECKING:
    from gtco.driver.linking.launching import Launching


def finish(run: Compilation, built: Built, folder: Path) -> None:
    """The library, made in ``folder`` and compared where that is asked for."""
    # linking takes the constants out of the graph
    kept = built.with_graph(built.model.graph.copy()) if run.options.verify_layers else None
    with run.phase("link") as say:
        library = _link(run, built, folder)
        say(memory(run.report))
    verify(run, library)
    if kept is not None:
        verify_layers(run, kept)


def artifact(run: Compilation, name: str, built: Built) -> Artifact | GpuArtifact:
    """The artifact of the model. It takes the constants out of the graph."""
    found, facts = built.launching, built.whole.facts
    return assemble(
        name,
        built.model.graph,
        built.generated,
        built.policy.target,
        run.options.threads,
        facts.precision,
        run.report.notes,
        found.persistent if found else None,
        found.prices.to_json() if found else None,
        found.spilled if found else {},
        facts.identity,
    )


def _link(run: Compilation, built: Built, folder: Path) -> Path:
    """Kernels, weights and the plan -> the library, in ``folder``."""
    made = artifact(run, identifier(run.output.stem), built)
    if isinstance(made, Artifact):
        made = in_parts(made, built.whole.batch)
    tell(run.report, made.steps, made, built.generated, built.launching)
    return build_artifact(made, folder, run.output)


def tell(
    report: CompileReport,
    steps: Sequence[Step | GpuStep],
    artifact: Artifact | GpuArtifact,
    generated: Generated,
    launching: Launching | None = None,
) -> None:
    """Puts into the report what the artifact has, and what its ``steps`` do for this model."""
    report.rejections = dict(generated.rejections)
    report.stages = [dict(step.info) for step in steps]
    report.predicted_seconds = sum(s["predicted_seconds"] for s in report.stages)
    if launching is not None and launching.one_kernel:
        report.predicted_seconds = launching.prices.persistent
        report.launches = "persistent"
    report.weights_bytes = artifact.weights_bytes
    report.arena_bytes = artifact.arena_bytes


def memory(report: CompileReport) -> str:
    """The library's memory, in words."""
    weights, arena = report.weights_bytes / 1e6, report.arena_bytes / 1e6
    return f"weights {weights:.1f} MB, arena {arena:.1f} MB"


def verify(run: Compilation, library: Path, sizes: Mapping[str, int] | None = None) -> None:
    """Compares the library, or its variant of these sizes, with the reference where that is asked
    for. Raises :class:`VerificationError` with the report if it is wrong.
    """
    if not run.options.verify:
        return
    with run.phase("verify") as say:
        opened = partial(_opened, run, sizes=sizes)
        run.report.verification = found = model_compared(run.source, library, opened)
        found.check()
        say(str(found).splitlines()[0])


def verify_layers(run: Compilation, built: Built) -> None:
    """Compares the output of every stage with the graph in float32, through a library of the same
    kernels that gives them all. The graph of ``built`` needs its constants.
    """
    plain = built.whole.plain
    assert plain is not None
    with run.phase("layers") as say:
        run.report.losses = stages_compared(
            built.model.graph,
            plain,
            built.generated.stages,
            lambda more: artifact(run, "layers", built.with_graph(more)),
            partial(_opened, run),
        )
        say(str(run.report.losses))


def _opened(run: Compilation, library: Path, sizes: Mapping[str, int] | None = None) -> Any:
    """The library, or its variant of these sizes, to be run."""
    return opened_library(library, run.options, run.report.notes, sizes)


def identifier(stem: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in stem) or "model"
