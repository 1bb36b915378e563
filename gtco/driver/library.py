"""The compilations of one library: one for each variant, that is for each choice of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gtco.codegen.workers import Workers
from gtco.driver.checks import at_sizes, check_dump
from gtco.driver.compilation import Compilation, Progress, compilation_at
from gtco.driver.compiled import CompileReport, notes_of_all, of_all
from gtco.driver.linking.finishing import finish, identifier, memory, tell, verify, verify_layers
from gtco.driver.phases import Built, Fused, Lowered
from gtco.driver.sizes import batches, parts
from gtco.driver.sizes.many import FEW, Many, scale_of
from gtco.driver.sizes.plan import Plan, Sizes
from gtco.driver.sizes.proofs import Proofs
from gtco.driver.sizes.shared import Shared
from gtco.driver.sizes.variants import Part, Ranged, assemble_variants
from gtco.driver.sizes.ways import Dims, notes, refusal, ways
from gtco.frontend.source import is_onnx, is_program
from gtco.machine.target import Machine, Target, target
from gtco.runtime.library import read_metadata
from gtco.runtime.ranges import Covered
from gtco.runtime.writing.linking import build_artifact
from gtco.search.records.records import Record, Records
from gtco.support.counting import counted
from gtco.support.options import CompileOptions
from gtco.support.sizes import evenly_spread, sizes_text, stepped_ranges

MOST_VERIFIED = 16  # variants of a library that --verify compares


class Library:
    """A model and its options, as a compilation for each variant of its :class:`Plan`. Whether a
    range can be made in parts is known when the model is read; until then the plan is that of the
    first of the ways (:mod:`gtco.driver.sizes.ways`).
    """

    def __init__(
        self,
        model: Any,
        output: Path,
        example_inputs: Any,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        self.output, self._progress = output.absolute(), progress
        self.fetched: CompileReport | None = None  # the report of a library from the cache
        # A module is exported for each of its shapes; other models are read once.
        self.one_source = is_onnx(model) or is_program(model)
        self.axes: Mapping[str, int | None] = {}  # where tensors have samples, with a range
        self._options, self._shared = options, Shared()
        self._of = partial(compilation_at, model, self.output, example_inputs, options, progress)
        self._ways = ways(options.dims)
        self._reasons: dict[str, str] = {}  # why a range is not made in parts
        self.plan, self.compilations = self._planned(self._ways[0])

    def _planned(self, way: Dims) -> tuple[Plan, list[Compilation]]:
        """The plan of this way to read the sizes, and a compilation for each of its variants."""
        plan = Plan.of(way, _cores(self._options))
        return plan, [self._at(plan, sizes) for sizes in plan.sizes]

    def _at(self, plan: Plan, sizes: Sizes) -> Compilation:
        """A compilation at these sizes, which need not be those of a variant."""
        shared = self._shared if plan.several else None
        return self._of(plan.places(sizes), shared, sizes_text(sizes))

    def prepare(
        self,
        machine: Machine,
        records: Records | None,
        workers: Workers,
        shipped: Sequence[Record] = (),
    ) -> dict[Compilation, Built]:
        """The steps from the model to the kernels, for each variant. ``shipped``: the records that
        come with gtco, if they count.
        """
        from gtco.frontend import simplify

        with simplify.one_process() if self.plan.several else nullcontext():
            built = self._prepare(machine, records, workers, shipped)
        said_first = notes(self.plan.dims, self._reasons)
        if self.plan.several and self._options.launches == "auto":
            said_first.append(
                "each shape is launched as a graph (launches=auto): one kernel for the whole model "
                "would have the steps of one shape"
            )
        for run in self.compilations:
            run.report.notes[:0] = said_first
        return built

    def _prepare(
        self,
        machine: Machine,
        records: Records | None,
        workers: Workers,
        shipped: Sequence[Record],
    ) -> dict[Compilation, Built]:
        lowered = self._proven(machine)
        plan = self.plan
        if len(plan.sizes) > FEW and isinstance(machine, Target):
            # many of which share what is made for them
            many = Many(plan, self.compilations, self._progress, machine)
            self._keep(many.fuse(lowered, records, shipped, workers))
            return many.generate(self.compilations, workers)
        if plan.range is not None:
            return self._parts(lowered, machine, records, workers, shipped)
        built = {
            number: self._prepared(number, lowered, machine, records, workers, shipped)
            for number in self._smallest_first()
        }
        return {run: built[number] for number, run in enumerate(self.compilations)}

    def _smallest_first(self) -> list[int]:
        """The numbers of the variants in the order in which their kernels are made."""
        sizes = self.plan.sizes
        return sorted(range(len(sizes)), key=lambda number: scale_of(sizes[number]))

    def _parts(
        self,
        lowered: dict[Compilation, Lowered],
        machine: Machine,
        records: Records | None,
        workers: Workers,
        shipped: Sequence[Record],
    ) -> dict[Compilation, Built]:
        """The same steps for a few parts of a range, of which some are left out."""
        plan, runs = self.plan, self.compilations
        fused: dict[int, Fused] = {}
        kept: list[int] = []
        for _, own in plan.choices():
            for number in own:
                simple = runs[number].simplify(lowered.pop(runs[number]), machine)
                fused[number] = runs[number].fuse(simple, machine, records, shipped)
                del simple
            kept += plan.cheapest({number: fused[number].predicted() for number in own})
        by_size = [number for number in self._smallest_first() if number in kept]
        built = {runs[n]: runs[n].generate(fused.pop(n), workers) for n in by_size}
        self._keep(kept)
        return {run: built[run] for run in self.compilations}

    def _prepared(
        self,
        number: int,
        lowered: dict[Compilation, Lowered],
        machine: Machine,
        records: Records | None,
        workers: Workers,
        shipped: Sequence[Record],
    ) -> Built:
        """The same steps for one size. A part of its batch may take the place of its compilation.
        """
        run = self.compilations[number]
        with at_sizes(self.plan.sizes[number] if self.plan.several else {}):
            read = lowered.pop(run, None) or run.read(machine)
        samples = batches.samples_of(read.graph, machine)
        if samples is not None:  # so that parts have tensors of the same names
            read = replace(read, graph=samples.graph)
        simple = run.simplify(read, machine)
        del read
        fused = run.fuse(simple, machine, records, shipped)
        del simple
        if samples is not None:
            with run.phase("batch") as say:
                run, fused, gain = batches.cheapest_part(run, fused, samples)
                say(gain)
            del samples
        self.compilations[number] = run
        return run.generate(fused, workers)

    def _leave_for(
        self, way: Dims, lowered: Mapping[Compilation, Lowered]
    ) -> dict[Compilation, Lowered]:
        """Takes another way. A model that was lowered for the one before stays where the new one
        has its sizes, and what else that one took is still reported. Gives what of ``lowered``
        stays.
        """
        every = zip(self.plan.sizes, self.compilations, strict=True)
        old = {sizes_text(sizes): run for sizes, run in every}
        self.plan, runs = self._planned(way)
        for number, (sizes, run) in enumerate(zip(self.plan.sizes, runs, strict=True)):
            known = old.get(sizes_text(sizes), run)
            if known in lowered and known.options == run.options:
                runs[number] = old.pop(sizes_text(sizes))
        self.compilations = runs
        for run in runs:
            check_dump(run.options.dump)
        for run in old.values():
            runs[0].report.phases += run.report.phases
        return {run: lowered[run] for run in runs if run in lowered}

    def _proven(self, machine: Machine) -> dict[Compilation, Lowered]:
        """Takes the first of the ways that the model allows. Gives what was lowered for that."""
        lowered: dict[Compilation, Lowered] = {}
        for way, after in itertools.zip_longest(self._ways, self._ways[1:]):
            try:
                self._prove(machine, lowered)
                break
            except parts.Inseparable as reason:
                assert self.plan.range is not None
                self._reasons[self.plan.range[0]] = str(reason)
                if after is None:
                    raise refusal(self._options.dims, way, reason) from None
                lowered = self._leave_for(after, lowered)
        return lowered

    def _prove(self, machine: Machine, lowered: dict[Compilation, Lowered]) -> None:
        """Lowers the parts of a range, and proves that the model can be run in them. Raises
        :class:`parts.Inseparable`.
        """
        plan = self.plan
        if plan.range is None:
            return
        at = partial(self._at, plan)
        proofs = Proofs(plan.symbol, plan.range[1], machine, at, self.one_source, lowered)
        proofs.ask(
            [
                (others, {plan.samples(n): self.compilations[n] for n in numbers})
                for others, numbers in plan.choices()
            ]
        )
        self.axes = proofs.axes

    def _keep(self, numbers: Sequence[int]) -> None:
        """Leaves out the compilations of all other parts; what they took is still reported."""
        left = [self.compilations[number] for number in numbers]
        for number, run in enumerate(self.compilations):
            if number not in numbers:
                left[0].report.phases += run.report.phases
        self.plan, self.compilations = self.plan.only(numbers), left

    def _verified(self) -> list[tuple[Compilation, Sizes | None]]:
        """The variants that are compared, and the sizes of each. With a range these are the parts
        and, instead of the largest, a sum of all. Of many variants some are compared, the smallest
        and the largest among them; a note names them.
        """
        if self.plan.range is not None:
            return list(zip(self.compilations, self.plan.sums(), strict=True))
        sizes = self.plan.sizes
        some = evenly_spread(sizes, MOST_VERIFIED)
        first = self.compilations[0]
        if len(some) < len(sizes) and first.options.verify:
            names = "; ".join(sizes_text(sizes[number]) for number in some)
            note = f"{len(some)} of {len(sizes)} sizes were compared: {names}"
            for run in self.compilations:  # all of them get the note, so that it names none
                if note not in run.report.notes:
                    run.report.notes.append(note)
        return [(self.compilations[number], sizes[number] or None) for number in some]

    def digests(self) -> list[str] | None:
        """The digests of the model in each of its shapes. None if a model has none."""
        from gtco.frontend.digest import digest_of

        found = []
        for number, run in enumerate(self.compilations[: 1 if self.one_source else None]):
            with at_sizes({} if self.one_source else self.plan.sizes[number]):
                found.append(digest_of(run.source.opened(run.options)))
        return None if None in found else [*map(str, found)]

    def verify_fetched(self, folder: Path) -> None:
        """Compares the library in ``folder``, from the cache, where that is asked for."""
        report = self.fetched
        assert report is not None
        found = Covered.of(read_metadata(folder / self.output.name))
        for way in self._ways[1:]:
            if self.plan.symbol == (found.symbol if found else ""):
                break
            self._leave_for(way, {})
        if self.plan.range is not None:
            known = [sizes_text(one) in report.variants for one in self.plan.sizes]
            self._keep([number for number, there in enumerate(known) if there])
        first = self.compilations[0]
        report.phases = first.report.phases
        report.notes = [*report.notes, *(n for n in first.report.notes if n not in report.notes)]
        for run, sizes in self._verified():
            verify(run, folder / self.output.name, sizes)
        reports = [*report.variants.values()] or [report]
        for run, one in zip(self.compilations, reports, strict=True):
            one.verification = run.report.verification
            run.source.close()

    @property
    def accidents(self) -> bool:
        """True if something went wrong that another compile may do better."""
        return any(compilation.accidents for compilation in self.compilations)

    def report(self) -> CompileReport:
        """What the compile did; that of several variants has the report of each."""
        if self.fetched is not None:
            return self.fetched
        return of_all(self._reports()) if self.plan.several else self.compilations[0].report

    def _reports(self) -> dict[str, CompileReport]:
        """The report of each variant, by its sizes."""
        variants = zip(self.plan.sizes, self.compilations, strict=True)
        return {sizes_text(sizes): run.report for sizes, run in variants}

    def finish(self, made: dict[Compilation, Built], folder: Path) -> None:
        """The library, made in ``folder`` and compared where that is asked for. Takes its own out
        of ``made``.
        """
        built = [made.pop(run) for run in self.compilations]
        if not self.plan.several:
            finish(self.compilations[0], built.pop(), folder)
            return
        first = self.compilations[0]
        # linking takes the constants out of the graphs
        kept = [
            (run, one.with_graph(one.model.graph.copy()))
            for run, one in zip(self.compilations, built, strict=True)
            if run.options.verify_layers
        ]
        # the link is of all sizes
        with first.told(self._progress), first.phase("link") as say:
            library = self._link(built, folder)
            say(f"{counted(len(self.plan.sizes), 'variant')}, {memory(first.report)}")
        for run, sizes in self._verified():
            verify(run, library, sizes)
        for run, one in kept:
            verify_layers(run, one)

    def _link(self, built: list[Built], folder: Path) -> Path:
        """The library of all variants. Lets go of ``built``, whose constants take memory."""
        plan, first, whole = self.plan, self.compilations[0], built[0].whole
        target, facts = whole.policy.target, whole.facts
        for one in built:
            self._shared.unite(one.model.graph)
        made = [
            Part(sizes, one.model.graph, one.generated, one.whole.batch)
            for sizes, one in zip(plan.sizes, built, strict=True)
        ]
        del whole, one
        built.clear()
        self._shared.forget()
        artifact = assemble_variants(
            identifier(self.output.stem),
            made,
            target,
            first.options.threads,
            facts.precision,
            notes_of_all(self._reports()),
            facts.identity,
            Ranged(plan.symbol, plan.range[1], self.axes) if plan.range else None,
            stepped_ranges(plan.dims),
        )
        for run, part, variant in zip(self.compilations, made, artifact.variants, strict=True):
            tell(run.report, variant.steps, artifact, part.generated)
        return build_artifact(artifact, folder, self.output)


def _cores(options: CompileOptions) -> int:
    """The cores that a run has. A GPU is as wide as a CPU of many."""
    machine = target(options.target)
    return options.threads or (machine.cores if isinstance(machine, Target) else parts.MANY_CORES)
