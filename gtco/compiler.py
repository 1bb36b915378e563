"""compile_model: the steps from a model to a shared library, in order. The only place that orders
them.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtco.codegen.build import Failure, Job, Kernel
from gtco.codegen.workers import Workers, warm_up
from gtco.errors import BuildError, ModelError, OptionError
from gtco.options import CompileOptions, c_compiler
from gtco.runtime.artifact import Artifact, write_artifact
from gtco.runtime.module import Model, load
from gtco.runtime.plan import BufferRef, Step, TensorSpec, plan_arena, round_up
from gtco.target import Target, target
from gtco.tensor.space import Config
from gtco.tensor.stage import Stage, make_stage

if TYPE_CHECKING:
    from gtco.graph.graph import Graph
    from gtco.search.analytic import AnalyticPolicy

Progress = Callable[[str, float | None, str], None]


@dataclass
class CompileReport:
    """What a compile did: seconds of each phase, the stages, memory, and notes for the user."""

    phases: list[tuple[str, float]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    predicted_seconds: float = 0.0
    weights_bytes: int = 0
    arena_bytes: int = 0
    peak_memory_bytes: int = 0
    verification: Any = None

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.phases)


@dataclass(frozen=True)
class CompiledModel:
    """A compiled model, loaded and ready: call it, or :meth:`save` it."""

    model: Model
    report: CompileReport

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Arrays in (numpy, or anything with DLPack), arrays of the same kind out."""
        return self.model(*args, **kwargs)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the library, its header and, where there is one, its weights file."""
        return Path(self.model.save(path))

    @property
    def stages(self) -> list[dict[str, Any]]:
        return self.model.stages

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.model.outputs


def compile_model(
    model: Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> CompiledModel:
    """Compile a model and load the result.

    ``model``: a torch ``nn.Module`` (with ``example_inputs``), an ``ExportedProgram``, or ONNX as a
    path, a ``ModelProto`` or bytes. Options are the fields of :class:`gtco.options.CompileOptions`.
    Raises a :class:`gtco.errors.GtcoError` that says what is wrong and what to do.
    """
    folder = Path(tempfile.mkdtemp(prefix="gtco-"))
    try:
        report = compile_to_file(
            model, folder / "model.so", example_inputs, progress=progress, **options
        )
        return CompiledModel(load(folder / "model.so", temporary=True), report)
    except BaseException:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        raise


def compile_to_file(
    model: Any,
    output: str | os.PathLike[str],
    example_inputs: Sequence[Any] | None = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> CompileReport:
    """Compile a model to ``output`` (a ``.so``, with a header beside it); see
    :func:`compile_model`.
    """
    chosen = _options(options)
    return _Compilation(model, Path(output), example_inputs, chosen, progress or _silent).run()


def _options(given: Mapping[str, Any]) -> CompileOptions:
    known = {name: value for name, value in given.items() if value is not None}
    unknown = set(known) - set(CompileOptions.__dataclass_fields__)
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(sorted(unknown))}; known: "
            f"{', '.join(CompileOptions.__dataclass_fields__)}"
        )
    if dump := known.get("dump"):
        known["dump"] = Path(dump)
    return CompileOptions(**known)


def _silent(phase: str, seconds: float | None, detail: str) -> None:
    return None


class _Compilation:
    """One run of the steps."""

    def __init__(
        self,
        model: Any,
        output: Path,
        example_inputs: Sequence[Any] | None,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        self.model, self.output, self.example_inputs = model, output, example_inputs
        self.options, self.progress = options, progress
        self.report = CompileReport()

    def run(self) -> CompileReport:
        machine = target(self.options.target)
        _check_output(self.output)
        compiler = c_compiler()
        warm_up()
        with self.phase("read") as say:
            imported = self.read()
            say(f"{len(imported.inputs)} inputs, {len(imported.weights)} weights")
        with self.phase("simplify") as say:
            graph = self.canonical(imported)
            say(f"{len(graph.operators)} operators")
        del imported
        with self.phase("fuse") as say:
            policy = self.policy(machine)
            stages = self.fuse(graph, policy)
            say(f"{len(stages)} stages, {len({s.key for s in stages})} of them different")
        with self.phase("generate") as say:
            stages, kernels, choices = self.generate(stages, policy)
            say(f"{len(kernels)} kernels, {sum(len(k.code) for k in kernels.values()) >> 10} KiB")
        with self.phase("link") as say:
            artifact = self.artifact(graph, stages, kernels, choices, policy)
            write_artifact(artifact, self.output, cc=compiler)
            say(
                f"{artifact.weights_bytes / 1e6:.1f} MB of weights, "
                f"{artifact.arena_bytes / 1e6:.1f} MB of arena"
            )
        del artifact, graph
        if self.options.verify:
            with self.phase("verify") as say:
                self.verify()
                say(str(self.report.verification).splitlines()[0])
        self.report.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self.report

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        self.progress(name, None, "")
        start = time.perf_counter()
        details: list[str] = []
        yield details.append
        seconds = time.perf_counter() - start
        self.report.phases.append((name, seconds))
        self.progress(name, seconds, "; ".join(details))

    def dump(self, name: str, text: str) -> None:
        if self.options.dump is not None:
            self.options.dump.mkdir(parents=True, exist_ok=True)
            (self.options.dump / name).write_text(text)

    # the steps ------------------------------------------------------------------------------------
    def read(self) -> Any:
        """Model -> Relax, by the importer that its kind needs."""
        options = self.options
        if _is_onnx(self.model):
            from gtco.frontend.onnx import load_onnx

            imported = load_onnx(
                self.model,
                shapes=options.shapes,
                simplify=options.simplify,
                simplify_timeout=options.simplify_timeout,
            )
        else:
            from gtco.frontend.pytorch import load_pytorch

            imported = load_pytorch(self.model, self.example_inputs)
        self.report.notes += imported.notes
        if options.dump is not None:
            self.dump("1-relax.txt", imported.module.script())
        return imported

    def canonical(self, imported: Any) -> Graph:
        """Relax -> canonical graph, channels last, movement copied to where it vanishes."""
        from gtco.graph.duplicate import duplicate_movement
        from gtco.graph.layout import channels_last
        from gtco.graph.lower import lower
        from gtco.graph.rewrites.pipeline import canonicalize

        graph = lower(imported)
        self.dump("2-lowered.txt", graph.dump())
        graph = canonicalize(graph)
        self.dump("3-canonical.txt", graph.dump())
        graph = duplicate_movement(canonicalize(channels_last(graph)))
        graph.check()
        self.dump("4-layout.txt", graph.dump())
        return graph

    def policy(self, machine: Target) -> AnalyticPolicy:
        from gtco.search.analytic import AnalyticPolicy
        from gtco.search.profile import level0

        if machine.name != "native":
            return AnalyticPolicy(machine, self.options.threads)
        table = level0(machine)
        return AnalyticPolicy(
            replace(table.target, cores=machine.cores), self.options.threads, table
        )

    def fuse(self, graph: Graph, policy: AnalyticPolicy) -> list[Stage]:
        from gtco.graph.fusion import partition

        result = partition(graph, policy.predict)
        self.report.notes += result.notes
        self.dump(
            "5-stages.txt",
            "\n".join(
                f"{cost * 1e6:10.1f} us  {stage.key}  {stage.label} -> {stage.output.type}"
                for stage, cost in zip(result.stages, result.costs, strict=True)
            ),
        )
        return list(result.stages)

    def generate(
        self, stages: list[Stage], policy: AnalyticPolicy
    ) -> tuple[list[Stage], dict[str, Kernel], dict[str, Any]]:
        """Build every different stage; one that fails is cut into single operators on their
        fallback.
        """
        kernels: dict[str, Kernel] = {}
        choices: dict[str, Any] = {}
        with Workers(self.options.workers or policy.target.cores) as workers:
            todo = {stage.key: stage for stage in stages}
            for attempt in ("chosen", "split", "fallback"):
                jobs = []
                for key, stage in todo.items():
                    choices[key] = _choose(stage, policy, attempt)
                    jobs.append(
                        Job(
                            f"gtco_{key}",
                            stage.canonical,
                            choices[key].config,
                            policy.target,
                            self.options.dump is not None,
                        )
                    )
                failed: dict[str, Stage] = {}
                done = 0
                for answer in workers.build(jobs):
                    key = answer.symbol.removeprefix("gtco_")
                    done += 1
                    if isinstance(answer, Failure):
                        failed[key] = todo[key]
                        self.report.notes.append(
                            f"stage {todo[key].label} ({key}, {choices[key].config.to_json()}) could "
                            f"not be built: {answer.reason}"
                        )
                    else:
                        kernels[key] = answer
                        self.dump(
                            f"6-kernels/{answer.symbol}.txt", answer.text
                        ) if answer.text else None
                    self.progress("generate", None, f"{done}/{len(jobs)}")
                if not failed:
                    return stages, kernels, choices
                stages = [
                    piece
                    for stage in stages
                    for piece in (_split(stage) if stage.key in failed else [stage])
                ]
                todo = {s.key: s for s in stages if s.key not in kernels}
        raise BuildError(
            "code generation failed even operator by operator:\n  "
            + "\n  ".join(self.report.notes[-len(failed) :])
        )

    def artifact(
        self,
        graph: Graph,
        stages: list[Stage],
        kernels: Mapping[str, Kernel],
        choices: Mapping[str, Any],
        policy: AnalyticPolicy,
    ) -> Artifact:
        """Weights packed, intermediate tensors placed in the arena, one step per stage."""
        made = {stage.output.output: i for i, stage in enumerate(stages)}
        last_use = {
            name: max(
                (i for i, s in enumerate(stages) if any(x.name == name for x in s.inputs)),
                default=step,
            )
            for name, step in made.items()
        }
        inner = [name for name in made if name not in graph.outputs]
        offsets, arena = plan_arena(
            [(graph.types[name].nbytes, made[name], last_use[name]) for name in inner]
        )
        where = {
            name: BufferRef("arena", offset) for name, offset in zip(inner, offsets, strict=True)
        }
        where |= {name: BufferRef("input", i) for i, name in enumerate(graph.inputs)}
        where |= {name: BufferRef("output", i) for i, name in enumerate(graph.outputs)}
        weights, constants, size = [], {}, 0
        steps = []
        for stage in stages:
            kernel = kernels[stage.key]
            buffers = []
            for i, (original, renamed) in enumerate(
                zip(stage.inputs, stage.canonical.inputs, strict=True)
            ):
                if not original.constant:
                    buffers.append(where[original.name])
                    continue
                packing = kernel.packings.get(renamed.name)
                if (original.name, packing) not in constants:
                    array = np.ascontiguousarray(graph.constants[original.name])
                    array = packing.apply(array) if packing else array
                    constants[original.name, packing] = BufferRef("weight", size)
                    weights.append((size, array))
                    size = round_up(size + array.nbytes)
                buffers.append(constants[original.name, packing])
                del i
            buffers.append(where[stage.output.output])
            info = _describe(stage, choices[stage.key])
            self.report.stages.append(info)
            steps.append(Step(kernel.symbol, tuple(buffers), kernel.tasks, kernel.workspace, info))
        graph.constants.clear()
        self.report.predicted_seconds = sum(s["predicted_seconds"] for s in self.report.stages)
        self.report.weights_bytes, self.report.arena_bytes = size, arena
        machine = policy.target
        return Artifact(
            name=_identifier(self.output.stem),
            inputs=_specs(graph, graph.inputs),
            outputs=_specs(graph, graph.outputs),
            steps=tuple(steps),
            arena_bytes=arena,
            kernels={f"{k.symbol}.o": k.code for k in kernels.values()},
            weights=weights,
            cpu_features=machine.features,
            threads=self.options.threads,
            metadata={
                "gtco": _version("gtco"),
                "tvm": _version("apache-tvm"),
                "target": machine.to_json(),
                "notes": list(self.report.notes),
            },
        )

    def verify(self) -> None:
        from gtco.verification import verify

        with load(self.output, threads=self.options.threads) as compiled:
            self.report.verification = verify(compiled, self.model)


def _choose(stage: Stage, policy: AnalyticPolicy, attempt: str) -> Any:
    from gtco.search.analytic import Choosing
    from gtco.tensor.sketch import fallback

    chosen = policy.choose(stage) if attempt != "fallback" else None
    if chosen is not None:
        return chosen
    sketch = fallback.match(stage, policy.target)
    if sketch is None:
        raise BuildError(f"no kernel can compute {stage.label}")
    config = Config(sketch.name)
    return Choosing(sketch, config, policy.seconds(sketch.workload(config)))


def _split(stage: Stage) -> list[Stage]:
    return [make_stage([op], stage.types, stage.constants) for op in stage.operators]


def _describe(stage: Stage, chosen: Any) -> dict[str, Any]:
    named = [op.name for op in stage.operators if op.name]
    moved = sum(i.type.nbytes for i in stage.inputs) + stage.output.type.nbytes
    return {
        "name": named[-1] if named else stage.output.output,
        "key": stage.key,
        "operators": [op.kind for op in stage.operators],
        "inputs": [str(i.type) for i in stage.inputs],
        "output": str(stage.output.type),
        "structure": chosen.sketch.structure,
        "schedule": chosen.config.to_json(),
        "flops": chosen.sketch.workload(chosen.config).flops,
        "bytes": moved,
        "predicted_seconds": chosen.seconds,
    }


def _specs(graph: Graph, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, graph.types[name].dtype, graph.types[name].shape) for name in names
    )


def _is_onnx(model: Any) -> bool:
    if isinstance(model, str | os.PathLike | bytes | bytearray):
        return True
    if type(model).__module__.partition(".")[0] == "onnx" or type(model).__name__ == "ModelProto":
        return True
    if type(model).__name__ == "ExportedProgram" or callable(getattr(model, "parameters", None)):
        return False
    raise ModelError(
        f"cannot compile a {type(model).__name__}: give an ONNX file's path, bytes or "
        "ModelProto, a torch nn.Module "
        "with example_inputs, or a torch ExportedProgram"
    )


def _check_output(path: Path) -> None:
    if path.suffix != ".so":
        raise OptionError(f"the output '{path}' must end in .so")
    if not path.parent.is_dir():
        raise OptionError(f"the folder '{path.parent}' does not exist")


def _identifier(stem: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in stem) or "model"


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:
        return "unknown"
