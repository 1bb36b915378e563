"""Activations and additions of ONNX Runtime's domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import MICROSOFT, Writer

# The attributes of an activation that is fused into a product or a convolution, in the order in
# which its parameters are given.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "Softplus": (),
    "Softsign": (),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "Elu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "HardSigmoid": ("alpha", "beta"),
}


def activation(w: Writer, x: str, kind: str, parameters: Sequence[float]) -> str:
    """A fused activation, by its name and its parameters. Missing parameters have the operator's
    defaults.
    """
    if not kind:
        return x
    if kind == "Clip":
        low, high = parameters[:2]
        return w.clip(x, low, high)
    if kind == "QuickGelu":
        return quick_gelu_of(w, x, parameters[0] if parameters else 1.702)
    if kind == "Gelu":
        return w.add("Gelu", x, domain=MICROSOFT)
    if kind not in _PARAMETERS:
        raise Unsuitable(f"its activation '{kind}' is not supported")
    named: dict[str, Any] = dict(zip(_PARAMETERS[kind], parameters, strict=False))
    return w.add(kind, x, **named)


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def quick_gelu_of(w: Writer, x: str, alpha: float) -> str:
    """x * sigmoid(alpha * x)."""
    return w.add("Mul", x, w.add("Sigmoid", w.scaled(x, alpha)))


def quick_gelu(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    return [quick_gelu_of(walk.writer, node.input[0], attributes(node).get("alpha", 1.702))]


def bias_split_gelu(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """left * gelu(right); left and right are the halves of x + bias."""
    w = walk.writer
    x = w.add("Add", *node.input[:2])
    shape = w.shape(x)
    half = shape[-1] // 2
    left, right = w.split(x, [half, half], len(shape) - 1)
    return [w.add("Mul", left, w.add("Gelu", right, domain=MICROSOFT))]


def bias_add(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    x, bias, skip = node.input[:3]
    w = walk.writer
    return [w.add("Add", w.add("Add", x, bias), skip)]


def bias_softmax(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Softmax over all axes from ``axis`` on. The bias lacks the leading axes of the data or has
    size 1 there; with ``is_inner_broadcast`` this holds for the axes before ``axis``.
    """
    w, attrs = walk.writer, attributes(node)
    x, bias = node.input[:2]
    shape, given = w.shape(x), w.shape(bias)
    axis = attrs.get("axis", 1) % len(shape)
    if len(given) != len(shape) and attrs["is_inner_broadcast"]:
        kept = len(given) - (len(shape) - axis)
        middle = (1,) * (len(shape) - len(given))
        bias = w.reshape(bias, (*given[:kept], *middle, *given[kept:]))
    x = w.add("Add", x, bias)
    flat = w.reshape(x, (*shape[:axis], -1)) if axis < len(shape) - 1 else x
    return [w.reshape(w.add("Softmax", flat, axis=axis), shape)]


def bias_dropout(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """x + bias + residual: nothing is dropped at inference."""
    w = walk.writer
    x, bias, residual, _, training = (*node.input, "", "", "")[:5]
    known = w.values.get(training) if training else False
    if known is None or bool(known):
        raise Unsuitable("its training_mode is set: export the model after model.eval()")
    if len(node.output) > 1 and node.output[1]:
        raise Unsuitable("its mask is used, but inference has none: export after model.eval()")
    x = w.add("Add", x, bias)
    return [w.add("Add", x, residual) if residual else x]
