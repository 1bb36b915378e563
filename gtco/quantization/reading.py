"""A model from any source as one ONNX message with its weights inside, of opset 13 or later, as
quantized weights need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import onnx
from onnx import helper, numpy_helper

from gtco.driver.checks import check_source, is_onnx, source_of
from gtco.frontend.identity import SOURCE
from gtco.frontend.onnx import read_onnx
from gtco.frontend.quantized import is_quantized
from gtco.quantization.data import Spec
from gtco.support.errors import ModelError, OptionError

OPSET = 13  # the first with scales for each channel
OPSET_OF_BLOCKS = 21  # the first with scales for blocks, and with int4
MOST_BYTES = 2_000_000_000  # that one message holds, with room for the graph


def read_model(
    model: Any, example_inputs: Any = None, opset: int = OPSET
) -> onnx.ModelProto:
    """The model that ``compile_model`` would compile of these arguments, in ``opset`` or later.
    Raises :class:`ModelError`.
    """
    model = source_of(model)
    check_source(model)
    if is_onnx(model):
        if example_inputs is not None:
            raise OptionError(
                "example_inputs is for PyTorch modules; an ONNX model has its inputs' shapes"
            )
        source = read_onnx(model)
        read, known = _whole(source.skeleton, source.weights), source.identity
    else:
        read, known = _whole(*_exported(model, example_inputs)), ""
    if is_quantized(read):
        raise ModelError(
            "the model is quantized already: gtco compile takes it as it is. Give the float32 "
            "model that it was made from"
        )
    read = _upgraded(read, opset)
    if known:
        helper.set_model_props(read, {**_properties(read), SOURCE: known})
    return read


def _properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _exported(model: Any, example_inputs: Any) -> tuple[onnx.ModelProto, Mapping[str, Any]]:

    from gtco.frontend.pytorch import export, load_program, onnx_skeleton

    if isinstance(model, Path):
        model = load_program(model)
    return onnx_skeleton(export(model, example_inputs))


def _whole(skeleton: onnx.ModelProto, weights: Mapping[str, numpy.ndarray]) -> onnx.ModelProto:
    """The model with its weights as initializers."""
    if (size := sum(value.nbytes for value in weights.values())) > MOST_BYTES:
        raise ModelError(
            f"the model has {size / 1e9:.1f} GB of weights, and gtco quantizes models of up to "
            f"{MOST_BYTES / 1e9:.0f} GB"
        )
    whole = onnx.ModelProto()
    whole.CopyFrom(skeleton)
    del whole.graph.input[:]
    whole.graph.input.extend(v for v in skeleton.graph.input if v.name not in weights)
    for name, value in weights.items():
        whole.graph.initializer.append(numpy_helper.from_array(numpy.asarray(value), name))
    for node in whole.graph.node:
        node.name = node.name or (node.output[0] if node.output else "")
    return whole


def _upgraded(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in this opset or a later one."""
    known = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 1)
    if known >= opset:
        return model
    try:
        return onnx.version_converter.convert_version(model, opset)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the model is of opset {known}, quantized weights need {opset}, and ONNX cannot "
            f"convert it ({said}): export it again with opset_version={opset} or later"
        ) from error


def input_specs(model: onnx.ModelProto) -> list[Spec]:
    """The model's inputs. Raises :class:`ModelError` for one that is no tensor."""
    inside = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in inside:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise ModelError(f"input '{value.name}' has no shape: export the model again with one")
        shape = tuple(d.dim_value if d.dim_value > 0 else None for d in kind.shape.dim)
        found.append(Spec(value.name, helper.tensor_dtype_to_np_dtype(kind.elem_type), shape))
    return found
