"""The compilations of one library: one for each variant, that is for each choice of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtco.driver.assembly import Part, assemble_variants
from gtco.driver.checks import is_onnx, is_program
from gtco.driver.compilation import Compilation, Progress, identifier
from gtco.driver.compiled import CompileReport
from gtco.driver.shared import Shared
from gtco.machine.target import Target
from gtco.runtime.artifact import build_artifact
from gtco.support.options import CompileOptions
from gtco.support.sizes import choices, fixed, said

OF_ALL = ("calibrate", "tune")  # phases that go over all variants


class Library:
    """A model and its options, as a compilation for each variant; most models have one."""

    def __init__(
        self,
        model: Any,
        output: Path,
        example_inputs: Any,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        self.output = output.absolute()
        self.fetched: CompileReport | None = None  # of a library from the cache
        # A module is exported for each of its shapes; other models are read once.
        self.one_source = is_onnx(model) or is_program(model)
        self.sizes = choices(options.dims)
        shared = Shared() if len(self.sizes) > 1 else None
        self.compilations = [
            _compilation(model, self.output, example_inputs, options, progress, sizes, shared)
            for sizes in self.sizes
        ]

    def digests(self) -> list[str] | None:
        """The digests of the model in each of its shapes. None if a model has none."""
        from gtco.frontend.digest import digest_of

        found = [digest_of(c.opened()) for c in self.compilations[: 1 if self.one_source else None]]
        return None if None in found else [*map(str, found)]

    def verify_fetched(self, folder: Path) -> None:
        """Compares the library in ``folder``, from the cache, where that is asked for."""
        report = self.fetched
        assert report is not None
        first = self.compilations[0]
        report.phases = first.report.phases
        report.notes = [*report.notes, *(n for n in first.report.notes if n not in report.notes)]
        for run, sizes in zip(self.compilations, self.sizes, strict=True):
            run.verify(folder / self.output.name, sizes or None)
        reports = [*report.variants.values()] or [report]
        for run, one in zip(self.compilations, reports, strict=True):
            one.verification = run.report.verification
            run.close()

    @property
    def accidents(self) -> bool:
        """True if something went wrong that another compile may do better."""
        return any(compilation.accidents for compilation in self.compilations)

    def report(self) -> CompileReport:
        """What the compile did; that of several variants has the report of each."""
        if self.fetched is not None:
            return self.fetched
        if len(self.compilations) == 1:
            return self.compilations[0].report
        first = self.compilations[0].report
        reports = [c.report for c in self.compilations]
        phases = list(first.phases)
        for report in reports[1:]:
            phases += [(name, seconds) for name, seconds in report.phases if name not in OF_ALL]
        return replace(
            first,
            phases=phases,
            stages=[],
            notes=self._notes(reports),
            predicted_seconds=0.0,
            tuning=[stage for report in reports for stage in report.tuning],
            verification=None,
            fusion="",
            settled=None,
            variants={said(sizes): r for sizes, r in zip(self.sizes, reports, strict=True)},
        )

    def _notes(self, reports: Sequence[CompileReport]) -> list[str]:
        """The notes of all variants; a note that not all have says whose it is."""
        found: dict[str, list[str]] = {}
        for sizes, report in zip(self.sizes, reports, strict=True):
            for note in report.notes:
                found.setdefault(note, []).append(said(sizes))
        return [
            note if len(whose) == len(reports) else f"{'; '.join(whose)}: {note}"
            for note, whose in found.items()
        ]

    def finish(self, folder: Path) -> None:
        """The library, made in ``folder`` and compared where that is asked for."""
        if len(self.compilations) == 1:
            self.compilations[0].finish(folder)
            return
        first = self.compilations[0]
        with first.phase("link") as say:
            library = self._link(folder)
            say(f"{len(self.sizes)} variants, {first.memory()}")
        for run, sizes in zip(self.compilations, self.sizes, strict=True):
            run.verify(library, sizes)

    def _link(self, folder: Path) -> Path:
        first, shared = self.compilations[0], self.compilations[0].shared
        machine = first.policy.target
        assert shared is not None and isinstance(machine, Target)  # GPUs have one variant
        for run in self.compilations:
            shared.unite(run.graph)
        parts = [
            Part(sizes, run.graph, run.generated)
            for sizes, run in zip(self.sizes, self.compilations, strict=True)
        ]
        for run in self.compilations:
            run.release()
        shared.forget()
        artifact = assemble_variants(
            identifier(self.output.stem),
            parts,
            machine,
            first.options.threads,
            first.options.precision,
            self._notes([run.report for run in self.compilations]),
            first.identity,
        )
        for run, variant in zip(self.compilations, artifact.variants, strict=True):
            run.tell(variant.steps, artifact)
        return build_artifact(artifact, folder, self.output)


def _compilation(
    model: Any,
    output: Path,
    example_inputs: Any,
    options: CompileOptions,
    progress: Progress,
    sizes: Mapping[str, int],
    shared: Shared | None,
) -> Compilation:
    """The compilation of one variant: its sizes are fixed as those of ``shapes`` are."""
    given = {**fixed(options.dims), **sizes}
    # a module has only the shapes of its example inputs, and no dimensions that have names
    if given and not is_onnx(model) and not is_program(model):
        from gtco.frontend.examples import resized

        example_inputs = resized(model, example_inputs, given)
        given = {}
    own = replace(options, shapes={**options.shapes, **given}, dims={})
    if shared is None:
        return Compilation(model, output, example_inputs, own, progress)
    label = said(sizes)
    if own.dump is not None:
        own = replace(own, dump=own.dump / label.replace(", ", ",").replace("/", "_"))

    def labelled(phase: str, seconds: float | None, detail: Any) -> None:
        if phase not in OF_ALL and isinstance(detail, str):
            detail = f"{label}: {detail}" if detail else label
        progress(phase, seconds, detail)

    return Compilation(model, output, example_inputs, own, labelled, shared)
