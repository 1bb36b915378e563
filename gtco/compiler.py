"""compile_model and others: from models to shared libraries.

What goes over all models of a call (the cache, tuning, putting in place) is in
:mod:`gtco.driver.making`. Each model is a :class:`gtco.driver.library.Library`, and each size of it
a :class:`gtco.driver.compilation.Compilation`, which has the phases.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.codegen.workers import Workers
from gtco.driver.backend import backend_of
from gtco.driver.checks import check_bundle
from gtco.driver.compilation import Compilation, Progress, silent
from gtco.driver.compiled import CompiledModel, CompileReport
from gtco.driver.library import Library
from gtco.driver.making import make_libraries
from gtco.driver.quantizing import all_quantized, quantized
from gtco.driver.sizes.dynamic_shapes import dims_of
from gtco.frontend.source import check_source, is_program, source_of
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Target, target
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.publish import kept, staging
from gtco.runtime.writing.cross import compiler_for
from gtco.runtime.writing.linking import publish_alone
from gtco.support.alone import alone
from gtco.support.counting import counted
from gtco.support.errors import (
    OptionError,
    guarded,
)
from gtco.support.options import (
    CompileKeywords,
    CompileOptions,
    Quantization,
    QuantizeKeywords,
    check_whole,
    path_of,
)
from gtco.support.sizes import fixed_sizes, number_of_variants, range_of
from gtco.tensor.stage import Stage

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gtco.quantization.report import QuantizationReport, QuantizedModel
    from gtco.quantization.weights_only import QuantizedWeights
    from gtco.search.policy import Policy
    from gtco.tuning.census import Census


def compile_model(
    model: Any,
    example_inputs: Any = None,
    *,
    dynamic_shapes: Any = None,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> CompiledModel:
    """Compile a model and load the result.

    ``model``: a torch ``nn.Module`` with ``example_inputs``, an ``ExportedProgram``, or ONNX as a
    path, a ``ModelProto`` or bytes. ``example_inputs`` are tensors of the shapes and dtypes that
    the model will run with: one, a sequence of them, or a dictionary of keyword arguments; other
    values among them become part of the model. A module is compiled as it is in evaluation mode,
    and its parameters, buffers and training flags are left as they were. Options are the fields of
    :class:`gtco.support.options.CompileOptions`; ``shapes`` goes with ONNX and ExportedPrograms,
    whose dimensions may be symbolic. ``dynamic_shapes`` says which sizes vary, as torch.export's
    does: ``{"x": {0: torch.export.Dim("batch", min=1, max=64)}}``, or plain ``(low, high[, step])``
    for the ``Dim``; it is another way to write ``dims``. Raises a
    :class:`gtco.support.errors.GtcoError` that says what is wrong and what to do.
    """
    chosen = checked(options)
    backend_of(target(chosen.target)).check_loadable(chosen)
    with kept("model") as folder:
        path = folder.path / "model.so"
        report = compile_to_file(
            model,
            path,
            example_inputs,
            dynamic_shapes=dynamic_shapes,
            progress=progress,
            **options,
        )
        return CompiledModel(path, report, folder)


def compile_to_file(
    model: Any,
    output: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    dynamic_shapes: Any = None,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> CompileReport:
    """Compile a model to ``output`` (a ``.so``, with a header beside it); see
    :func:`compile_model`.
    """
    if dynamic_shapes is not None:
        if options.get("dims"):
            raise OptionError("dynamic_shapes and dims both say which sizes vary: give one of them")
        options["dims"] = dims_of(model, example_inputs, dynamic_shapes)
    return compile_to_files([(model, output, example_inputs)], progress=progress, **options)[0]


def aot_compile(
    program: Any,
    output: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> Path:
    """Compile what ``torch.export.export`` gives, to ``output`` (a ``.so``, with a header beside
    it), and return its path. The library has the program's inputs and outputs, in order; it needs
    neither Python nor PyTorch. Options are those of :func:`compile_model`. Raises
    :class:`gtco.support.errors.OptionError` for anything else than an ``ExportedProgram``.
    """
    if isinstance(program, str | os.PathLike) or not is_program(program):
        raise OptionError(
            f"aot_compile takes an ExportedProgram, not a {type(program).__name__}: "
            "gtco.aot_compile(torch.export.export(model, args), 'model.so'); compile_to_file takes "
            "modules, ONNX and files"
        )
    compile_to_file(program, output, progress=progress, **options)
    return Path(output)


def compile_to_files(
    models: Sequence[tuple[Any, str | os.PathLike[str], Any]],
    *,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> list[CompileReport]:
    """Compile several models with the same options, each to its output and with its example inputs
    (None for ONNX); see :func:`compile_model`. What measuring there is goes over all of them: a
    stage that several have is tuned once, and its time counts as often as it occurs in all. The
    libraries are put in place when all of them are made.
    """
    chosen = checked(options)
    found: list[QuantizationReport] = []
    if chosen.precision == "int8":
        models, chosen, found = all_quantized(models, chosen, compile_model, progress or silent)
    libraries = [
        Library(source_of(model), path_of("output", output), inputs, chosen, progress or silent)
        for model, output, inputs in models
    ]
    outputs = [library.output.resolve() for library in libraries]
    if twice := [output for output in outputs if outputs.count(output) > 1]:
        raise OptionError(f"two models would be compiled to the same file '{twice[0]}'")
    make_libraries(libraries, chosen)
    reports = [library.report() for library in libraries]
    for report, quantization in zip(reports, found, strict=False):
        report.quantization = quantization
        report.phases[:0] = quantization.phases
        report.notes[:0] = quantization.notes
    return reports


def quantize(
    model: Any,
    data: Any,
    example_inputs: Any = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[QuantizeKeywords],
) -> QuantizedModel:
    """Quantize a model to int8 by samples, without training.

    ``model`` and ``example_inputs`` are those of :func:`compile_model`. ``data`` is 32 to 256
    samples of what the model will see: the path of a ``.npz`` (an array by input; the first axis
    counts samples), of a ``.npy`` or of a folder of these; an array, or arrays by input; or an
    iterable of these, such as a DataLoader, of whose tuples the first entries are the inputs.
    Options are the fields of :class:`gtco.support.options.Quantization`.

    The result has ``model``, plain ONNX with QuantizeLinear and DequantizeLinear around the
    products by constant weights, ``report``, the verdict on held-out samples and a table of what
    each product loses, and ``save(path)``. ``compile_model`` takes it as a model. Everything is
    deterministic. Raises a :class:`gtco.support.errors.GtcoError` that says what is wrong with the
    model or the data, and a :class:`gtco.support.errors.QuantizationError` for a ``max_drop`` that
    cannot be kept.
    """
    settings = Quantization(**_known(options, Quantization))
    return quantized(model, data, example_inputs, settings, compile_model, progress or silent)


def quantize_weights(
    model: Any,
    example_inputs: Any = None,
    *,
    exclude: Sequence[str] = (),
    bits: int = 8,
    block_size: int | None = None,
) -> QuantizedWeights:
    """Quantize the weights of a model to int8 or int4, and nothing else: no samples are needed.

    ``model`` and ``example_inputs`` are those of :func:`compile_model`; ``exclude`` names products
    whose weights stay float32, as for :func:`quantize`. ``bits`` is 8, or 4 for matrices, while
    convolutions have 8. ``block_size`` (16, 32, 64, 128 or 256) weights of a matrix along k share a
    scale; by default all of an output channel do, and with 4 bits 32. The result has ``model``,
    plain ONNX with a DequantizeLinear behind the weights of each product (of opset 21 or later if
    there are blocks), and ``save(path)``. ``compile_model`` takes it as a model. Raises a
    :class:`gtco.support.errors.GtcoError` that says what is wrong with the model.
    """
    from gtco.quantization import weights_only

    with guarded("quantizing weights"):
        return weights_only.quantize_weights(model, example_inputs, exclude, bits, block_size)


def candidates_to_file(
    model: Any,
    output: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    per_stage: int = 8,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> CompileReport:
    """Write the ``per_stage`` most promising kernels (2 at least) of each heavy stage to
    ``output``, one ``.bundle`` that ``gtco measure`` times on a GPU or a CPU elsewhere; see
    :func:`compile_model`.
    """
    from gtco.driver import candidates, cpu_candidates

    chosen = _one_shape(checked(options))
    machine = target(chosen.target)
    backend = backend_of(machine)
    if isinstance(machine, Target) and machine.name == "native":
        raise OptionError(
            "candidates are for another machine: name its target (--target cuda:..., cortex-a76); "
            "for this one there is gtco tune"
        )
    check_whole("per_stage", per_stage, 2)
    path = path_of("output", output)
    backend.effort(chosen.tune)
    backend.check(chosen)
    compiler_for(backend.isa)
    check_source(source_of(model))
    check_bundle(path, source_of(model))
    beside = path.with_suffix(".so")
    model, example_inputs, chosen = _quantized(model, beside, example_inputs, chosen, progress)
    run = Compilation(model, path.absolute(), example_inputs, chosen, progress or silent)
    with (
        alone(),
        staging(run.output) as folder,
        Workers(chosen.workers or backend.builders) as workers,
    ):
        fused = run.to_stages(machine)
        with run.phase("generate") as say:
            artifact: Artifact | GpuArtifact
            if isinstance(machine, GpuTarget):
                artifact = candidates.bundle(run, fused, per_stage, workers)
            else:
                artifact = cpu_candidates.bundle(run, fused, per_stage, workers)
            made = artifact.metadata["candidates"]
            stages = counted(made["stages"], "stage")
            say(f"{counted(made['kernels'], 'candidate')} of {stages}")
        publish_alone(folder, artifact, run.output)
    return run.report


def _quantized(
    model: Any, output: Path, example_inputs: Any, chosen: CompileOptions, progress: Progress | None
) -> tuple[Any, Any, CompileOptions]:
    """The model, its inputs and the options, quantized if precision int8 asks for that. ``output``:
    the library that a compile would write, in a folder that can be written.
    """
    if chosen.precision != "int8":
        return model, example_inputs, chosen
    one = [(model, output, example_inputs)]
    made, chosen, _ = all_quantized(one, chosen, compile_model, progress or silent)
    ((model, _, example_inputs),) = made
    return model, example_inputs, chosen


def stages_of(
    model: Any,
    example_inputs: Any = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> tuple[Policy, list[Stage]]:
    """The stages that :func:`compile_model` would make of the model, and the policy that it would
    pick kernels by.
    """
    chosen = _one_shape(checked(options))
    nowhere = Path("model.so")
    model, example_inputs, chosen = _quantized(model, nowhere, example_inputs, chosen, progress)
    run = Compilation(model, nowhere, example_inputs, chosen, progress or silent)
    machine = target(chosen.target)
    backend_of(machine).check(chosen)
    with alone():
        fused = run.to_stages(machine)
    return fused.policy, list(fused.partition.stages)


def space_sizes(
    model: Any,
    example_inputs: Any = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[CompileKeywords],
) -> list[Census]:
    """How large the space of each different stage is, and what becomes of configs drawn from it;
    see :func:`stages_of`.
    """
    from gtco.tuning.census import census

    say = progress or silent
    policy, stages = stages_of(model, example_inputs, progress=progress, **options)
    with Workers(checked(options).workers or backend_of(policy.target).builders) as workers:
        return census(
            stages,
            policy.target,
            workers,
            lambda done, total: say("sample", None, f"{done}/{total} stages"),
        )


def _known(given: Mapping[str, Any], options: type) -> dict[str, Any]:
    """The given fields of the options, without those that are None."""
    known = {name: value for name, value in given.items() if value is not None}
    fields = options.__dataclass_fields__  # type: ignore[attr-defined]
    if unknown := sorted(set(known) - set(fields)):
        near = [name for one in unknown for name in difflib.get_close_matches(one, fields, 1)]
        meant = f" (did you mean {', '.join(near)}?)" if near else ""
        raise OptionError(f"unknown option {', '.join(unknown)}{meant}; known: {', '.join(fields)}")
    return known


def checked(given: Mapping[str, Any]) -> CompileOptions:
    """The options by name as one value. Raises :class:`OptionError` for one that is unknown, or
    that cannot be.
    """
    known = _known(given, CompileOptions)
    for name in ("dump", "records"):
        if name in known:
            known[name] = path_of(name, known[name])
    return CompileOptions(**known)


def _one_shape(options: CompileOptions) -> CompileOptions:
    """The options for something that has no variants. Raises :class:`OptionError`."""
    if found := range_of(options.dims):
        raise OptionError(
            f"dims gives '{found[0]}' the range {found[1]}, and this is made for one shape: give "
            "each dimension one size"
        )
    if (number := number_of_variants(options.dims)) > 1:
        raise OptionError(
            f"dims asks for {number} variants, and this is made for one shape: give each "
            "dimension one size"
        )
    return replace(options, shapes={**options.shapes, **fixed_sizes(options.dims)}, dims={})
