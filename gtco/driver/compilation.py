"""The steps from one model at one size to its kernels. :mod:`gtco.driver.linking.finishing` makes a
library of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.driver.backend import backend_of
from gtco.driver.checks import check_dump, check_sizes
from gtco.driver.compiled import OF_ALL, CompileReport
from gtco.driver.phases import Built, CutModel, Facts, Fused, Lowered, Simplified, Whole
from gtco.driver.reading import Source
from gtco.driver.sizes.shared import Shared
from gtco.frontend.source import is_onnx, is_program
from gtco.machine.target import Machine, Target
from gtco.runtime.publish import write_error
from gtco.search.records.records import Record, Records
from gtco.support.counting import counted
from gtco.support.errors import REPORT, InternalError, guarded
from gtco.support.options import GPU_PRECISIONS, CompileOptions
from gtco.tensor.stage import Stage

if TYPE_CHECKING:
    import numpy as np

    from gtco.frontend.imported import ImportedModel
    from gtco.search.calibration.profile import MachineTable
    from gtco.search.calibration.rates import RateTable
    from gtco.search.policy import Policy
    from gtco.search.recorded import RecordedPolicy

# The phase, its seconds once it has ended, and in words how it goes; while it measures, the words
# are a gtco.tuning.view.View, which has them as its str().
Progress = Callable[[str, float | None, Any], None]


def silent(phase: str, seconds: float | None, detail: object) -> None:
    """A progress callback that shows nothing."""


@dataclass(frozen=True)
class Among:
    """One of many sizes. ``scale``: how large it is, beside the others. ``rewrites``: false for one
    that goes through the rewrites alone that changed others.
    """

    scale: float
    rewrites: bool


class Compilation:
    """The compile of one model at one size: what all of its phases need, and the steps.

    Each step takes what the phase before gave (:mod:`gtco.driver.phases`) and gives the next one:
    :meth:`read`, :meth:`simplify`, :meth:`fuse` and :meth:`generate`. A compilation keeps none of
    it.

    - ``shared``: what it has in common with the other variants of its library;
    - ``report``: what was done so far;
    - ``accidents``: true if something failed that another compile may do better.
    """

    def __init__(
        self,
        model: Any,
        output: Path,
        example_inputs: Any,
        options: CompileOptions,
        progress: Progress,
        shared: Shared | None = None,
    ) -> None:
        self.source, self.output = Source(model, example_inputs, shared), output
        self.options, self.progress, self.shared = options, progress, shared
        self.report = CompileReport()
        self.accidents = False
        self._table: MachineTable | None = None  # this machine's rates, once they were asked for

    def like(self, label: str) -> Compilation:
        """A compilation of the same model, with nothing done yet. ``label``: the folder of what it
        dumps.
        """
        run = type(self)(None, self.output, None, self.options, self.progress, self.shared)
        run.source = self.source
        if self.options.dump is not None:
            run.options = replace(self.options, dump=self.options.dump / label)
            check_dump(run.options.dump)
        return run

    # the phases -----------------------------------------------------------------------------------
    def read(self, machine: Machine) -> Lowered:
        """The step from the model to its graph, before any rewrite."""
        from gtco.graph.lower.walk import lower

        with self.phase("read") as say:
            imported = self.imported(machine)
            graph = lower(imported)
            inputs = counted(len(imported.inputs), "input")
            say(f"{inputs}, {counted(len(imported.weights), 'weight')}")
        precision = self.options.precision
        if imported.bfloat16 and precision == "fp32":
            precision = "bf16"  # operands of products are of bfloat16 in the file
        facts = Facts(precision, imported.float16, imported.identity, imported.operators)
        return Lowered(graph, facts)

    def simplify(
        self, lowered: Lowered, machine: Machine, among: Among | None = None
    ) -> Simplified:
        """The step to the canonical graph. Let go of ``lowered`` then: both hold weights."""
        with self.phase("simplify") as say:
            simple = self.canonical(lowered, machine, among)
            if self.shared is not None:
                self.shared.unite(simple.graph)
            say(counted(len(simple.graph.operators), "operator"))
        return simple

    def fuse(
        self,
        simple: Simplified,
        machine: Machine,
        records: Records | None,
        shipped: Sequence[Record] = (),
        among: Among | None = None,
    ) -> Fused:
        """The step to the stages. ``shipped``: the records that come with gtco, if they count."""
        self.rates(machine)
        with self.phase("fuse") as say:
            policy = self.policy_for(machine, records, shipped)
            fused = self.partitioned(self.rounded(simple, policy), among)
            found = fused.partition
            say(f"{counted(len(found.stages), 'stage')}, {found.unique} of them different")
        return fused

    def to_stages(self, machine: Machine, records: Records | None = None) -> Fused:
        """The steps from the model to its stages."""
        return self.fuse(self.simplify(self.read(machine), machine), machine, records)

    def generate(self, fused: Fused, workers: Workers) -> Built:
        """The step from the stages to the kernels that the policy picks."""
        graph, found, policy = fused.graph, fused.partition, fused.policy
        with self.phase("generate") as say:
            made = self.kernels(list(found.stages), policy, graph.constants, workers)
            made.times = fused.whole.times
            made.wrong = {key: policy.wrong(stage) for key, stage in made.different.items()}
            if self.shared is not None:
                self.shared.layouts.add(made.stages, made.kernels, graph.constants)
            code = sum(k.nbytes for k in made.kernels.values())
            say(f"{counted(len(made.kernels), 'kernel')}, {code >> 10} KiB")
            launching = backend_of(policy.target).launching(made, graph, self.options, workers)
            if launching is not None:
                self.report.notes += launching.notes
                if (one := launching.persistent) is not None:
                    code = sum(map(len, one.images.values()))
                    say(f"one for the whole model, {code >> 10} KiB")
                if launching.listing:
                    self.dump(f"6-{launching.symbol}.cu", launching.listing)
        return Built(fused.whole, CutModel(graph, found, made), launching)

    # what the user is told ------------------------------------------------------------------------
    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        self.progress(name, None, "")
        start = time.perf_counter()
        details: list[str] = []
        with guarded(f"the phase '{name}'"):
            yield details.append
        seconds = time.perf_counter() - start
        self.report.phases.append((name, seconds))
        self.progress(name, seconds, "; ".join(details))

    def dump(self, name: str, text: str) -> None:
        if self.options.dump is not None:
            try:
                (self.options.dump / name).write_text(text)
            except OSError as error:
                raise write_error(self.options.dump / name, error) from error

    def worked_around(self, error: InternalError) -> None:
        """Handles a failure that the compile can go on without: adds a note, or raises if
        ``strict``.
        """
        if self.options.strict:
            raise error
        self.accidents = True
        note = f"{error}; the model was compiled without it"
        if note not in self.report.notes:
            self.report.notes.append(note)

    def said_as(self, other: Compilation) -> None:
        """Reports what ``other`` reported so far, a compilation of the same model."""
        self.report.notes += other.report.notes
        self.accidents |= other.accidents

    @contextmanager
    def told(self, progress: Progress) -> Iterator[None]:
        """Meanwhile its progress goes there."""
        own, self.progress = self.progress, progress
        try:
            yield
        finally:
            self.progress = own

    # their parts ----------------------------------------------------------------------------------
    def imported(self, machine: Machine) -> ImportedModel:
        """Model -> Relax, by the importer for its kind. For CPUs float16 becomes float32."""
        imported = self.source.read(self.options, backend_of(machine).computes_float16)
        self.report.notes += imported.notes
        self.accidents |= imported.unsimplified
        if self.options.dump is not None:
            self.dump("1-relax.txt", imported.module.script())
        return imported

    def threads(self, machine: Machine) -> int:
        """The number of threads that the model is compiled for."""
        return self.options.threads or machine.cores

    def canonical(
        self, lowered: Lowered, machine: Machine, among: Among | None = None
    ) -> Simplified:
        """The graph as it was lowered -> the canonical graph, channels last."""
        from gtco.driver.canonical import canonical
        from gtco.graph.fusion.repeat import skeleton
        from gtco.graph.rewrites.pipeline import Passes

        graph, facts = lowered.graph, lowered.facts
        check_sizes(graph)
        self.dump("2-lowered.txt", graph.dump())
        narrow = GPU_PRECISIONS[facts.precision]
        threads = self.threads(machine)
        known = self.shared.passes if self.shared is not None else {}
        kind = skeleton(graph) if self.shared is not None else ()
        passes = Passes(None if among is None or among.rewrites else known.get(kind))
        made = canonical(graph, machine, threads, narrow, self.worked_around, self.dump, passes)
        if passes.only is None:
            known.setdefault(kind, set()).update(passes.changed)
        backend_of(machine).check_indices(made)
        return Simplified(made, facts)

    def rounded(self, simple: Simplified, policy: RecordedPolicy) -> Whole:
        """The graph in the precision that was asked for."""
        from gtco.driver.canonical import rounded

        graph, facts, backend = simple.graph, simple.facts, backend_of(policy.target)
        plain = graph.copy() if self.options.verify_layers else None
        if facts.precision != "fp32":
            self.report.notes += backend.precision_notes(facts.precision)
        narrow = GPU_PRECISIONS[facts.precision]
        made = rounded(graph, narrow, policy, backend.widens_bytes, facts.float16)
        if self.shared is not None:  # the weights in their new formats
            self.shared.unite(made)
        if made is not graph:
            self.dump("4-precision.txt", made.dump())
        return Whole(made, facts, policy, plain)

    def rates(self, machine: Machine) -> RateTable | None:
        """This machine's table of rates. If it was not measured yet, that is a phase of its own.
        None for other machines, and if it could not be measured.
        """
        from gtco.search.calibration.profile import known, machine_table

        if not isinstance(machine, Target) or machine.name != "native":
            return None
        if self._table is None:
            if known(machine):
                self._table = machine_table(machine)
            else:
                with self.phase("calibrate") as say:
                    self._table = machine_table(
                        machine, lambda what: self.progress("calibrate", None, what)
                    )
                    say("this machine was measured" if self._table.rates else "not measured")
            self.report.notes += [self._table.note] if self._table.note else []
        return self._table.rates

    def predicting(self, machine: Machine) -> Policy:
        """The policy that predicts; all variants of a library have one. Its target has as many
        cores as the model has threads, since the space and the price of a stage depend on that one
        number.
        """
        if self.shared is None:
            return self._new_policy(machine)
        if self.shared.policy is None:
            self.shared.policy = self._new_policy(machine)
        return self.shared.policy

    def _new_policy(self, machine: Machine) -> Policy:
        from gtco.driver.policies import policy_of

        rates = self.rates(machine)  # rates of the whole machine, whatever the number of threads
        policy, notes = policy_of(self.options, machine, self.threads(machine), rates)
        self.report.notes += notes
        return policy

    def policy_for(
        self, machine: Machine, records: Records | None, shipped: Sequence[Record] = ()
    ) -> RecordedPolicy:
        """The policy that predicts, overruled by ``records`` if there are some."""
        from gtco.driver.policies import overruled

        policy, notes = overruled(self.predicting(machine), machine, records, shipped)
        self.report.notes += notes
        return policy

    def partitioned(self, whole: Whole, among: Among | None = None) -> Fused:
        """Graph -> stages, and the graph in which movement is copied where that pays."""
        from gtco.driver.fusing import fused

        graph, policy, known, repeats = whole.graph, whole.policy, None, None
        if (shared := self.shared) is not None and among is not None:
            known = shared.partitions
            if shared.near_one_that_was_searched(graph, among.scale):
                repeats = partial(shared.forms.predict, policy)
        copied, result, searched = fused(graph, policy, known, repeats)
        if searched:
            self.report.notes += result.notes
            if shared is not None and among is not None:
                shared.note_search(graph, among.scale, policy, result.stages)
        self.dump("5-stages.txt", result.text())
        return Fused(whole, copied, result, searched)

    def kernels(
        self,
        stages: list[Stage],
        policy: RecordedPolicy,
        constants: Mapping[str, np.ndarray],
        workers: Workers,
    ) -> Generated:
        """Stages -> kernels, in the worker processes. Some kernels may be there already, or are
        made first for many stages together. ``constants``: of the graph that has the stages.
        """
        from gtco.driver.generating import generated

        result = generated(
            stages,
            policy,
            workers,
            self.options,
            self.shared,
            constants,
            lambda done, total: self.progress("generate", None, f"{done}/{total}"),
        )
        for failure in policy.failures:
            self.worked_around(InternalError(f"{failure}. {REPORT}"))
        self.report.notes += [*result.notes, *result.spills]
        self.accidents |= bool(result.notes)
        notes = self.report.notes
        notes += [note for note in policy.passed_over.values() if note not in notes]
        notes += policy.said_elsewhere(result.stages, result.choices)
        suffix = backend_of(policy.target).dump_suffix
        for kernel in result.kernels.values():
            if kernel.text:
                self.dump(f"6-{kernel.symbol}.{suffix}", kernel.text)
        return result


def compilation_at(
    model: Any,
    output: Path,
    example_inputs: Any,
    options: CompileOptions,
    progress: Progress,
    sizes: Mapping[str, int],
    shared: Shared | None,
    label: str,
) -> Compilation:
    """The compilation of one variant: its sizes, as the model's dimensions are named, are fixed as
    those of ``shapes`` are. ``label`` says which it is.
    """
    given = dict(sizes)
    # a module has only the shapes of its example inputs, and no dimensions that have names
    if given and not is_onnx(model) and not is_program(model):
        from gtco.frontend.pytorch.examples import resized

        # made when they are needed: those of hundreds of sizes do not fit memory together
        example_inputs = partial(resized, model, example_inputs, given)
        given = {}
    own = replace(options, shapes={**options.shapes, **given}, dims={})
    if shared is None:
        return Compilation(model, output, example_inputs, own, progress)
    own = replace(own, launches="graph")  # a kernel of all steps has those of one shape
    if own.dump is not None:
        own = replace(own, dump=own.dump / label.replace(", ", ",").replace("/", "_"))

    def labelled(phase: str, seconds: float | None, detail: Any) -> None:
        if phase not in OF_ALL and isinstance(detail, str):
            detail = f"{label}: {detail}" if detail else label
        progress(phase, seconds, detail)

    return Compilation(model, output, example_inputs, own, labelled, shared)
