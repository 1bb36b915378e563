"""The compilations of one library: one for each variant, that is for each choice of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtco.codegen.workers import Workers
from gtco.driver.checks import at_sizes, check_dump, is_onnx, is_program
from gtco.driver.compilation import Compilation, Progress, compilation_at
from gtco.driver.compiled import CompileReport, notes_of_all, of_all
from gtco.driver.linking.finishing import finish, identifier, memory, tell, verify, verify_layers
from gtco.driver.phases import Built, Fused, Lowered
from gtco.driver.sizes import batches, parts
from gtco.driver.sizes.many import FEW, Many, scale_of
from gtco.driver.sizes.proofs import Proofs
from gtco.driver.sizes.shared import Shared
from gtco.driver.sizes.variants import Part, Ranged, assemble_variants
from gtco.driver.sizes.ways import Dims, notes, refusal, ways
from gtco.machine.target import Machine, Target, target
from gtco.runtime.library import read_metadata
from gtco.runtime.ranges import Covered
from gtco.runtime.writing.linking import build_artifact
from gtco.search.records.records import Record, Records
from gtco.support.options import CompileOptions
from gtco.support.sizes import (
    by_other_sizes,
    evenly_spread,
    fixed_sizes,
    names_of,
    names_of_dimensions,
    range_of,
    sizes_of_variants,
    sizes_text,
    stepped_ranges,
)

MOST_VERIFIED = 16  # variants of a library that --verify compares


class Library:
    """A model and its options, as a compilation for each variant; most models have one. With a
    range that is made in parts (:mod:`gtco.driver.sizes.parts`) the variants are these, those of
    one choice of the other sizes behind each other. Whether a range can be made so is known when
    the model is read; until then the compilations are those of the first of the ways
    (:mod:`gtco.driver.sizes.ways`).
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
        self.fetched: CompileReport | None = None  # of a library from the cache
        # A module is exported for each of its shapes; other models are read once.
        self.one_source = is_onnx(model) or is_program(model)
        self._given, self._launches = options.dims, options.launches
        self._ways = ways(options.dims)
        self._reasons: dict[str, str] = {}  # why a range is not made in parts
        self._cores = _cores(options)
        shared = Shared()

        def at(sizes: Mapping[str, int]) -> Compilation:
            places = {**fixed_sizes(self._way), **self._by_place(sizes)}
            own = shared if self._several else None
            label = sizes_text(sizes)
            return compilation_at(
                model, self.output, example_inputs, options, progress, places, own, label
            )

        self._at = at
        self.compilations: list[Compilation] = []
        self._take(self._ways[0])

    def _take(self, way: Dims) -> None:
        """Makes the compilations of this way to read the sizes."""
        self._way = way
        self.range = range_of(way)
        self.axes: Mapping[str, int | None] = {}  # where tensors have samples, with a range
        self.sizes: list[dict[str, int]] = sizes_of_variants(way)
        if self.range is not None:
            tried = parts.candidates(self.range[1], self._cores, len(self.sizes))
            self.sizes = [{self.symbol: n, **others} for others in self.sizes for n in tried]
        self._several = len(self.sizes) > 1 or self.range is not None
        self.compilations = [self._at(sizes) for sizes in self.sizes]

    @property
    def symbol(self) -> str:
        """The name of the dimension with a range that is made in parts."""
        assert self.range is not None
        key, sizes = self.range
        return sizes.symbol or names_of(key)[0]

    def _by_place(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes as the model's dimensions are named."""
        places = names_of_dimensions(self._way)
        return {place: size for name, size in sizes.items() for place in places[name]}

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

        with simplify.one_process() if self._several else nullcontext():
            built = self._prepare(machine, records, workers, shipped)
        said_first = notes(self._way, self._reasons)
        if self._several and self._launches == "auto":
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
        if len(self.sizes) > FEW and isinstance(machine, Target):
            # many of which share what is made for them
            symbol = self.symbol if self.range else ""
            runs, kept_of, sure = self.compilations, self._kept, self._sure
            many = Many(self.sizes, runs, symbol, kept_of, sure, self._progress, machine)
            self._keep(many.cut(lowered, records, shipped, workers))
            return many.generate(self.compilations, workers)
        order = sorted(range(len(self.sizes)), key=lambda number: scale_of(self.sizes[number]))
        if self.range is None:
            built = {
                number: self._prepared(number, lowered, machine, records, workers, shipped)
                for number in order
            }
            return {run: built[number] for number, run in enumerate(self.compilations)}
        fused: dict[Compilation, Fused] = {}
        kept: list[int] = []
        for _, own in by_other_sizes(self.sizes, self.symbol):
            for run in (self.compilations[number] for number in own):
                simple = run.simplify(lowered.pop(run), machine)
                fused[run] = run.cut(simple, machine, records, shipped)
                del simple
            kept += self._kept(own, fused)
        by_size = [self.compilations[number] for number in order if number in kept]
        self._keep(kept)
        found = {run: run.build(fused.pop(run), workers) for run in by_size}
        return {run: found[run] for run in self.compilations}

    def _prepared(
        self,
        number: int,
        lowered: dict[Compilation, Lowered],
        machine: Machine,
        records: Records | None,
        workers: Workers,
        shipped: Sequence[Record],
    ) -> Built:
        """The same steps for one shape. A part of its batch may take the place of its compilation.
        """
        run = self.compilations[number]
        with at_sizes(self.sizes[number] if self._several else {}):
            read = lowered.pop(run, None) or run.lower(machine)
        samples = batches.samples_of(read.graph, machine)
        if samples is not None:  # so that parts have tensors of the same names
            read = replace(read, graph=samples.graph)
        simple = run.simplify(read, machine)
        del read
        fused = run.cut(simple, machine, records, shipped)
        del simple
        if samples is not None:
            with run.phase("batch") as say:
                run, fused, gain = batches.cheapest_part(run, fused, samples)
                say(gain)
            del samples
        self.compilations[number] = run
        return run.build(fused, workers)

    def _kept(self, numbers: Sequence[int], fused: Mapping[Compilation, Fused]) -> list[int]:
        """Those of the parts at one choice of the other sizes that the library gets."""
        assert self.range is not None
        prices = {self._samples(n): fused[self.compilations[n]].predicted() for n in numbers}
        chosen = parts.kept(self.range[1], prices)
        return [number for number in numbers if self._samples(number) in chosen]

    def _sure(self, number: int) -> bool:
        """True for a part that the library gets whatever the others cost, the smallest of a range.
        """
        if self.range is None:
            return False
        return self._samples(number) == min(map(self._samples, range(len(self.sizes))))

    def _leave_for(
        self, way: Dims, lowered: Mapping[Compilation, Lowered]
    ) -> dict[Compilation, Lowered]:
        """Takes another way. A model that was lowered for the one before stays where the new one
        has its sizes, and what else that one took is still reported. Gives what of ``lowered``
        stays.
        """
        every = zip(self.sizes, self.compilations, strict=True)
        old = {sizes_text(sizes): run for sizes, run in every}
        self._take(way)
        for number, (sizes, run) in enumerate(zip(self.sizes, self.compilations, strict=True)):
            known = old.get(sizes_text(sizes), run)
            if known in lowered and known.options == run.options:
                self.compilations[number] = old.pop(sizes_text(sizes))
        for run in self.compilations:
            check_dump(run.options.dump)
        for run in old.values():
            self.compilations[0].report.phases += run.report.phases
        return {run: lowered[run] for run in self.compilations if run in lowered}

    def _proven(self, machine: Machine) -> dict[Compilation, Lowered]:
        """Takes the first of the ways that the model allows. Gives what was lowered for that."""
        lowered: dict[Compilation, Lowered] = {}
        for way, after in itertools.zip_longest(self._ways, self._ways[1:]):
            try:
                self._prove(machine, lowered)
                break
            except parts.Inseparable as reason:
                assert self.range is not None
                self._reasons[self.range[0]] = str(reason)
                if after is None:
                    raise refusal(self._given, way, reason) from None
                lowered = self._leave_for(after, lowered)
        return lowered

    def _prove(self, machine: Machine, lowered: dict[Compilation, Lowered]) -> None:
        """Lowers the parts of a range, and proves that the model can be run in them. Raises
        :class:`parts.Inseparable`.
        """
        if self.range is None:
            return
        proofs = Proofs(self.symbol, self.range[1], machine, self._at, self.one_source, lowered)
        proofs.ask(
            [
                (others, {self._samples(n): self.compilations[n] for n in numbers})
                for others, numbers in by_other_sizes(self.sizes, self.symbol)
            ]
        )
        self.axes = proofs.axes

    def _samples(self, number: int) -> int:
        """The samples of a part."""
        return self.sizes[number][self.symbol]

    def _keep(self, numbers: Sequence[int]) -> None:
        """Leaves out the compilations of all other parts; what they took is still reported."""
        left = [self.compilations[number] for number in numbers]
        for number, run in enumerate(self.compilations):
            if number not in numbers:
                left[0].report.phases += run.report.phases
        self.sizes, self.compilations = [self.sizes[number] for number in numbers], left

    def _verified(self) -> list[tuple[Compilation, Mapping[str, int] | None]]:
        """The variants that are compared, and the sizes of each. With a range these are the parts
        and, instead of the largest, a sum of all. Of many variants some are compared, the smallest
        and the largest among them; a note names them.
        """
        if self.range is not None:
            return list(zip(self.compilations, self._verified_sums(), strict=True))
        some = evenly_spread(self.sizes, MOST_VERIFIED)
        first = self.compilations[0]
        if len(some) < len(self.sizes) and first.options.verify:
            names = "; ".join(sizes_text(self.sizes[number]) for number in some)
            note = f"{len(some)} of {len(self.sizes)} sizes were compared: {names}"
            for run in self.compilations:  # of all of them, so that it names none
                if note not in run.report.notes:
                    run.report.notes.append(note)
        return [(self.compilations[number], self.sizes[number] or None) for number in some]

    def _verified_sums(self) -> list[Mapping[str, int] | None]:
        assert self.range is not None
        every = [*self.range[1]]
        found: list[Mapping[str, int] | None] = []
        for others, numbers in by_other_sizes(self.sizes, self.symbol):
            own = [self._samples(number) for number in numbers]
            # a part that its own size does not run in is used by no size
            found += [{self.symbol: part, **others} for part in own[:-1]]
            least = sum(own) if len(own) > 1 else 3 * own[0]
            size = next((n for n in every if n >= least), every[-1])
            found.append({self.symbol: size, **others})
        return found

    def digests(self) -> list[str] | None:
        """The digests of the model in each of its shapes. None if a model has none."""
        from gtco.frontend.digest import digest_of

        runs = self.compilations[: 1 if self.one_source else None]
        found = [digest_of(run.source.opened(run.options)) for run in runs]
        return None if None in found else [*map(str, found)]

    def verify_fetched(self, folder: Path) -> None:
        """Compares the library in ``folder``, from the cache, where that is asked for."""
        report = self.fetched
        assert report is not None
        found = Covered.of(read_metadata(folder / self.output.name))
        for way in self._ways[1:]:
            if (self.symbol if self.range else None) == (found.symbol if found else None):
                break
            self._leave_for(way, {})
        if self.range is not None:
            known = [sizes_text(one) in report.variants for one in self.sizes]
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
        return of_all(self._reports()) if self._several else self.compilations[0].report

    def _reports(self) -> dict[str, CompileReport]:
        """The report of each variant, by its sizes."""
        variants = zip(self.sizes, self.compilations, strict=True)
        return {sizes_text(sizes): run.report for sizes, run in variants}

    def finish(self, made: dict[Compilation, Built], folder: Path) -> None:
        """The library, made in ``folder`` and compared where that is asked for. Takes its own out
        of ``made``.
        """
        built = [made.pop(run) for run in self.compilations]
        if not self._several:
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
            say(f"{len(self.sizes)} variants, {memory(first.report)}")
        for run, sizes in self._verified():
            verify(run, library, sizes)
        for run, one in kept:
            verify_layers(run, one)

    def _link(self, built: list[Built], folder: Path) -> Path:
        """The library of all variants. Lets go of ``built``, whose constants take memory."""
        first, shared, whole = self.compilations[0], self.compilations[0].shared, built[0].whole
        target, facts = whole.policy.target, whole.facts
        assert shared is not None
        for one in built:
            shared.unite(one.model.graph)
        made = [
            Part(sizes, one.model.graph, one.generated, one.whole.batch)
            for sizes, one in zip(self.sizes, built, strict=True)
        ]
        del whole, one
        built.clear()
        shared.forget()
        artifact = assemble_variants(
            identifier(self.output.stem),
            made,
            target,
            first.options.threads,
            facts.precision,
            notes_of_all(self._reports()),
            facts.identity,
            Ranged(self.symbol, self.range[1], self.axes) if self.range else None,
            stepped_ranges(self._way),
        )
        for run, part, variant in zip(self.compilations, made, artifact.variants, strict=True):
            tell(run.report, variant.steps, artifact, part.generated)
        return build_artifact(artifact, folder, self.output)


def _cores(options: CompileOptions) -> int:
    """The cores that a run has. A GPU is as wide as a CPU of many."""
    machine = target(options.target)
    return options.threads or (machine.cores if isinstance(machine, Target) else parts.MANY_CORES)
