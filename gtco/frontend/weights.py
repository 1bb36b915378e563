"""Initializers of an ONNX model as numpy arrays, read where they lie: in the file, beside it, in
the message.

Large ones leave the model before anything else looks at it (``strip``): onnxsim and TVM then work
on a skeleton of some kilobytes, models beyond protobuf's 2 GB are no special case, and each weight
is in memory once.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

from gtco.errors import ModelError

# From this size on (bytes) a float initializer is a weight, not a shape or a table that an importer
# wants to look into.
LARGE = 1 << 15
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def strip(
    model: onnx.ModelProto, folder: Path | None
) -> tuple[onnx.ModelProto, dict[str, numpy.ndarray]]:
    """``model`` without its large float initializers, which become graph inputs, and their values
    by name.

    ``folder`` is where external data lies (None: the model came from memory). The model given is
    not changed. Raises ModelError where data is missing or of the wrong size, naming the file and
    the tensor.
    """
    weights: dict[str, numpy.ndarray] = {}
    skeleton = onnx.ModelProto()
    for descriptor, value in model.ListFields():
        if descriptor.name == "graph":
            continue
        if (
            descriptor.is_repeated
            if hasattr(descriptor, "is_repeated")
            else isinstance(value, list)
        ):
            getattr(skeleton, descriptor.name).extend(value)
        else:
            setattr(skeleton, descriptor.name, value)
    graph, source = skeleton.graph, model.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    graph.sparse_initializer.extend(source.sparse_initializer)
    names = {tensor.name for tensor in source.initializer}
    graph.input.extend(value for value in source.input if value.name not in names)
    for tensor in source.initializer:
        array = read_tensor(tensor, folder)
        if tensor.data_type in _FLOATS and array.nbytes >= LARGE:
            weights[tensor.name] = array
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
        elif tensor.data_location == TensorProto.EXTERNAL:
            graph.initializer.append(numpy_helper.from_array(numpy.array(array), tensor.name))
        else:
            graph.initializer.append(tensor)
    return skeleton, weights


def read_tensor(tensor: onnx.TensorProto, folder: Path | None) -> numpy.ndarray:
    """The tensor's value; a memory map where it lies in a file beside the model. Raises
    ModelError."""
    name = tensor.name or "(unnamed)"
    if tensor.data_location == TensorProto.EXTERNAL:
        return _read_external(tensor, folder, name)
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:
        raise ModelError(
            f"initializer '{name}' is damaged ({error}): export the model again"
        ) from error


def _read_external(tensor: onnx.TensorProto, folder: Path | None, name: str) -> numpy.ndarray:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelError(
            f"initializer '{name}' is in the file '{location}' beside the model, but the model was "
            "given as "
            "bytes or as a ModelProto: give the path of the .onnx file instead"
        )
    root = folder.resolve()
    path = (root / location).resolve()
    if not location or not path.is_relative_to(root):
        raise ModelError(
            f"initializer '{name}' points outside the model's folder ('{location}'): gtco does not "
            "read there"
        )
    if not path.is_file():
        raise ModelError(
            f"external data file '{path}' is missing (initializer '{name}' lies in it): copy it "
            "beside the model"
        )
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    count = int(numpy.prod(shape, dtype=numpy.int64))
    offset = int(entries.get("offset", 0))
    if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4):
        raise ModelError(
            f"initializer '{name}' holds 4-bit integers in external data, which gtco does not read"
        )
    if offset + count * dtype.itemsize > path.stat().st_size:
        raise ModelError(
            f"external data file '{path}' is too short: initializer '{name}' needs "
            f"{count * dtype.itemsize} bytes at {offset}, the file has {path.stat().st_size}: copy "
            "it again"
        )
    if count == 0:
        return numpy.empty(shape, dtype)
    return numpy.memmap(path, dtype, "r", offset, shape)
