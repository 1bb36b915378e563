"""Operators that make a tensor: Constant, EyeLike, OneHot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import onnx
from tvm import relax

from gtco.frontend.operators.arguments import (
    Attributes,
    constant_of,
    shape_of,
)


def constant(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    for name, dtype in (
        ("value_float", "float32"),
        ("value_floats", "float32"),
        ("value_int", "int64"),
        ("value_ints", "int64"),
    ):
        if name in attrs:
            return relax.const(numpy.asarray(attrs[name], dtype), dtype)
    return None


def eye_like(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """EyeLike. Its ``dtype`` is a number of ONNX's; TVM reads it as a name."""
    dtype = inputs[0].ty.dtype
    if "dtype" in attrs:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(attrs["dtype"]))
    rows, columns = shape_of(inputs[0])
    return relax.const(numpy.eye(rows, columns, attrs.get("k", 0)), str(dtype))


def one_hot(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """``values[int(indices[..., None] == range(depth))]``. TVM accepts neither floats nor negative
    indices.
    """
    indices, depth, values = inputs[0], constant_of(inputs[1]), inputs[2]
    if depth is None:
        return None
    count, rank = int(depth.reshape(())), len(shape_of(indices))
    axis = attrs.get("axis", -1) % (rank + 1)
    places = builder.emit(relax.op.expand_dims(relax.op.astype(indices, "int64"), axis))
    negative = relax.op.less(places, relax.const(0, "int64"))
    wrapped = relax.op.add(places, relax.const(count, "int64"))
    places = builder.emit(relax.op.where(negative, wrapped, places))
    shape = [count if i == axis else 1 for i in range(rank + 1)]
    hot = relax.op.equal(places, relax.const(numpy.arange(count).reshape(shape), "int64"))
    off, on = (relax.op.strided_slice(values, [0], [i], [i + 1]) for i in range(2))
    return builder.emit(relax.op.where(hot, on, off))
