"""Initializers of an ONNX model as numpy arrays. They are read where they are: in the file, beside
it, or in the message.

Large initializers are removed from the model before anything else reads it (``strip``). So onnxsim
and TVM work on a skeleton of some kilobytes, models beyond protobuf's 2 GB are not a special case,
and each weight is in memory once. ``whole`` puts them back. Weights of less than a byte are
unpacked when they are read (:mod:`gtco.support.later`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.nbits import packed_weights
from gtco.support.errors import ModelError
from gtco.support.later import Later
from gtco.support.onnx_messages import check_sizes, inner_tensors, is_repeated, nodes

# An initializer of this size (bytes) or more is a weight, if it is of floats, is dequantized or is
# packed for products. A smaller one may be a shape or some numbers that an importer needs.
LARGE = 1 << 15
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_STEPS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)
# Types that are read directly from an external file: their elements are whole bytes.
_MAPPED = {
    *_FLOATS,
    *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
    *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    TensorProto.BOOL,
}
# Elements in a byte of the types whose elements are less than a byte.
_PACKED = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4), 2),
    **dict.fromkeys((TensorProto.INT2, TensorProto.UINT2), 4),
}
Weight: TypeAlias = numpy.ndarray | Later


def strip(
    model: onnx.ModelProto, source: Path | None
) -> tuple[onnx.ModelProto, dict[str, Weight]]:
    """``model`` without its large initializers of floats, of integers that are dequantized or cast
    to floats and of weights of MatMulNBits, and their values by name. They become graph inputs.

    ``source`` is the model's file; external data is beside it (None: the model came from memory).
    The given model is not changed. Raises ModelError, which names the file and the tensor, if data
    is missing or of the wrong size.
    """
    weights: dict[str, Weight] = {}
    skeleton = onnx.ModelProto()
    for descriptor, value in model.ListFields():
        if descriptor.name == "graph":
            continue
        if is_repeated(descriptor):
            getattr(skeleton, descriptor.name).extend(value)
        else:
            setattr(skeleton, descriptor.name, value)
    # Below version 4 an initializer must be an input too, and here only large ones are.
    skeleton.ir_version = max(skeleton.ir_version, 4)
    graph, given = skeleton.graph, model.graph
    graph.name = given.name or "graph"
    graph.node.extend(given.node)
    graph.output.extend(given.output)
    graph.value_info.extend(given.value_info)
    graph.sparse_initializer.extend(given.sparse_initializer)
    # These are small by their use, so their data comes into the skeleton.
    for tensor in inner_tensors(graph):
        check_sizes(tensor)
        if tensor.data_location == TensorProto.EXTERNAL:
            inner = numpy.array(read_tensor(tensor, source))
            tensor.CopyFrom(numpy_helper.from_array(inner, tensor.name))
    names = {tensor.name for tensor in given.initializer}
    graph.input.extend(value for value in given.input if value.name not in names)
    dequantized, packed = _dequantized(graph), packed_weights(graph)
    for tensor in given.initializer:
        array = read_tensor(tensor, source)
        weight = tensor.data_type in _FLOATS
        weight |= tensor.data_type in _STEPS and tensor.name in dequantized
        if tensor.data_type == TensorProto.UINT8 and tensor.name in packed:
            weight = packed[tensor.name].nbytes == array.size
        if weight and array.nbytes >= LARGE:
            weights[tensor.name] = array
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
        elif tensor.data_location == TensorProto.EXTERNAL:
            graph.initializer.append(numpy_helper.from_array(numpy.array(array), tensor.name))
        else:
            graph.initializer.append(tensor)
    return skeleton, weights


def _dequantized(graph: onnx.GraphProto) -> set[str]:
    """The tensors that are read only to become floats."""
    found: set[str] = set()
    others = {value.name for value in graph.output}
    for node in nodes(graph):
        alone = _dequantizes(node)
        found.update(node.input[:1] if alone else ())
        others.update(node.input[1:] if alone else node.input)
    return found - others


def _dequantizes(node: onnx.NodeProto) -> bool:
    """True for a node that makes floats of the integers that are its first input."""
    if node.domain not in ("", "ai.onnx"):
        return node.op_type == "GatherBlockQuantized"
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i in _FLOATS for a in node.attribute)
    return node.op_type == "DequantizeLinear"


def whole(skeleton: onnx.ModelProto, weights: Mapping[str, Weight]) -> onnx.ModelProto:
    """The model with its weights inside: what :func:`strip` took apart."""
    made = onnx.ModelProto()
    made.CopyFrom(skeleton)
    del made.graph.input[:]
    made.graph.input.extend(v for v in skeleton.graph.input if v.name not in weights)
    for name, value in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(numpy.asarray(value), name))
    return made


def files_of(weights: Mapping[str, Weight]) -> frozenset[Path]:
    """The files beside the model in which weights lie."""
    mapped = [value.filename for value in weights.values() if isinstance(value, numpy.memmap)]
    return frozenset(Path(name) for name in mapped if name is not None)


def read_tensor(tensor: onnx.TensorProto, source: Path | None) -> Weight:
    """The tensor's value; a memory map if it is in a file beside the model. Raises ModelError."""
    name = tensor.name or "(unnamed)"
    check_sizes(tensor)
    if tensor.data_location == TensorProto.EXTERNAL:
        return _read_external(tensor, source, name)
    try:
        shape, packed = tuple(tensor.dims), _PACKED.get(tensor.data_type)
        data = tensor.raw_data if packed else b""
        if packed and len(data) == -(-math.prod(shape) // packed) >= LARGE // 8:
            return _unpacked(tensor.data_type, shape, lambda: data)
        return numpy_helper.to_array(tensor)
    except Exception as error:
        raise ModelError(
            f"initializer '{name}' is damaged ({error}): export the model again"
        ) from error


def _unpacked(kind: int, shape: tuple[int, ...], data: Callable[[], bytes]) -> Later:
    """Integers of less than a byte, unpacked whenever they are read."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    return Later(
        shape,
        dtype,
        lambda: numpy_helper.to_array(TensorProto(data_type=kind, dims=shape, raw_data=data())),
    )


def _read_external(tensor: onnx.TensorProto, source: Path | None, name: str) -> Weight:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if source is None:
        raise ModelError(
            f"initializer '{name}' is in the file '{location}' beside the model, but the model was "
            "given as bytes or as a ModelProto: give the path of the .onnx file instead"
        )
    path = _external_file(location, source, name)
    if tensor.data_type not in _MAPPED and tensor.data_type not in _PACKED:
        raise ModelError(
            f"initializer '{name}' has elements of type {tensor.data_type} in external data, which "
            "gtco does not read"
        )
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    packed = _PACKED.get(tensor.data_type)
    nbytes = -(-math.prod(shape) // packed) if packed else math.prod(shape) * dtype.itemsize
    offset = _number(entries, "offset", 0, name)
    length = _number(entries, "length", nbytes, name)
    if length != nbytes:
        raise ModelError(
            f"initializer '{name}' is damaged: its shape {list(shape)} takes {nbytes} bytes, but "
            f"{length} are given in '{location}': export the model again"
        )
    if offset + nbytes > path.stat().st_size:
        raise ModelError(
            f"external data file '{path}' is too short: initializer '{name}' needs "
            f"{nbytes} bytes at {offset}, the file has {path.stat().st_size}: copy it again"
        )
    if nbytes == 0:
        return numpy.empty(shape, dtype)
    try:
        if packed:
            data = numpy.memmap(path, numpy.uint8, "r", offset, (nbytes,))
            return _unpacked(tensor.data_type, shape, data.tobytes)
        return numpy.memmap(path, dtype, "r", offset, shape)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read initializer '{name}' from '{path}': {error}") from error


def _external_file(location: str, source: Path, name: str) -> Path:
    """The file with the data, in the model's folder. In a folder of links, such as Hugging Face's
    cache, the links may lead to the folder of the model's real file or to the cache's blobs.
    """
    outside = ModelError(
        f"initializer '{name}' points outside the model's folder ('{location}'): gtco does not "
        "read there. Copy the data beside the model"
    )
    lexical = os.path.normpath(location)
    if not location or "\0" in location or os.path.isabs(lexical) or lexical.startswith(".."):
        raise outside
    folder = source.absolute().parent
    roots = [folder, source.resolve().parent]
    revisions = [f for f in (folder, *folder.parents) if f.parent.name == "snapshots"]
    roots += [revision.parents[1] / "blobs" for revision in revisions]
    try:
        path = (folder / location).resolve()
        inside = any(path.is_relative_to(root.resolve()) for root in roots)
        found = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name too long
        raise ModelError(
            f"external data file '{location}' cannot be found (initializer '{name}'): {error}"
        ) from error
    if not inside:
        raise outside
    if not found:
        raise ModelError(
            f"external data file '{path}' is missing (initializer '{name}' is in it): copy it "
            "beside the model"
        )
    return path


def _number(entries: dict[str, str], key: str, default: int, name: str) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ModelError(
            f"initializer '{name}' is damaged: the {key} '{text[:40]}' of external data is not a "
            "number of bytes: export the model again"
        )
    return int(text)
