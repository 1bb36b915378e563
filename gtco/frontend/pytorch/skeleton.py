"""A program -> ONNX, by torch's own exporter. Weights stay in torch's memory: only a skeleton of
some kilobytes becomes ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from gtco.frontend.pytorch.calls import first_line, needed_torch
from gtco.frontend.pytorch.dimensions import dimension_names, name_dimensions
from gtco.frontend.pytorch.export import Exported
from gtco.frontend.pytorch.mistakes import refuse_mistakes
from gtco.frontend.pytorch.resize import keep_sizes
from gtco.frontend.pytorch.translations import translations
from gtco.frontend.weights import LARGE
from gtco.support.errors import ModelError, installing
from gtco.support.quiet import quiet

if TYPE_CHECKING:
    import onnx

_OPSET = 20


def onnx_skeleton(exported: Exported) -> tuple[onnx.ModelProto, dict[str, numpy.ndarray]]:
    """The program as ONNX by torch's exporter, and its large weights by name, which are inputs
    there. Raises ModelError, and UnsupportedError for what the exporter gets wrong.
    """
    torch = needed_torch()
    program: Any = exported.program
    refuse_mistakes(program)
    try:
        on = bool(exported.autocast)
        cast = getattr(torch, exported.autocast) if on else None
        with quiet(), torch.no_grad(), torch.autocast("cpu", cast, enabled=on):
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=_OPSET,
                verbose=False,
                optimize=False,
                custom_translation_table=translations(torch),
            )
            _fold(onnx_program.model, exported.names)
        _restore_input_names(onnx_program.model, program.graph_signature.user_inputs)
        skeleton, weights = _strip(onnx_program.model)
    except ImportError as error:
        raise ModelError(f"exporting needs {error.name}: {installing('torch')}") from error
    except Exception as error:
        raise ModelError(
            f"{exported.kind} cannot be exported to ONNX: {_reason(error)}. Export it "
            "yourself with torch.onnx.export and give gtco the file"
        ) from error
    keep_sizes(skeleton)
    name_dimensions(skeleton.graph, dimension_names(program))
    return skeleton, weights


def _fold(model: Any, names: Sequence[str] | None) -> None:
    """Computes what depends on constants and sizes alone, and names the outputs, in place.

    Torch's own ``optimize`` also rewrites. Its rules take 1e-8 for 0 and drop it from sums, so that
    logarithms and divisions lose their guard, and they make one clamp of two that are apart.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    for rule in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.OutputFixPass(),
    ):
        rule(model)
    for output, name in zip(model.graph.outputs, names or (), strict=False):
        output.name = name
    common.NameFixPass()(model)


def _restore_input_names(model: Any, names: Sequence[Any]) -> None:
    """Renames inputs such as ``x_orig`` to ``x``. The exporter writes ``x_orig`` if an input is an
    output too, and gives the name ``x`` to the output; the output becomes ``x_out``.
    """
    taken = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    for value in model.graph.inputs:
        name = value.name.removesuffix("_orig")
        if name == value.name or name not in names or value.name in names:
            continue
        for output in model.graph.outputs:
            if output.name == name:
                output.name = f"{name}_out"
                while output.name in taken:
                    output.name += "_out"
                taken.add(output.name)
        value.name = name


def _strip(model: Any) -> tuple[Any, dict[str, numpy.ndarray]]:
    """The exporter's model (onnx_ir) as ONNX without its large weights, and these weights as numpy
    views of torch's memory.
    """
    import onnx_ir

    weights: dict[str, numpy.ndarray] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < LARGE or not tensor.dtype.is_floating_point():
            continue
        weights[name] = tensor.numpy()
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    return onnx_ir.to_proto(model), weights


def _reason(error: BaseException) -> str:
    """The error of torch's exporter, and its first cause: torch names a node and refers to a stack
    trace, and only the first cause says what is wrong with it.
    """
    said, first = first_line(error), error
    while first.__cause__ is not None:
        first = first.__cause__
    said = said.removesuffix(".").removesuffix("See the stack trace for more information").strip()
    why = first_line(first)
    return said.rstrip(".") if why in said or said in why else f"{said.rstrip('.')}: {why}"
