"""compile_model: the steps from a model to a shared library, in order. The only place that orders
them.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.assembly import assemble
from gtco.checks import check_dump, check_output, check_sizes, effort_of, is_onnx
from gtco.codegen.generate import Generated, generate
from gtco.codegen.workers import Workers
from gtco.compiled import CompiledModel, CompileReport
from gtco.errors import (
    REPORT,
    BuildError,
    InternalError,
    OptionError,
    UnsupportedError,
    VerificationError,
    guarded,
)
from gtco.options import CompileOptions, Tune, c_compiler
from gtco.runtime.artifact import build_artifact
from gtco.runtime.module import load
from gtco.runtime.publish import publish, staging, write_error
from gtco.search.records import Records
from gtco.target import Target, target
from gtco.tensor.stage import Stage

if TYPE_CHECKING:
    from gtco.graph.fusion import Partition
    from gtco.graph.graph import Graph
    from gtco.search.policy import Policy
    from gtco.tuning.census import Census
    from gtco.tuning.result import StageResult

# The phase, its seconds once it has ended, and in words how it goes; while it measures, the words
# are a gtco.tuning.view.View, which has them as its str().
Progress = Callable[[str, float | None, Any], None]


def compile_model(
    model: Any,
    example_inputs: Any = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> CompiledModel:
    """Compile a model and load the result.

    ``model``: a torch ``nn.Module`` with ``example_inputs``, an ``ExportedProgram``, or ONNX as a
    path, a ``ModelProto`` or bytes. ``example_inputs`` are tensors of the shapes and dtypes that
    the model will run with: one, a sequence of them, or a dictionary of keyword arguments; other
    values among them become part of the model. A module is compiled as it is in evaluation mode,
    and its parameters, buffers and training flags are left as they were. Options are the fields of
    :class:`gtco.options.CompileOptions`; ``shapes`` goes with ONNX and ExportedPrograms, whose
    dimensions may be symbolic. Raises a :class:`gtco.errors.GtcoError` that says what is wrong and
    what to do.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="gtco-"))
    except OSError as error:
        raise BuildError(
            f"there is no place for temporary files ({error}): set TMPDIR to a folder that can be "
            "written"
        ) from error
    try:
        report = compile_to_file(
            model, folder / "model.so", example_inputs, progress=progress, **options
        )
        return CompiledModel(load(folder / "model.so", temporary=True), report)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def compile_to_file(
    model: Any,
    output: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> CompileReport:
    """Compile a model to ``output`` (a ``.so``, with a header beside it); see
    :func:`compile_model`.
    """
    return compile_to_files([(model, output, example_inputs)], progress=progress, **options)[0]


def compile_to_files(
    models: Sequence[tuple[Any, str | os.PathLike[str], Any]],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> list[CompileReport]:
    """Compile several models with the same options, each to its output and with its example inputs
    (None for ONNX); see :func:`compile_model`. What measuring there is goes over all of them: a
    stage that several have is tuned once, and its time counts as often as it occurs in all. The
    libraries are put in place when all of them are made.
    """
    chosen = _options(options)
    compilations = [
        _Compilation(model, Path(output), inputs, chosen, progress or _silent)
        for model, output, inputs in models
    ]
    outputs = [c.output.resolve() for c in compilations]
    if twice := [output for output in outputs if outputs.count(output) > 1]:
        raise OptionError(f"two models would be compiled to the same file '{twice[0]}'")
    _run(compilations, chosen)
    return [c.report for c in compilations]


def stages_of(
    model: Any, example_inputs: Any = None, *, progress: Progress | None = None, **options: Any
) -> tuple[Policy, list[Stage]]:
    """The stages that :func:`compile_model` would make of the model, and the policy that it would
    pick kernels by.
    """
    chosen = _options(options)
    run = _Compilation(model, Path("model.so"), example_inputs, chosen, progress or _silent)
    run.partition(target(chosen.target), None)
    return run.policy, list(run.found.stages)


def space_sizes(
    model: Any, example_inputs: Any = None, *, progress: Progress | None = None, **options: Any
) -> list[Census]:
    """How large the space of each different stage is, and what becomes of configs drawn from it;
    see :func:`stages_of`.
    """
    from gtco.tuning.census import census

    say = progress or _silent
    policy, stages = stages_of(model, example_inputs, progress=progress, **options)
    with Workers(_options(options).workers or policy.target.cores) as workers:
        return census(
            stages,
            policy.target,
            workers,
            lambda done, total: say("sample", None, f"{done}/{total} stages"),
        )


def _options(given: Mapping[str, Any]) -> CompileOptions:
    known = {name: value for name, value in given.items() if value is not None}
    unknown = set(known) - set(CompileOptions.__dataclass_fields__)
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(sorted(unknown))}; known: "
            f"{', '.join(CompileOptions.__dataclass_fields__)}"
        )
    for name in ("dump", "records"):
        if name in known:
            known[name] = Path(known[name])
    return CompileOptions(**known)


def _silent(phase: str, seconds: float | None, detail: object) -> None:
    return None


def _run(compilations: Sequence[_Compilation], options: CompileOptions) -> None:
    """The steps of every model, those that measure for all models at once."""
    machine = target(options.target)
    effort = effort_of(options.tune, machine)
    # what is missing is said before the work is done
    c_compiler()
    for compilation in compilations:
        check_output(compilation.output)
        if options.verify and is_onnx(compilation.model) and find_spec("onnxruntime") is None:
            raise VerificationError("verifying needs ONNX Runtime: pip install onnxruntime")
    check_dump(options.dump)
    with ExitStack() as stack:
        records = None
        if options.records is not None:
            records = stack.enter_context(Records(options.records))
        elif effort is not None and effort.fusion:
            records = stack.enter_context(Records(":memory:"))
        folders = [stack.enter_context(staging(c.output)) for c in compilations]
        with Workers(options.workers or machine.cores) as workers:
            for compilation in compilations:
                compilation.prepare(machine, records, workers)
            if effort is not None:
                _tune(compilations, workers, records, effort)
        for compilation, folder in zip(compilations, folders, strict=True):
            compilation.finish(folder)
        for compilation, folder in zip(compilations, folders, strict=True):
            publish(folder, compilation.output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for compilation in compilations:
        compilation.report.peak_memory_bytes = peak


def _tune(
    compilations: Sequence[_Compilation],
    workers: Workers,
    records: Records | None,
    effort: Tune,
) -> None:
    """Measured candidates in the place of picks that they beat, in all models."""
    from gtco.cooptimize import SHARE, part, rest
    from gtco.tuning.result import together
    from gtco.tuning.tune import tune
    from gtco.tuning.view import View

    first = compilations[0]
    views: list[View] = []

    def progress(view: View) -> None:
        views.append(view)
        first.progress("tune", None, view)

    def tuned(models: Sequence[Generated], effort: Tune) -> list[StageResult]:
        known = [len(model.notes) for model in models]
        results = tune(
            models,
            first.policy,
            workers,
            threads=first.options.threads,
            effort=effort,
            records=records,
            progress=progress,
        )
        for model, length in zip(models, known, strict=True):
            notes.setdefault(id(model), []).extend(model.notes[length:])
        return results

    notes: dict[int, list[str]] = {}
    with first.phase("tune") as say:
        results: list[StageResult] = []
        if effort.fusion:
            begin, some = time.monotonic(), part(effort, SHARE / len(compilations))
            for compilation in compilations:
                results += compilation.cooptimize(tuned, workers, some, say)
            trials = sum(result.measured for result in results)
            effort = rest(effort, time.monotonic() - begin, trials)
        results += tuned([c.generated for c in compilations], effort)
        say(str(views[-1]))
    for compilation in compilations[1:]:
        compilation.report.phases.append(first.report.phases[-1])
    for compilation in compilations:
        compilation.report.notes += notes[id(compilation.generated)]
        compilation.report.tuning = together(results, compilation.generated.stages)
        compilation.report.tuned = views[-1]


class _Compilation:
    """One model's way through the steps."""

    def __init__(
        self,
        model: Any,
        output: Path,
        example_inputs: Any,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        self.model, self.output, self.example_inputs = model, output, example_inputs
        self.options, self.progress = options, progress
        self.report = CompileReport()
        self.policy: Policy  # these, once it is prepared
        self.whole: Graph  # what is cut
        self.graph: Graph  # what the stages are of, some movement copied
        self.found: Partition
        self.generated: Generated

    def partition(self, machine: Target, records: Records | None) -> None:
        """The steps from the model to its stages."""
        with self.phase("read") as say:
            imported = self.read()
            say(f"{len(imported.inputs)} inputs, {len(imported.weights)} weights")
        with self.phase("simplify") as say:
            graph = self.canonical(imported, self.threads(machine))
            say(f"{len(graph.operators)} operators")
        del imported
        with self.phase("fuse") as say:
            self.policy = policy = self.policy_for(machine, records)
            self.whole = self.rounded(graph, policy)
            self.graph, self.found = self.fuse(self.whole, policy)
            say(f"{len(self.found.stages)} stages, {self.found.unique} of them different")

    def prepare(self, machine: Target, records: Records | None, workers: Workers) -> None:
        """The steps from the model to the kernels that the policy picks."""
        self.partition(machine, records)
        with self.phase("generate") as say:
            self.generated = self.generate(list(self.found.stages), self.policy, workers)
            code = sum(len(k.code) for k in self.generated.kernels.values())
            say(f"{len(self.generated.kernels)} kernels, {code >> 10} KiB")

    def finish(self, folder: Path) -> None:
        """The library, made in ``folder`` and compared where that is asked for."""
        self.report.rejections = dict(self.generated.rejections)
        with self.phase("link") as say:
            library = self.link(self.graph, self.generated, self.policy, folder)
            weights, arena = self.report.weights_bytes / 1e6, self.report.arena_bytes / 1e6
            say(f"weights {weights:.1f} MB, arena {arena:.1f} MB")
        if self.options.verify:
            with self.phase("verify") as say:
                self.verify(library)
                say(str(self.report.verification).splitlines()[0])

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
        """A failure that the compile goes on without: a note, or the end of it where strict."""
        if self.options.strict:
            raise error
        note = f"{error}; the model was compiled without it"
        if note not in self.report.notes:
            self.report.notes.append(note)

    # the steps ------------------------------------------------------------------------------------
    def read(self) -> Any:
        """Model -> Relax, by the importer that its kind needs."""
        options = self.options
        if is_onnx(self.model):
            from gtco.frontend.onnx import load_onnx

            if self.example_inputs is not None:
                raise OptionError(
                    "example_inputs is for PyTorch modules; an ONNX model has its inputs' shapes, "
                    "and shapes gives symbolic ones their values"
                )
            imported = load_onnx(
                self.model,
                shapes=options.shapes,
                simplify=options.simplify,
                simplify_timeout=options.simplify_timeout,
            )
        else:
            from gtco.frontend.pytorch import load_pytorch

            imported = load_pytorch(
                self.model,
                self.example_inputs,
                shapes=options.shapes,
                simplify=options.simplify,
                simplify_timeout=options.simplify_timeout,
            )
        self.report.notes += imported.notes
        if options.dump is not None:
            self.dump("1-relax.txt", imported.module.script())
        return imported

    def threads(self, machine: Target) -> int:
        """How many threads the model is compiled for."""
        return self.options.threads or machine.cores

    def canonical(self, imported: Any, threads: int) -> Graph:
        """Relax -> canonical graph, channels last."""
        from gtco.graph.layout import channels_last
        from gtco.graph.lower import lower
        from gtco.graph.rewrites.pipeline import canonicalize
        from gtco.graph.rewrites.split_reductions import split_reductions

        graph = lower(imported)
        check_sizes(graph)
        self.dump("2-lowered.txt", graph.dump())
        graph = canonicalize(graph, failed=self.worked_around)
        self.dump("3-canonical.txt", graph.dump())
        graph = canonicalize(channels_last(graph), failed=self.worked_around)

        def split(graph: Graph) -> Graph:
            return split_reductions(graph, threads)

        graph = canonicalize(graph, rewrites=(split,), failed=self.worked_around)
        graph.check()
        self.dump("4-layout.txt", graph.dump())
        return graph

    def rounded(self, graph: Graph, policy: Policy) -> Graph:
        """The graph in the precision that was asked for."""
        from gtco.graph.precision import bfloat16_operands
        from gtco.graph.rewrites.fold_constants import fold_constants

        if self.options.precision == "fp32":
            return graph
        graph = fold_constants(bfloat16_operands(graph, policy.predict)).check()
        self.dump("4-precision.txt", graph.dump())
        return graph

    def policy_for(self, machine: Target, records: Records | None) -> Policy:
        """The policy, for a target with as many cores as the model is to have threads: the space
        and the price of a stage go by that one number.
        """
        from gtco.search.analytic import AnalyticPolicy
        from gtco.search.profile import machine_table
        from gtco.search.recorded import RecordedPolicy

        # what was measured is of the whole machine
        rates = machine_table(machine) if machine.name == "native" else None
        known = rates.target if rates else machine
        analytic = AnalyticPolicy(replace(known, cores=self.threads(machine)), rates)
        return analytic if records is None else RecordedPolicy(analytic, records)

    def fuse(self, graph: Graph, policy: Policy) -> tuple[Graph, Partition]:
        """Graph -> stages at the least cost, measured or predicted; the graph with movement copied
        where it pays.
        """
        from gtco.graph.fusion import CLOSE, PROMISING, fuse

        known = CLOSE if policy.measured else PROMISING
        try:
            graph, result = fuse(
                graph, policy.predict, policy.floor, policy.possible, promising=known
            )
        except UnsupportedError as error:
            if policy.failures:
                raise InternalError("\n".join([str(error), *policy.failures, REPORT])) from error
            raise
        self.report.notes += result.notes
        self.dump("5-stages.txt", result.text())
        return graph, result

    def cooptimize(
        self,
        tuned: Callable[[Sequence[Generated], Tune], list[StageResult]],
        workers: Workers,
        effort: Tune,
        say: Callable[[str], None],
    ) -> list[StageResult]:
        """The partition that stands when rivals were measured beside the predicted one."""
        from gtco.cooptimize import Candidate, Measured, cooptimize
        from gtco.search.recorded import RecordedPolicy

        assert isinstance(self.policy, RecordedPolicy)
        results: list[StageResult] = []
        steps = Measured(
            self.whole,
            self.policy,
            workers,
            self.options.threads,
            lambda stages: self.generate(stages, self.policy, workers),
            lambda models, some: results.extend(tuned(models, some)),
        )
        first = Candidate(self.graph, self.found, self.generated)
        chosen, news = cooptimize(first, steps, effort)
        self.graph, self.found, self.generated = chosen.graph, chosen.partition, chosen.generated
        say(news)
        return results

    def generate(self, stages: list[Stage], policy: Policy, workers: Workers) -> Generated:
        """Stages -> kernels, in the worker processes."""
        result = generate(
            stages,
            policy.choose,
            policy.target,
            workers,
            text=self.options.dump is not None,
            strict=self.options.strict,
            progress=lambda done, total: self.progress("generate", None, f"{done}/{total}"),
        )
        for failure in policy.failures:
            self.worked_around(InternalError(f"{failure}. {REPORT}"))
        self.report.notes += result.notes
        for kernel in result.kernels.values():
            if kernel.text:
                self.dump(f"6-{kernel.symbol}.txt", kernel.text)
        return result

    def link(
        self, graph: Graph, generated: Generated, policy: Policy, folder: Path
    ) -> Path:
        """Kernels, weights and the plan -> the library, in ``folder``."""
        artifact = assemble(
            _identifier(self.output.stem),
            graph,
            generated,
            policy.target,
            self.options.threads,
            self.options.precision,
            self.report.notes,
        )
        self.report.stages = [dict(step.info) for step in artifact.steps]
        self.report.predicted_seconds = sum(s["predicted_seconds"] for s in self.report.stages)
        self.report.weights_bytes = artifact.weights_bytes
        self.report.arena_bytes = artifact.arena_bytes
        return build_artifact(artifact, folder, self.output)

    def verify(self, library: Path) -> None:
        """Raises :class:`VerificationError` with the report where the library is wrong."""
        from gtco.verification import verify

        with load(library, threads=self.options.threads) as compiled:
            self.report.verification = verify(
                compiled, self.model, example_inputs=self.example_inputs, check=False
            )
        self.report.verification.check()


def _identifier(stem: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in stem) or "model"
