"""Takes one model through the steps, from its source to its library."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.driver.assembly import assemble, in_parts
from gtco.driver.backend import Backend, backend_of
from gtco.driver.checks import check_dump, check_sizes
from gtco.driver.compiled import CompileReport
from gtco.driver.reading import Source
from gtco.driver.sizes.shared import Shared
from gtco.driver.verifying import model_compared, opened_library, stages_compared
from gtco.machine.target import Machine, Target
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu.plan import GpuArtifact, GpuStep
from gtco.runtime.plan import Batch, Step
from gtco.runtime.publish import write_error
from gtco.runtime.writing.linking import build_artifact
from gtco.search.records.records import Record, Records
from gtco.support.errors import REPORT, InternalError, guarded
from gtco.support.options import GPU_PRECISIONS, CompileOptions
from gtco.tensor.stage import Stage

if TYPE_CHECKING:
    from gtco.driver.launching import Launching
    from gtco.frontend.imported import ImportedModel
    from gtco.graph.fusion.dpof import Cost
    from gtco.graph.fusion.stages import Partition
    from gtco.graph.graph import Graph
    from gtco.search.calibration.profile import MachineTable
    from gtco.search.calibration.rates import RateTable
    from gtco.search.policy import Policy
    from gtco.search.recorded import RecordedPolicy

# The phase, its seconds once it has ended, and in words how it goes; while it measures, the words
# are a gtco.tuning.view.View, which has them as its str().
Progress = Callable[[str, float | None, Any], None]


def silent(phase: str, seconds: float | None, detail: object) -> None:
    """A progress callback that shows nothing."""


class Compilation:
    """One model at one size: its options, and the results of the phases so far.

    The phases are :meth:`lower` (read), :meth:`partition` (simplify, fuse), :meth:`build`
    (generate) and :meth:`finish` (link, verify), in this order. ``shared`` is what it has in common
    with the other variants of its library.
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
        self.accidents = False  # True if something failed that another compile may do better
        # records that come with gtco; none where nothing is measured
        self.shipped: Sequence[Record] = ()
        # read
        self.backend: Backend  # of the machine
        self.lowered: Graph | None = None  # before any rewrite; None again once it is simplified
        self.identity = ""  # of an ONNX file
        self.operators: Mapping[str, str] = {}  # of the model's file, by the names of their nodes
        self.float16 = False  # True for a float16 file on a CPU
        # simplify, fuse
        self._table: MachineTable | None = None  # of this machine's rates
        self.policy: RecordedPolicy
        self.plain: Graph | None = None  # in float32, for verify_layers
        self.whole: Graph  # canonical, in the precision that was asked for
        self.graph: Graph  # the same, with some movement copied into its readers
        self.found: Partition  # of the graph into stages
        self.searched = False  # False if the stages are those of another size
        # generate
        self.generated: Generated
        self.first: tuple[Graph, Partition, Generated]  # before anything is measured
        self.launching: Launching | None = None  # of a model for GPUs
        # one of many sizes, or of the parts of a batch
        self.scale: float | None = None  # how large it is, beside the other sizes
        self.rewrites = True  # False: only the rewrites that changed other sizes
        self.batch: Batch | None = None  # whose part it is

    def lower(self, machine: Machine) -> Graph:
        """The step from the model to its graph, before any rewrite."""
        from gtco.graph.lower.walk import lower

        if self.lowered is None:
            self.backend = backend_of(machine)
            with self.phase("read") as say:
                imported = self.read()
                self.lowered = lower(imported)
                say(f"{len(imported.inputs)} inputs, {len(imported.weights)} weights")
            self.float16, self.operators = imported.float16, imported.operators
            if imported.bfloat16 and self.options.precision == "fp32":
                # operands of products are of bfloat16 in the file
                self.options = replace(self.options, precision="bf16")
        return self.lowered

    def like(self, label: str) -> Compilation:
        """A compilation of the same model, with nothing done yet. ``label``: the folder of what it
        dumps.
        """
        run = type(self)(None, self.output, None, self.options, self.progress, self.shared)
        run.source, run.shipped, run._table = self.source, self.shipped, self._table
        if self.options.dump is not None:
            run.options = replace(self.options, dump=self.options.dump / label)
            check_dump(run.options.dump)
        return run

    def lower_as(self, graph: Graph, other: Compilation) -> None:
        """Takes what :meth:`lower` would give: ``graph``, which follows from the graph of
        ``other``, the same model at another size.
        """
        self.lowered, self.backend = graph, other.backend
        self.float16, self.operators, self.identity = other.float16, other.operators, other.identity
        self.options = replace(self.options, precision=other.options.precision)
        self.report.notes += other.report.notes
        self.accidents |= other.accidents

    def partition(self, machine: Machine, records: Records | None) -> None:
        """The steps from the model to its stages."""
        lowered = self.lower(machine)
        self.lowered = None
        with self.phase("simplify") as say:
            graph = self.canonical(lowered, machine)
            self.backend.check_indices(graph)
            if self.shared is not None:
                self.shared.unite(graph)
            say(f"{len(graph.operators)} operators")
        del lowered
        self.rates(machine)
        with self.phase("fuse") as say:
            self.policy = policy = self.policy_for(machine, records)
            self.whole = self.rounded(graph, policy)
            self.graph, self.found = self.fuse(self.whole, policy)
            say(f"{len(self.found.stages)} stages, {self.found.unique} of them different")

    def cut_as(self, other: Compilation, price: Cost) -> None:
        """The steps from the graph as it was lowered to stages: those that ``other`` was cut into,
        the same model at another number of samples, at this price of a stage. They are searched
        only if the graphs differ in more than sizes.
        """
        from gtco.graph.fusion.repeat import cheapest, skeleton

        assert self.lowered is not None
        self.policy = policy = other.policy
        graph = self.canonical(self.lowered, policy.target)
        self.backend.check_indices(graph)
        self.whole, found = self.rounded(graph, policy), None
        if skeleton(self.whole) == skeleton(other.whole):
            found = cheapest(self.whole, [other.found], price)
        self.searched = found is None
        self.graph, self.found = found or self.fuse(self.whole, policy)

    def cut_again(self) -> None:
        """Searches the stages that :meth:`cut_as` took over."""
        if not self.searched:
            self.graph, self.found = self.fuse(self.whole, self.policy)

    def build(self, workers: Workers) -> None:
        """The step from the stages to the kernels that the policy picks."""
        with self.phase("generate") as say:
            self.generated = made = self.generate(list(self.found.stages), self.policy, workers)
            if self.shared is not None:
                self.shared.layouts.add(made.stages, made.kernels, self.graph.constants)
            code = sum(k.nbytes for k in self.generated.kernels.values())
            say(f"{len(self.generated.kernels)} kernels, {code >> 10} KiB")
            self.first = self.graph, self.found, self.generated.copy()
            self.launching = self.backend.launching(
                self.generated, self.graph, self.options, workers
            )
            if self.launching is not None:
                self.report.notes += self.launching.notes
                if (one := self.launching.persistent) is not None:
                    code = sum(map(len, one.images.values()))
                    say(f"one for the whole model, {code >> 10} KiB")
                if self.launching.listing:
                    self.dump(f"6-{self.launching.symbol}.cu", self.launching.listing)

    def finish(self, folder: Path) -> None:
        """The library, made in ``folder`` and compared where that is asked for."""
        # linking takes the constants out of the graph
        kept = self.graph.copy() if self.options.verify_layers else None
        with self.phase("link") as say:
            library = self.link(folder)
            say(self.memory())
        self.verify(library)
        if kept is not None:
            self.verify_layers(kept)

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

    # the steps ------------------------------------------------------------------------------------
    @property
    def model(self) -> Any:
        return self.source.model

    @property
    def example_inputs(self) -> Any:
        return self.source.example_inputs

    def opened(self) -> Any:
        """The model as its frontend opens it (:mod:`gtco.driver.reading`)."""
        return self.source.opened(self.options)

    def close(self) -> None:
        """Lets go of an opened model."""
        self.source.close()

    def read(self) -> ImportedModel:
        """Model -> Relax, by the importer for its kind. For CPUs float16 becomes float32."""
        imported = self.source.read(self.options, self.backend.computes_float16)
        self.report.notes += imported.notes
        self.accidents |= imported.unsimplified
        self.identity = imported.identity
        if self.options.dump is not None:
            self.dump("1-relax.txt", imported.module.script())
        return imported

    def threads(self, machine: Machine) -> int:
        """The number of threads that the model is compiled for."""
        return self.options.threads or machine.cores

    def canonical(self, graph: Graph, machine: Machine) -> Graph:
        """The graph as it was lowered -> the canonical graph, channels last. A size that takes over
        what others have goes through the rewrites alone that changed these.
        """
        from gtco.driver.canonical import canonical
        from gtco.graph.fusion.repeat import skeleton
        from gtco.graph.rewrites.pipeline import Passes

        check_sizes(graph)
        self.dump("2-lowered.txt", graph.dump())
        narrow = GPU_PRECISIONS[self.options.precision]
        threads = self.threads(machine)
        known = self.shared.passes if self.shared is not None else {}
        kind = skeleton(graph) if self.shared is not None else ()
        passes = Passes(None if self.rewrites else known.get(kind))
        made = canonical(graph, machine, threads, narrow, self.worked_around, self.dump, passes)
        if passes.only is None:
            known.setdefault(kind, set()).update(passes.changed)
        return made

    def rounded(self, graph: Graph, policy: RecordedPolicy) -> Graph:
        """The graph in the precision that was asked for."""
        from gtco.driver.canonical import rounded

        if self.options.verify_layers:
            self.plain = graph.copy()
        if self.options.precision != "fp32":
            self.report.notes += self.backend.precision_notes(self.options)
        narrow = GPU_PRECISIONS[self.options.precision]
        made = rounded(graph, narrow, policy, self.backend.widens_bytes, self.float16)
        if self.shared is not None:  # the weights in their new formats
            self.shared.unite(made)
        if made is not graph:
            self.dump("4-precision.txt", made.dump())
        return made

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

        rates = self.rates(machine)  # of the whole machine, whatever the number of threads
        policy, notes = policy_of(self.options.policy, machine, self.threads(machine), rates)
        self.report.notes += notes
        return policy

    def policy_for(self, machine: Machine, records: Records | None) -> RecordedPolicy:
        """The policy that predicts, overruled by ``records`` if there are some."""
        from gtco.driver.policies import overruled

        policy, notes = overruled(self.predicting(machine), machine, records, self.shipped)
        self.report.notes += notes
        return policy

    def fuse(self, whole: Graph, policy: RecordedPolicy) -> tuple[Graph, Partition]:
        """Graph -> stages, and the graph in which movement is copied where that pays."""
        from gtco.driver.fusing import fused

        known, repeats = None, None
        if (shared := self.shared) is not None and self.scale is not None:
            known = shared.partitions
            if shared.near_one_that_was_searched(whole, self.scale):
                repeats = partial(shared.forms.predict, policy)
        graph, result, self.searched = fused(whole, policy, known, repeats)
        if self.searched:
            self.report.notes += result.notes
            if shared is not None and self.scale is not None:
                shared.note_search(whole, self.scale, policy, result.stages)
        self.dump("5-stages.txt", result.text())
        return graph, result

    def predicted(self) -> float:
        """Seconds of the stages that it was cut into."""
        policy = self.policy
        return sum(
            policy.predict(s) if policy.measured else c
            for s, c in zip(self.found.stages, self.found.costs, strict=True)
        )

    def generate(
        self,
        stages: list[Stage],
        policy: RecordedPolicy,
        workers: Workers,
    ) -> Generated:
        """Stages -> kernels, in the worker processes. Some kernels may be there already, or are
        made first for many stages together.
        """
        from gtco.driver.generating import generated

        result = generated(
            stages,
            policy,
            workers,
            self.options,
            self.shared,
            self.graph.constants,
            lambda done, total: self.progress("generate", None, f"{done}/{total}"),
        )
        for failure in policy.failures:
            self.worked_around(InternalError(f"{failure}. {REPORT}"))
        self.report.notes += result.notes
        self.accidents |= bool(result.notes)
        notes = self.report.notes
        notes += [note for note in policy.passed_over.values() if note not in notes]
        notes += policy.said_elsewhere(result.stages, result.choices)
        for kernel in result.kernels.values():
            if kernel.text:
                self.dump(f"6-{kernel.symbol}.{self.backend.dump_suffix}", kernel.text)
        return result

    def artifact(self, name: str, graph: Graph, generated: Generated) -> Artifact | GpuArtifact:
        """The artifact of the model. It takes the constants out of the graph."""
        found = self.launching
        return assemble(
            name,
            graph,
            generated,
            self.policy.target,
            self.options.threads,
            self.options.precision,
            self.report.notes,
            found.persistent if found else None,
            found.prices.to_json() if found else None,
            found.spilled if found else {},
            self.identity,
        )

    def link(self, folder: Path) -> Path:
        """Kernels, weights and the plan -> the library, in ``folder``."""
        artifact = self.artifact(identifier(self.output.stem), self.graph, self.generated)
        if isinstance(artifact, Artifact):
            artifact = in_parts(artifact, self.batch)
        self.tell(artifact.steps, artifact)
        return build_artifact(artifact, folder, self.output)

    def tell(self, steps: Sequence[Step | GpuStep], artifact: Artifact | GpuArtifact) -> None:
        """Puts into the report what the artifact has, and what its ``steps`` do for this model."""
        report = self.report
        report.rejections = dict(self.generated.rejections)
        report.stages = [dict(step.info) for step in steps]
        report.predicted_seconds = sum(s["predicted_seconds"] for s in report.stages)
        if self.launching is not None and self.launching.one_kernel:
            report.predicted_seconds = self.launching.prices.persistent
            report.launches = "persistent"
        report.weights_bytes = artifact.weights_bytes
        report.arena_bytes = artifact.arena_bytes

    def memory(self) -> str:
        """The library's memory, in words."""
        weights, arena = self.report.weights_bytes / 1e6, self.report.arena_bytes / 1e6
        return f"weights {weights:.1f} MB, arena {arena:.1f} MB"

    def release(self) -> None:
        """Lets go of the graphs, whose constants take memory."""
        del self.whole, self.graph, self.first

    def verify(self, library: Path, sizes: Mapping[str, int] | None = None) -> None:
        """Compares the library, or its variant of these sizes, with the reference where that is
        asked for. Raises :class:`VerificationError` with the report if it is wrong.
        """
        if not self.options.verify:
            return
        opened = partial(self.opened_library, sizes=sizes)
        with self.phase("verify") as say:
            self.report.verification = found = model_compared(self.source, library, opened)
            found.check()
            say(str(found).splitlines()[0])

    def verify_layers(self, graph: Graph) -> None:
        """Compares the output of every stage with the graph in float32, through a library of the
        same kernels that gives them all. ``graph`` is that of the library, with its constants.
        """
        plain, stages = self.plain, self.generated.stages
        assert plain is not None
        with self.phase("layers") as say:
            self.report.losses = stages_compared(
                graph,
                plain,
                stages,
                lambda more: self.artifact("layers", more, self.generated),
                self.opened_library,
            )
            self.plain = None
            say(str(self.report.losses))

    def opened_library(self, library: Path, sizes: Mapping[str, int] | None = None) -> Any:
        """The library, or its variant of these sizes, to be run."""
        return opened_library(library, self.options, self.report.notes, sizes)


def identifier(stem: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in stem) or "model"
