"""A stage and a model that are tuned in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.tensor.stage import Operator, Stage, StageInput, TensorType


def linear(m: int = 50, k: int = 72, n: int = 96) -> Stage:
    """x w + b, gelu."""
    x, w, b, y = (TensorType(s) for s in ((m, k), (k, n), (n,), (m, n)))
    inputs = (StageInput("x", x), StageInput("w", w, True), StageInput("b", b, True))
    return Stage(
        inputs,
        (
            Operator("matmul", ("x", "w"), "p", y),
            Operator("add", ("p", "b"), "s", y),
            Operator("gelu", ("s",), "y", y),
        ),
    ).canonical


def integers(m: int = 50, k: int = 72, n: int = 96) -> Stage:
    """Quantized x by quantized weights: the sums, the zero point's part, and the scale."""
    c, y = TensorType((m, n), "int32"), TensorType((m, n))
    inputs = (
        StageInput("x", TensorType((m, k), "uint8")),
        StageInput("w", TensorType((k, n), "int8"), True),
        StageInput("z", TensorType((n,), "int32"), True),
        StageInput("s", TensorType((n,)), True),
    )
    return Stage(
        inputs,
        (
            Operator("matmul", ("x", "w"), "p", c),
            Operator("add", ("p", "z"), "a", c),
            Operator("cast", ("a",), "f", y),
            Operator("multiply", ("f", "s"), "y", y),
        ),
    ).canonical


def small_model() -> Any:
    """Two matmuls and a softmax."""
    onnx = pytest.importorskip("onnx")
    text = """<ir_version: 10, opset_import: ["": 21]>
    m (float[37, 48] x) => (float[37, 40] y)
    <float[48, 96] w = {W}, float[96, 40] v = {V}>
    { h = MatMul(x, w)  r = Relu(h)  z = MatMul(r, v)  y = Softmax<axis = -1>(z) }"""
    random = np.random.default_rng(5)
    for name, size in (("W", 48 * 96), ("V", 96 * 40)):
        values = ", ".join(f"{v:.6f}" for v in random.standard_normal(size) / 8)
        text = text.replace("{" + name + "}", "{" + values + "}")
    return onnx.parser.parse_model(text)
