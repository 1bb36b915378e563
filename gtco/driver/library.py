"""The compilations of one library: one for each variant, that is for each choice of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.codegen.workers import Workers
from gtco.driver import parts
from gtco.driver.assembly import Part, Ranged, assemble_variants
from gtco.driver.checks import is_onnx, is_program
from gtco.driver.compilation import Compilation, Progress, identifier
from gtco.driver.compiled import CompileReport
from gtco.driver.shared import Shared
from gtco.machine.target import Machine, Target, target
from gtco.runtime.artifact import build_artifact
from gtco.search.records.records import Records
from gtco.support.errors import ShapeError
from gtco.support.options import CompileOptions
from gtco.support.sizes import apart, choices, fixed, names_of, range_of, said

if TYPE_CHECKING:
    from gtco.graph.graph import Graph

OF_ALL = ("calibrate", "tune")  # phases that go over all variants


class Library:
    """A model and its options, as a compilation for each variant; most models have one. With a
    range the variants are parts of a batch (:mod:`gtco.driver.parts`), those of one choice of the
    other sizes behind each other.
    """

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
        self.range = range_of(options.dims)
        self.axes: Mapping[str, int | None] = {}  # where tensors have samples, with a range
        self.sizes: list[dict[str, int]] = choices(options.dims)
        if self.range is not None:
            key, given = self.range
            parts.check_plans(key, given, len(self.sizes))
            tried = parts.candidates(given, _cores(options))
            self.sizes = [{self.symbol: n, **others} for others in self.sizes for n in tried]
        self._several = len(self.sizes) > 1 or self.range is not None
        shared = Shared(compared=self.range is not None) if self._several else None

        def at(sizes: Mapping[str, int]) -> Compilation:
            places = self._by_place(sizes)
            label = said(sizes)
            return _compilation(
                model, self.output, example_inputs, options, progress, places, shared, label
            )

        self._at = at
        self.compilations = list(map(at, self.sizes))

    @property
    def symbol(self) -> str:
        """The name of the dimension with a range."""
        assert self.range is not None
        key, sizes = self.range
        return sizes.symbol or names_of(key)[0]

    def _by_place(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes as the model's dimensions are named."""
        if self.range is None:
            return sizes
        others = {name: size for name, size in sizes.items() if name != self.symbol}
        return {**dict.fromkeys(names_of(self.range[0]), sizes[self.symbol]), **others}

    def prepare(self, machine: Machine, records: Records | None, workers: Workers) -> None:
        """The steps from the model to the kernels, for each variant."""
        if self.range is None:
            for run in self.compilations:
                run.prepare(machine, records, workers)
            return
        kept: list[int] = []
        for others, numbers in apart(self.sizes, self.symbol):
            for number in numbers:
                self.compilations[number].partition(machine, records)
            self._prove(others, numbers, machine)
            runs = [self.compilations[number] for number in numbers]
            prices = {
                self._samples(number): sum(map(run.policy.predict, run.found.stages))
                for number, run in zip(numbers, runs, strict=True)
            }
            chosen = parts.kept(self.range[1], prices)
            kept += [number for number in numbers if self._samples(number) in chosen]
        self._keep(kept)
        for run in self.compilations:
            run.build(workers)

    def _samples(self, number: int) -> int:
        """The samples of a part."""
        return self.sizes[number][self.symbol]

    def _prove(self, others: Mapping[str, int], numbers: Sequence[int], machine: Machine) -> None:
        """Raises :class:`ShapeError` if the model cannot be run in these parts, which have the same
        other sizes. Sets ``axes``.
        """
        assert self.range is not None
        graphs: dict[int, Graph] = {}
        for number in numbers:
            run = self.compilations[number]
            assert run.lowered is not None
            graphs[self._samples(number)], run.lowered = run.lowered, None
        key, sizes = self.range
        for more in parts.proof_sizes(sizes, sorted(graphs)):
            graphs[more] = self._at({self.symbol: more, **others}).only_lowered(machine)
        axes = parts.proven(self.symbol, f"{key}={sizes}", graphs)
        if self.axes and axes != self.axes:
            raise ShapeError(
                f"--dim {key}={sizes}: the samples along '{self.symbol}' are on other axes of the "
                f"outputs at {said(others)} than at {said(self.sizes[0])}. Compile a library for "
                "each of these sizes"
            )
        self.axes = axes

    def _keep(self, numbers: Sequence[int]) -> None:
        """Leaves out the compilations of all other parts; what they took is still reported."""
        left = [self.compilations[number] for number in numbers]
        for number, run in enumerate(self.compilations):
            if number not in numbers:
                left[0].report.phases += run.report.phases
        self.sizes, self.compilations = [self.sizes[number] for number in numbers], left

    def _verified(self) -> list[Mapping[str, int] | None]:
        """The sizes at which each variant is compared. With a range they are sums of parts."""
        if self.range is None:
            return [one or None for one in self.sizes]
        every = [*self.range[1]]
        found: list[Mapping[str, int] | None] = []
        for others, numbers in apart(self.sizes, self.symbol):
            own = [self._samples(number) for number in numbers]
            wanted = [sum(own[: n + 1]) for n in range(len(own))] if len(own) > 1 else [3 * own[0]]
            for least in wanted:
                size = next((n for n in every if n >= least), every[-1])
                found.append({self.symbol: size, **others})
        return found

    def digests(self) -> list[str] | None:
        """The digests of the model in each of its shapes. None if a model has none."""
        from gtco.frontend.digest import digest_of

        found = [digest_of(c.opened()) for c in self.compilations[: 1 if self.one_source else None]]
        return None if None in found else [*map(str, found)]

    def verify_fetched(self, folder: Path) -> None:
        """Compares the library in ``folder``, from the cache, where that is asked for."""
        report = self.fetched
        assert report is not None
        if self.range is not None:
            self._keep([n for n, one in enumerate(self.sizes) if said(one) in report.variants])
        first = self.compilations[0]
        report.phases = first.report.phases
        report.notes = [*report.notes, *(n for n in first.report.notes if n not in report.notes)]
        for run, sizes in zip(self.compilations, self._verified(), strict=True):
            run.verify(folder / self.output.name, sizes)
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
        if not self._several:
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
            losses=None,
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
        if not self._several:
            self.compilations[0].finish(folder)
            return
        first = self.compilations[0]
        # linking takes the constants out of the graphs
        kept = [(run, run.graph.copy()) for run in self.compilations if run.options.verify_layers]
        with first.phase("link") as say:
            library = self._link(folder)
            say(f"{len(self.sizes)} variants, {first.memory()}")
        for run, sizes in zip(self.compilations, self._verified(), strict=True):
            run.verify(library, sizes)
        for run, graph in kept:
            run.verify_layers(graph)

    def _link(self, folder: Path) -> Path:
        first, shared = self.compilations[0], self.compilations[0].shared
        machine = first.policy.target
        assert shared is not None and isinstance(machine, Target)  # GPUs have one variant
        for run in self.compilations:
            shared.unite(run.graph)
        made = [
            Part(sizes, run.graph, run.generated)
            for sizes, run in zip(self.sizes, self.compilations, strict=True)
        ]
        for run in self.compilations:
            run.release()
        shared.forget()
        artifact = assemble_variants(
            identifier(self.output.stem),
            made,
            machine,
            first.options.threads,
            first.options.precision,
            self._notes([run.report for run in self.compilations]),
            first.identity,
            Ranged(self.symbol, self.range[1], self.axes) if self.range else None,
        )
        for run, variant in zip(self.compilations, artifact.variants, strict=True):
            run.tell(variant.steps, artifact)
        return build_artifact(artifact, folder, self.output)


def _cores(options: CompileOptions) -> int:
    """The cores that a run has."""
    machine = target(options.target)
    return options.threads or (machine.cores if isinstance(machine, Target) else 1)


def _compilation(
    model: Any,
    output: Path,
    example_inputs: Any,
    options: CompileOptions,
    progress: Progress,
    sizes: Mapping[str, int],
    shared: Shared | None,
    label: str,
) -> Compilation:
    """The compilation of one variant: its sizes are fixed as those of ``shapes`` are. ``label``
    says which it is.
    """
    given = {**fixed(options.dims), **sizes}
    # a module has only the shapes of its example inputs, and no dimensions that have names
    if given and not is_onnx(model) and not is_program(model):
        from gtco.frontend.examples import resized

        example_inputs = resized(model, example_inputs, given)
        given = {}
    own = replace(options, shapes={**options.shapes, **given}, dims={})
    if shared is None:
        return Compilation(model, output, example_inputs, own, progress)
    if own.dump is not None:
        own = replace(own, dump=own.dump / label.replace(", ", ",").replace("/", "_"))

    def labelled(phase: str, seconds: float | None, detail: Any) -> None:
        if phase not in OF_ALL and isinstance(detail, str):
            detail = f"{label}: {detail}" if detail else label
        progress(phase, seconds, detail)

    return Compilation(model, output, example_inputs, own, labelled, shared)
