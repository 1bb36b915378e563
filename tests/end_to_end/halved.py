"""A float32 model as a float16 one, as converters write it, and its meaning in float32.

Converters round the initializers and change the types. Operators that they leave in float32, the
islands, get Casts around them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

LARGEST = float(np.finfo(np.float16).max)
HALF_ULP = 2.0**-11  # of float16: the rounding error, relative to the number
LEAST = 2.0**-25  # the rounding error of its denormal numbers, absolute


@dataclass(frozen=True)
class Halved:
    """``model`` in float16; ``meaning``, the same values and operators in float32."""

    model: onnx.ModelProto
    meaning: onnx.ModelProto

    def right(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The right outputs in float32, for the model's own inputs."""
        wide = {n: x.astype(np.float32) if x.dtype == np.float16 else x for n, x in feeds.items()}
        return _run(self.meaning, wide)

    def peer(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """ONNX Runtime's outputs of the float16 model."""
        return _run(self.model, feeds)


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def halved(model: onnx.ModelProto, islands: Collection[str] = ()) -> Halved:
    """The model in float16; ``islands`` are the types of the operators that stay float32."""
    half, meaning = onnx.ModelProto(), onnx.ModelProto()
    half.CopyFrom(model)
    meaning.CopyFrom(model)
    for tensor in _tensors(meaning):
        tensor.CopyFrom(numpy_helper.from_array(_rounded(tensor).astype(np.float32), tensor.name))
    for tensor in _tensors(half):
        tensor.CopyFrom(numpy_helper.from_array(_rounded(tensor), tensor.name))
    graph = half.graph
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    body = list(graph.node)
    del graph.node[:]
    for node in body:
        graph.node.extend(_island(node) if node.op_type in islands else [node])
    onnx.checker.check_model(half, full_check=True)
    return Halved(half, meaning)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The float32 tensors of the model."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            yield tensor
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                yield attribute.t


def _rounded(tensor: onnx.TensorProto) -> np.ndarray:
    """Rounds to float16; finite values beyond its range become its largest."""
    array = numpy_helper.to_array(tensor)
    near = np.where(np.isfinite(array), np.clip(array, -LARGEST, LARGEST), array)
    return near.astype(np.float16)


def _island(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The operator in float32 between Casts."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    for i, name in enumerate(node.input):
        if name:
            made.input[i] = f"{node.output[0]}_in{i}"
            yield helper.make_node("Cast", [name], [made.input[i]], to=TensorProto.FLOAT)
    for i, name in enumerate(node.output):
        made.output[i] = f"{name}_wide"
    yield made
    for i, name in enumerate(node.output):
        yield helper.make_node("Cast", [made.output[i]], [name], to=TensorProto.FLOAT16)


def assert_rounded(got: np.ndarray, right: np.ndarray, tolerance: float = 2e-5) -> None:
    """Checks that ``got`` is ``right`` rounded to float16, after an error of at most ``tolerance``
    of the largest magnitude.
    """
    assert got.dtype == np.float16 and got.shape == right.shape
    wide, scale = got.astype(np.float64), float(np.abs(right).max())
    bound = HALF_ULP * np.abs(right) + LEAST + tolerance * scale
    worst = np.max(np.abs(wide - right) - bound)
    assert worst <= 0, f"off by {worst:.1e} more than allowed, of outputs up to {scale:.1e}"
