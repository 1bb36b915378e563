"""Products and convolutions of ONNX Runtime's domain, with a fused transposition, factor, addend or
activation, or with channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.pointwise import activation, text
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import MICROSOFT, Writer

_CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_GEMM = ("alpha", "beta", "transA", "transB")


def fused_matmul(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """alpha * (a @ b). Two flags transpose each operand: ``trans`` swaps the last two axes,
    ``transBatch`` moves the first axis after the other batch axes.
    """
    w, attrs = walk.writer, attributes(node)
    a, b = (_turned(w, x, attrs, side) for x, side in zip(node.input, "AB", strict=True))
    y = w.scaled(w.add("MatMul", a, b), attrs.get("alpha", 1.0))
    return [activation(w, y, text(attrs.get("activation", "")), _parameters(attrs))]


def _turned(w: Writer, x: str, attrs: dict[str, Any], side: str) -> str:
    order = list(range(len(w.shape(x))))
    if len(order) < 2:
        return x
    if attrs.get(f"transBatch{side}", 0):
        order = [*order[1:-1], 0, order[-1]]
    if attrs.get(f"trans{side}", 0):
        order[-2:] = reversed(order[-2:])
    return w.transpose(x, order)


def _parameters(attrs: dict[str, Any]) -> list[float]:
    """The parameters of an activation that has an attribute for each."""
    names = [f"activation_{name}" for name in ("alpha", "beta", "gamma")]
    given = [attrs[name] for name in names if name in attrs]
    if text(attrs.get("activation", "")) == "Selu":  # its second parameter is gamma
        given = [attrs[name] for name in (names[0], names[2]) if name in attrs]
    return given


def fused_gemm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w, attrs = walk.writer, attributes(node)
    y = w.add("Gemm", *node.input, **{k: v for k, v in attrs.items() if k in _GEMM})
    return [activation(w, y, text(attrs.get("activation", "")), _parameters(attrs))]


def gemm_fast_gelu(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    x, weight, *bias = node.input
    w = walk.writer
    return [w.add("FastGelu", w.add("MatMul", x, weight), *bias, domain=MICROSOFT)]


def fused_conv(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """activation(conv(x) + z)."""
    return [_convolution(walk.writer, node, *_padded(node, 4))]


def nhwc_fused_conv(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """The same as ``fused_conv``, with channels last in x, z and the result."""
    w = walk.writer
    x, weight, bias, z = _padded(node, 4)
    x, z = (channels_first(w, t) if t else "" for t in (x, z))
    return [channels_last(w, _convolution(w, node, x, weight, bias, z))]


def nhwc_conv(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """A convolution of x [N, H, W, C] with weights [M, kH, kW, C / group], as ONNX Runtime's kernel
    and its optimizer have them. Its documentation says [M, C / group, kH, kW]; this is used if only
    it fits.
    """
    w, attrs = walk.writer, attributes(node)
    x, weight, bias = _padded(node, 3)
    channels = w.shape(x)[-1] // attrs.get("group", 1)
    shape = w.shape(weight)
    kernel = tuple(attrs.get("kernel_shape", shape[1:-1]))
    if shape[-1] == channels and shape[1:-1] == kernel:
        weight = channels_first(w, weight)
    return [channels_last(w, _convolution(w, node, channels_first(w, x), weight, bias, ""))]


def nhwc_max_pool(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w = walk.writer
    y = w.add("MaxPool", channels_first(w, node.input[0]), **attributes(node))
    return [channels_last(w, y)]


def _convolution(w: Writer, node: onnx.NodeProto, x: str, weight: str, bias: str, z: str) -> str:
    attrs = attributes(node)
    given = {k: v for k, v in attrs.items() if k in _CONVOLUTION}
    y = w.add("Conv", x, weight, *([bias] if bias else []), **given)
    if z:
        y = w.add("Add", y, z)
    return activation(w, y, text(attrs.get("activation", "")), attrs.get("activation_params", []))


def _padded(node: onnx.NodeProto, count: int) -> list[str]:
    """The node's inputs, ``count`` of them; "" for each that is left out."""
    if len(node.input) > count:
        raise Unsuitable(f"it has {len(node.input)} inputs, and its definition has {count}")
    return [*node.input, *[""] * (count - len(node.input))]


def channels_first(w: Writer, x: str) -> str:
    last = len(w.shape(x)) - 1
    return w.transpose(x, [0, last, *range(1, last)])


def channels_last(w: Writer, x: str) -> str:
    last = len(w.shape(x)) - 1
    return w.transpose(x, [0, *range(2, last + 1), 1])
