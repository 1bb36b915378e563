"""Small models that the fuzz test starts from; together they have the operators of the family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
    values: dict[str, np.ndarray],
) -> onnx.ModelProto:
    def infos(shapes: dict[str, tuple[int, ...]]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in shapes.items()
        ]

    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = helper.make_graph(list(nodes), "g", infos(inputs), infos(outputs), tensors)
    opset = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=9)
    onnx.checker.check_model(model)
    return model


def _random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def attention() -> onnx.ModelProto:
    node = helper.make_node
    nodes = [
        node("LayerNormalization", ["x", "g", "b"], ["n"], axis=-1, epsilon=1e-5),
        node("MatMul", ["n", "wqkv"], ["qkv"]),
        node("Split", ["qkv"], ["q", "k", "v"], axis=-1, num_outputs=3),
        node("Reshape", ["q", "heads"], ["q1"]),
        node("Reshape", ["k", "heads"], ["k1"]),
        node("Reshape", ["v", "heads"], ["v1"]),
        node("Transpose", ["q1"], ["q2"], perm=[0, 2, 1, 3]),
        node("Transpose", ["k1"], ["k2"], perm=[0, 2, 3, 1]),
        node("Transpose", ["v1"], ["v2"], perm=[0, 2, 1, 3]),
        node("MatMul", ["q2", "k2"], ["s"]),
        node("Mul", ["s", "scale"], ["s1"]),
        node("Softmax", ["s1"], ["p"], axis=-1),
        node("MatMul", ["p", "v2"], ["o"]),
        node("Transpose", ["o"], ["o1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["o1", "flat"], ["o2"]),
        node("Gemm", ["o3", "w", "bias"], ["y1"], transB=1),
        node("Add", ["y1", "x1"], ["y"]),
    ]
    nodes.insert(15, node("Squeeze", ["o2", "axis"], ["o3"]))
    nodes.insert(16, node("Squeeze", ["x", "axis"], ["x1"]))
    values = {
        "g": _random(8),
        "b": _random(8),
        "wqkv": _random(8, 24),
        "heads": np.array([0, 0, 2, 4]),
        "flat": np.array([0, 0, -1]),
        "axis": np.array([0]),
        "scale": np.array(0.5, np.float32),
        "w": _random(8, 8),
        "bias": _random(8),
    }
    return _model(nodes, {"x": (1, 5, 8)}, {"y": (5, 8)}, values)


def convolution() -> onnx.ModelProto:
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("Conv", ["r", "dw"], ["d"], kernel_shape=[3, 3], group=8, dilations=[1, 1]),
        node("Sigmoid", ["d"], ["g"]),
        node("Mul", ["d", "g"], ["silu"]),
        node("MaxPool", ["silu"], ["p"], kernel_shape=[2, 2], strides=[1, 1]),
        node("Resize", ["p", "", "", "size"], ["u"], mode="linear"),
        node("Pad", ["u", "pads", "zero"], ["padded"], mode="constant"),
        node("ReduceMean", ["padded", "axes"], ["t"], keepdims=0),
        node("Clip", ["t", "zero"], ["y"]),
    ]
    values = {
        "w": _random(8, 3, 3, 3),
        "s": _random(8),
        "b": _random(8),
        "m": _random(8),
        "v": np.abs(_random(8)) + 1,
        "dw": _random(8, 1, 3, 3),
        "size": np.array([1, 8, 6, 6]),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "zero": np.array(0, np.float32),
        "axes": np.array([2, 3]),
    }
    return _model(nodes, {"x": (1, 3, 12, 12)}, {"y": (1, 8)}, values)


def movement() -> onnx.ModelProto:
    node = helper.make_node
    nodes = [
        node("Gather", ["x", "index"], ["t"], axis=1),
        node("Slice", ["t", "from", "to", "ax", "step"], ["s"]),
        node("Concat", ["s", "t"], ["c"], axis=1),
        node("Where", ["mask", "c", "low"], ["w"]),
        node("Expand", ["w", "shape"], ["e"]),
        node("Unsqueeze", ["e", "one"], ["n"]),
        node("Tile", ["n", "repeat"], ["r"]),
        node("Erf", ["r"], ["f"]),
        node("Pow", ["f", "two"], ["p"]),
        node("ReduceMax", ["p", "one"], ["m"], keepdims=0),
        node("Einsum", ["m", "k"], ["y"], equation="bij,jk->bik"),
    ]
    values = {
        "index": np.array([3, 0, 2, 2]),
        "from": np.array([0]),
        "to": np.array([2**31 - 1]),
        "ax": np.array([1]),
        "step": np.array([2]),
        "mask": RNG.random((1, 6, 4)) > 0.3,
        "low": np.array(-1, np.float32),
        "shape": np.array([2, 6, 4]),
        "one": np.array([1]),
        "repeat": np.array([1, 2, 1, 1]),
        "two": np.array(2, np.float32),
        "k": _random(4, 3),
    }
    return _model(nodes, {"x": (1, 4, 4)}, {"y": (2, 6, 3)}, values)


SEEDS = (attention, convolution, movement)
