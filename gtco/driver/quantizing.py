"""Quantizing on the way to a library: precision ``int8``. The models become those that
``gtco.quantize`` makes of them, and the options those of a quantized file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gtco.driver.backend import backend_of
from gtco.driver.checks import check_output
from gtco.driver.compilation import Progress
from gtco.driver.compiled import CompiledModel
from gtco.driver.sizes.dimensions import open_dimensions
from gtco.frontend.source import check_source, is_onnx, is_program, source_of
from gtco.machine.target import target
from gtco.support.environment import c_compiler
from gtco.support.errors import OptionError, ShapeError
from gtco.support.options import CompileOptions, Quantization, path_of

if TYPE_CHECKING:
    from gtco.quantization.report import QuantizationReport, QuantizedModel

Compile = Callable[..., CompiledModel]  # compile_model, which is in a layer above
Job = tuple[Any, Any, Any]  # a model, its output, its example inputs


def quantized(
    model: Any,
    data: Any,
    example_inputs: Any,
    settings: Quantization,
    compile_model: Compile,
    progress: Progress,
    **common: Any,
) -> QuantizedModel:
    """The model quantized by the data; ``common`` are options of the compiles that this takes."""
    from gtco.quantization.quantize import quantize_model

    def compiled(made: Any, shapes: Mapping[str, Any], say: Callable[[str], None]) -> CompiledModel:
        def news(phase: str, seconds: float | None, detail: Any) -> None:
            say(f"{phase} {detail}".rstrip())

        return compile_model(made, shapes=shapes, cache=False, progress=news, **common)

    return quantize_model(model, data, settings, compiled, progress, example_inputs)


def all_quantized(
    models: Sequence[Job], options: CompileOptions, compile_model: Compile, progress: Progress
) -> tuple[list[Job], CompileOptions, list[QuantizationReport]]:
    """Quantizes the models. Gives the quantized models, the options to compile them with, and the
    reports. Checks the options before it quantizes.
    """
    if options.data is None:
        raise OptionError(
            "precision int8 quantizes the model by samples: give data (--data images.npz). A file "
            "that is quantized already is compiled as it is, with precision fp32"
        )
    backend = backend_of(target(options.target))
    backend.effort(options.tune)
    backend.check(options)
    c_compiler()
    for model, output, _ in models:
        check_source(source_of(model))
        check_output(path_of("output", output).absolute())
        _check_sizes(source_of(model), options)
    data = options.data
    if len(models) > 1 and hasattr(data, "__next__"):
        data = list(data)  # an iterator gives its samples once
    made: list[Job] = []
    reports = []
    common = {name: getattr(options, name) for name in ("simplify", "simplify_timeout", "workers")}
    for model, output, inputs in models:
        found = quantized(
            model, data, inputs, options.quantization, compile_model, progress, **common
        )
        made.append((found.source, output, None))
        reports.append(found.report)
    none = Quantization()
    plain = {name: getattr(none, name) for name in Quantization.__dataclass_fields__}
    # the reports have what each product loses
    chosen = replace(options, precision="fp32", data=None, verify_layers=False, **plain)
    return made, chosen, reports


def _check_sizes(model: Any, options: CompileOptions) -> None:
    """Raises for sizes that the compile after quantizing would miss."""
    if not is_onnx(model) and not is_program(model):
        if options.dims:
            raise OptionError(
                "dims: a module is quantized for the shapes of its example_inputs. Export it with "
                "dynamic dimensions (torch.export.export), and give the program"
            )
        return
    if options.shapes or options.dims:
        return
    opened = open_dimensions(model)
    if opened:
        name = next(iter(opened))
        raise ShapeError(
            f"the dimension {', '.join(map(repr, opened))} of the model has no size: give it one "
            f"(--shape {name}=1, or shapes={{{name!r}: 1}})"
        )
