"""Writes a quantized model: one file, or if it is large a file and its weights beside it.

A message of protobuf holds 2 GB, and is in memory twice while it is written. So the weights of a
larger model go to ``NAME.onnx.data``, one after the other, as onnx itself and other tools write and
read external data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import OnnxSource
from gtco.frontend.weights import whole
from gtco.runtime.publish import staging, write_error, write_whole
from gtco.support.errors import OptionError
from gtco.support.later import Later, read
from gtco.support.options import check_place

MOST_BYTES = 1_000_000_000  # bytes of weights in the model's own file
_ALIGNED = 4096  # so that a weight can be mapped into memory by itself
_PART = 1 << 26  # bytes that are written at once


def data_path(path: Path) -> Path:
    """Where the weights of the model are, if they are not in its file."""
    return path.with_name(f"{path.name}.data")


def write_model(path: Path, source: OnnxSource) -> Path:
    """Writes the model. A half-written file never has the name, and neither do a model and weights
    that are not of each other. Raises :class:`~gtco.support.errors.OptionError` and
    :class:`~gtco.support.errors.BuildError`.
    """
    size = sum(map(_stored, source.weights.values()))
    if size <= MOST_BYTES:
        content = whole(source.skeleton, source.weights).SerializeToString()
        return write_whole(path, content)
    check_data_place(path, source)
    skeleton, places = _placed(source, data_path(path).name)
    content = skeleton.SerializeToString()

    def weights(file: IO[bytes]) -> None:
        for name, offset in places.items():
            file.write(bytes(offset - file.tell()))
            _write(file, source.weights[name])

    check_place(path)
    with staging(path) as folder:
        try:
            made = _made(folder / data_path(path).name, weights)
            model = _made(folder / path.name, lambda file: file.write(content))
            # an older model never has the new weights
            path.unlink(missing_ok=True)
            os.replace(made, data_path(path))
            os.replace(model, path)
        except OSError as error:
            raise write_error(path, error, size + len(content)) from error
    return path


def check_data_place(path: Path, source: OnnxSource) -> None:
    """Raises :class:`OptionError` if weights of the float model are where the new ones would go."""
    place = data_path(path)
    if place.exists() and any(file.exists() and place.samefile(file) for file in source.files):
        raise OptionError(
            f"the weights of '{path}' would be written over '{place}', which has those of the "
            "float model: give another name"
        )


def _made(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    """A file with what ``write`` writes, on the disk."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return path


def _placed(source: OnnxSource, location: str) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The model with its weights in the file of this name, and where each begins there."""
    skeleton = onnx.ModelProto()
    skeleton.CopyFrom(source.skeleton)
    graph = skeleton.graph
    del graph.input[:]
    graph.input.extend(v for v in source.skeleton.graph.input if v.name not in source.weights)
    places, end = {}, 0
    for name, value in source.weights.items():
        end += -end % _ALIGNED
        places[name] = end
        tensor = graph.initializer.add(name=name, dims=value.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor.data_location = TensorProto.EXTERNAL
        stored = _stored(value)
        for key, entry in (("location", location), ("offset", end), ("length", stored)):
            tensor.external_data.add(key=key, value=str(entry))
        end += stored
    return skeleton, places


def _stored(value: numpy.ndarray | Later) -> int:
    """The bytes of a weight in a file."""
    return -(-value.size // 2) if _packed(value) else value.nbytes


def _packed(value: numpy.ndarray | Later) -> bool:
    """True for integers of 4 bits, of which a byte in a file has two."""
    return value.dtype.name in ("int4", "uint4")


def _write(file: IO[bytes], given: numpy.ndarray | Later) -> None:
    value = read(given)
    if _packed(value):
        file.write(numpy_helper.from_array(value).raw_data)
        return
    content = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
    for start in range(0, content.size, _PART):
        file.write(content[start : start + _PART].data)
