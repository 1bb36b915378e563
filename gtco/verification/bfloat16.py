"""A bfloat16 file in float32, so that ONNX Runtime can run it: its Python calls take no bfloat16,
and few of its operators have kernels for that type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import numpy_dtype

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], Sequence[Array]]


def at_the_border(model: Any) -> bool:
    """True if an input or an output of this ModelProto is a bfloat16 tensor."""
    return any(_is_bfloat16(value) for value in (*model.graph.input, *model.graph.output))


def in_float32(model: Any) -> bytes | None:
    """The ModelProto, serialized, with float32 in place of bfloat16, its inputs and outputs too.
    None if it has no bfloat16. The model has its external data and no local functions.
    """
    import onnx

    from gtco.support.onnx_float32 import widen

    wide, _, changed = widen(model, {}, onnx.TensorProto.BFLOAT16)
    if not changed:
        return None
    results = {value.name for value in wide.graph.output if _is_bfloat16(value)}
    for node in wide.graph.node:
        if node.op_type == "Cast" and results & set(node.output):
            node.attribute[0].i = onnx.TensorProto.FLOAT
    for value in (*wide.graph.input, *wide.graph.output):
        if _is_bfloat16(value):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return bytes(wide.SerializeToString())


def rounded(model: Any, run: Run) -> Run:
    """Runs what :func:`in_float32` made of ``model`` as the model itself: inputs of bfloat16 are
    widened, and outputs that are bfloat16 in the model are rounded.
    """
    bfloat16 = numpy_dtype("bfloat16")
    narrow = [_is_bfloat16(value) for value in model.graph.output]

    def wide(array: Array) -> Array:
        return array.astype(np.float32) if array.dtype == bfloat16 else array

    def call(inputs: Mapping[str, Array]) -> Sequence[Array]:
        found = run({name: wide(array) for name, array in inputs.items()})
        return [y.astype(bfloat16) if n else y for y, n in zip(found, narrow, strict=True)]

    return call


def _is_bfloat16(value: Any) -> bool:
    import onnx

    return bool(value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16)
