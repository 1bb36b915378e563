"""Normalizations of ONNX Runtime's domain.

16-bit types are normalized in float32, as ONNX Runtime's kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx
from onnx import TensorProto

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.pointwise import quick_gelu_of
from gtco.frontend.expansion.products import channels_first, channels_last
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_GROUP_EPSILON = 1e-5
_SKIP_EPSILON = 1e-12
_SILU = 1  # GroupNorm's activation


def _wide(w: Writer, x: str) -> str:
    return w.cast(x, TensorProto.FLOAT) if w.dtype(x) in _NARROW else x


def group_norm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    return [_group_norm(walk.writer, node, node.input[0])]


def skip_group_norm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """The group norm of s = x + skip + bias, and s."""
    w = walk.writer
    x, _, _, skip, bias = (*node.input, "")[:5]
    last = bool(attributes(node).get("channels_last", 1))
    shape = w.shape(x)
    alone = (1,) * (len(shape) - 2)
    if len(w.shape(skip)) == 2:
        n, c = w.shape(skip)
        skip = w.reshape(skip, (n, *alone, c) if last else (n, c, *alone))
    total = w.add("Add", x, skip)
    if bias:
        total = w.add("Add", total, bias if last else w.reshape(bias, (shape[1], *alone)))
    return [_group_norm(w, node, total), total]


def _group_norm(w: Writer, node: onnx.NodeProto, x: str) -> str:
    attrs = attributes(node)
    last = bool(attrs.get("channels_last", 1))
    dtype = w.dtype(x)
    y = _wide(w, channels_first(w, x) if last else x)
    shape = w.shape(y)
    groups, dtype_inside = int(attrs["groups"]), w.dtype(y)
    if groups < 1 or shape[1] % groups:
        raise Unsuitable(f"{shape[1]} channels cannot be split into {groups} groups")
    apart = w.reshape(y, (shape[0], groups, prod(shape[1:]) // groups))
    ones, zeros = (w.constant([value] * groups, dtype_inside) for value in (1, 0))
    epsilon = attrs.get("epsilon", _GROUP_EPSILON)
    y = w.add("InstanceNormalization", apart, ones, zeros, epsilon=epsilon)
    y = w.reshape(y, shape)
    along = (shape[1], *(1,) * (len(shape) - 2))
    gamma, beta = (w.reshape(w.cast(t, dtype_inside), along) for t in node.input[1:3])
    y = w.add("Add", w.add("Mul", y, gamma), beta)
    if attrs["activation"] not in (0, _SILU):
        raise Unsuitable(f"its activation {attrs['activation']} is not known; 1 is SiLU")
    if attrs["activation"] == _SILU:
        y = quick_gelu_of(w, y, 1.0)
    y = w.cast(y, dtype)
    return channels_last(w, y) if last else y


def layer_norm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """LayerNormalization before opset 17, as ONNX Runtime defines it."""
    attrs = attributes(node)
    x, scale, bias = (*node.input, "")[:3]
    return layer_norm_of(
        walk.writer, x, scale, bias, attrs.get("axis", -1), attrs.get("epsilon", 1e-5)
    )


def layer_norm_of(w: Writer, x: str, scale: str, bias: str, axis: int, epsilon: float) -> list[str]:
    """The result, the mean and the inverse deviation over the axes from ``axis`` on."""
    dtype, x = w.dtype(x), _wide(w, x)
    rank = len(w.shape(x))
    axes = list(range(axis % rank, rank))
    mean = w.mean(x, axes)
    centred = w.add("Sub", x, mean)
    y, inverse = _by_deviation(w, centred, axes, epsilon)
    y = w.add("Mul", w.cast(y, w.dtype(scale)), scale)
    if bias:
        y = w.add("Add", y, bias)
    return [w.cast(y, dtype), mean, inverse]


def _by_deviation(w: Writer, x: str, axes: Sequence[int], epsilon: float) -> tuple[str, str]:
    """x over the root of the mean of its squares, and one over that root."""
    mean = w.mean(w.add("Mul", x, x), axes)
    root = w.add("Sqrt", w.add("Add", mean, w.constant(epsilon, w.dtype(x))))
    return w.add("Div", x, root), w.add("Reciprocal", root)


def simplified_layer_norm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """x / rms(x) * scale over the axes from ``axis`` on, and 1 / rms(x)."""
    attrs = attributes(node)
    x, scale = node.input[:2]
    return _simplified(walk.writer, x, scale, attrs.get("axis", -1), attrs.get("epsilon", 1e-5))


def _simplified(w: Writer, x: str, scale: str, axis: int, epsilon: float) -> list[str]:
    x = _wide(w, x)
    rank = len(w.shape(x))
    y, inverse = _by_deviation(w, x, list(range(axis % rank, rank)), epsilon)
    return [w.add("Mul", w.cast(y, w.dtype(scale)), scale), inverse]


def skip_simplified_layer_norm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """The simplified norm of s = x + skip + bias; no mean; 1 / rms(s); s."""
    w = walk.writer
    x, skip, gamma, bias = (*node.input, "")[:4]
    total = w.add("Add", x, skip)
    if bias:
        total = w.add("Add", total, bias)
    if len(node.output) > 1 and node.output[1]:
        raise Unsuitable("its output 'mean' is used, but it does not compute a mean")
    y, inverse = _simplified(w, total, gamma, -1, attributes(node).get("epsilon", _SKIP_EPSILON))
    return [w.cast(y, w.dtype(x)), "", inverse, total]


def embed_layer_norm(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """The results: the layer norm of the sum of the embeddings of word, place and segment; the
    number of words in each sentence, by the mask; the sum.
    """
    w, attrs = walk.writer, attributes(node)
    ids, segments, words, places, kinds, gamma, beta, mask, where = (*node.input, "", "")[:9]
    batch, tokens = w.shape(ids)
    total = w.add("Gather", words, ids, axis=0)
    if where:
        total = w.add("Add", total, w.add("Gather", places, where, axis=0))
    else:
        total = w.add("Add", total, w.slice(places, 0, 0, tokens))
    if segments:
        total = w.add("Add", total, w.add("Gather", kinds, segments, axis=0))
    y = total
    epsilon = attrs.get("epsilon", _SKIP_EPSILON)
    if w.opset >= 17:
        y = w.add("LayerNormalization", total, gamma, beta, axis=-1, epsilon=epsilon)
    else:
        y = layer_norm_of(w, total, gamma, beta, -1, epsilon)[0]
    counts = w.constant([0] * batch, TensorProto.INT32)
    if mask:
        there = w.add("Equal", mask, w.constant(1, w.dtype(mask)))
        ones = w.cast(there, TensorProto.INT32)
        counts = (
            w.add("ReduceSum", ones, w.integers([1]), keepdims=0)
            if w.opset >= 13
            else w.add("ReduceSum", ones, axes=[1], keepdims=0)
        )
    return [y, counts, total]
