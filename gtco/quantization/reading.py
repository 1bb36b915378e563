"""A model from any source as ONNX of opset 13 or later, as quantized weights need. Its large
weights are beside the message, by name, and stay in their file until they are read. So a model may
have more of them than a message of protobuf holds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from gtco.frontend.identity import SOURCE
from gtco.frontend.onnx import OnnxSource, read_onnx
from gtco.frontend.quantized import is_quantized
from gtco.frontend.source import check_source, is_onnx, source_of
from gtco.quantization.data import Spec
from gtco.support.errors import ModelError, OptionError

OPSET = 13  # the first with scales for each channel
OPSET_OF_BLOCKS = 21  # the first with scales for blocks, and with int4


def read_model(model: Any, example_inputs: Any = None, opset: int = OPSET) -> OnnxSource:
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
    else:
        source = _exported(model, example_inputs)
    read = source.skeleton
    if is_quantized(read):
        raise ModelError(
            "the model is quantized already: gtco compile takes it as it is. Give the float32 "
            "model that it was made from"
        )
    read = _upgraded(read, opset)
    for node in read.graph.node:
        node.name = node.name or (node.output[0] if node.output else "")
    if source.identity:
        helper.set_model_props(read, {**_properties(read), SOURCE: source.identity})
    return replace(source, skeleton=read)


def _properties(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _exported(model: Any, example_inputs: Any) -> OnnxSource:
    from gtco.frontend.pytorch.export import export, load_program
    from gtco.frontend.pytorch.skeleton import onnx_skeleton

    if isinstance(model, Path):
        model = load_program(model)
    skeleton, weights = onnx_skeleton(export(model, example_inputs))
    return OnnxSource(skeleton, weights, "")


def _upgraded(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """A copy of the model, in this opset or a later one."""
    known = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 1)
    if known >= opset:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return copy
    try:
        return onnx.version_converter.convert_version(model, opset)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the model is of opset {known}, quantized weights need {opset}, and ONNX cannot "
            f"convert it ({said}): export it again with opset_version={opset} or later"
        ) from error


def input_specs(source: OnnxSource) -> list[Spec]:
    """The model's inputs. Raises :class:`ModelError` for one that is not a tensor."""
    graph = source.skeleton.graph
    inside = {*source.weights, *(tensor.name for tensor in graph.initializer)}
    found = []
    for value in graph.input:
        if value.name in inside:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise ModelError(f"input '{value.name}' has no shape: export the model again with one")
        shape = tuple(d.dim_value if d.dim_value > 0 else None for d in kind.shape.dim)
        found.append(Spec(value.name, helper.tensor_dtype_to_np_dtype(kind.elem_type), shape))
    return found
