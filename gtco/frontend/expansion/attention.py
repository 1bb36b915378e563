"""Attention, QAttention, MultiHeadAttention and RotaryEmbedding of ONNX Runtime's domain, written
out as exporters write attention.

::

    scores = q @ k^T * scale + mask + bias;    y = softmax(scores) @ v

A mask hides a key by adding a finite number, ``mask_filter_value``, so a row whose keys are all
hidden is the mean of all values. A causal mask adds the least number of the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy
import onnx
from onnx import helper

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.quantized import inputs
from gtco.frontend.expansion.quantized_products import to_float
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer

_HIDDEN = -10000.0  # mask_filter_value if the node gives none


def attention(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Attention with Q, K and V projected from one input. If there is a state [2, B, H, past, d],
    it comes before K and V.
    """
    w, attrs = walk.writer, attributes(node)
    x, weight, bias, mask, past, added, _ = (*node.input, *[""] * 7)[:7]
    return _attention(w, node, attrs, projected(w, x, weight, bias, attrs), mask, past, added)


def quantized_attention(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Attention whose projection is a product of integers with a float result."""
    w, attrs = walk.writer, attributes(node)
    x, weight, bias, x_scale, scale, mask, x_zero, zero, past = inputs(node, 9, (5, 6, 7, 8))
    y = to_float(w, x, x_scale, x_zero, weight, scale, zero, bias)
    parts = w.split(y, [w.shape(weight)[1] // 3] * 3, len(w.shape(y)) - 1)
    return _attention(w, node, attrs, parts, mask, past)


def _attention(
    w: Writer,
    node: onnx.NodeProto,
    attrs: dict[str, Any],
    parts: Sequence[str],
    mask: str,
    past: str,
    added: str = "",
) -> Sequence[str]:
    """What follows the projection to Q, K and V."""
    if attrs.get("do_rotary", 0) or attrs.get("past_present_share_buffer", 0):
        raise Unsuitable(
            "do_rotary and past_present_share_buffer are not supported: optimize the model without"
        )
    heads = int(attrs["num_heads"])
    q, k, v = (_split(w, t, heads) for t in parts)
    present = ""
    if past or (len(node.output) > 1 and node.output[1]):
        if past:
            k, v = (
                w.add("Concat", _row(w, past, place), t, axis=2) for place, t in enumerate((k, v))
            )
        apart = [w.reshape(t, (1, *w.shape(t))) for t in (k, v)]
        present = w.add("Concat", *apart, axis=0)
    terms = _terms(w, attrs, q, k, mask, added)
    return [_joined(w, attend(w, q, k, v, attrs.get("scale", 0.0), terms)), present]


def projected(w: Writer, x: str, weight: str, bias: str, attrs: dict[str, Any]) -> list[str]:
    """Q, K and V [..., width each] by one product."""
    y = w.add("MatMul", x, weight)
    if bias:
        y = w.add("Add", y, bias)
    sizes = list(attrs.get("qkv_hidden_sizes", []))
    width = w.shape(weight)[1]
    return w.split(y, sizes or [width // 3] * 3, len(w.shape(y)) - 1)


def multi_head_attention(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Attention with Q, K and V given, apart or packed; states [B, H, past, d] of keys and values
    are possible.
    """
    w, attrs = walk.writer, attributes(node)
    given = (*node.input, *[""] * 10)[:10]
    query, key, value, bias, mask, added, past_key, past_value, length, cache = given
    if length or cache:
        raise Unsuitable("past_sequence_length and cache_indirection are not supported")
    if len(node.output) > 3 and node.output[3]:
        raise Unsuitable("its output 'qk' is not supported")
    q, k, v = heads_of(w, int(attrs["num_heads"]), query, key, value, bias)
    if past_key:
        k, v = (w.add("Concat", past, t, axis=2) for past, t in ((past_key, k), (past_value, v)))
    terms = _terms(w, attrs, q, k, mask, added)
    return [_joined(w, attend(w, q, k, v, attrs.get("scale", 0.0), terms)), k, v]


def heads_of(
    w: Writer, heads: int, query: str, key: str, value: str, bias: str
) -> tuple[str, str, str]:
    """Q, K and V as [B, H, N, d]. They may be given all in one tensor, as Q and one tensor of K and
    V, or as three tensors; then K and V may have their heads apart already.
    """
    if len(w.shape(query)) == 5:  # [B, N, H, 3, d]
        q, k, v = _unpacked(w, query)
    elif key and len(w.shape(key)) == 5:  # [B, N, H, 2, d]
        q, (k, v) = query, _unpacked(w, key)
    else:
        q, k, v = query, key, value
    if not k or not v:
        raise Unsuitable("its key or value is missing")
    tensors = [q, k, v]
    if bias:
        rest = w.shape(bias)[0] - 2 * w.shape(q)[-1]
        parts = w.split(bias, [w.shape(q)[-1], w.shape(q)[-1], rest], 0)
        # keys and values with separate heads come from another projection, which has no bias
        tensors = [
            w.add("Add", t, part) if len(w.shape(t)) == 3 else t
            for t, part in zip(tensors, parts, strict=True)
        ]
    q, k, v = (t if len(w.shape(t)) == 4 else _split(w, t, heads) for t in tensors)
    return q, k, v


def _unpacked(w: Writer, x: str) -> list[str]:
    """[B, N, H, count, d] -> count times [B, N, H * d]."""
    batch, tokens, heads, count, depth = w.shape(x)
    parts = w.split(x, [1] * count, 3)
    return [w.reshape(part, (batch, tokens, heads * depth)) for part in parts]


def _split(w: Writer, x: str, heads: int) -> str:
    """[B, N, H * d] -> [B, H, N, d]."""
    batch, tokens, width = w.shape(x)
    if width % heads:
        raise Unsuitable(f"{width} channels cannot be dealt to {heads} heads")
    return w.transpose(w.reshape(x, (batch, tokens, heads, width // heads)), [0, 2, 1, 3])


def _joined(w: Writer, x: str) -> str:
    """[B, H, N, d] -> [B, N, H * d]."""
    batch, heads, tokens, depth = w.shape(x)
    return w.reshape(w.transpose(x, [0, 2, 1, 3]), (batch, tokens, heads * depth))


def _row(w: Writer, x: str, place: int) -> str:
    """x[place]."""
    return w.reshape(w.slice(x, 0, place, place + 1), w.shape(x)[1:])


def attend(w: Writer, q: str, k: str, v: str, scale: float, terms: Sequence[str]) -> str:
    """Attention over [B, H, N, d]; a ``scale`` of 0 is the usual one."""
    scores = w.add("MatMul", q, w.transpose(k, [0, 1, 3, 2]))
    scores = w.scaled(scores, scale or w.shape(q)[-1] ** -0.5)
    for term in terms:
        scores = w.add("Add", scores, term)
    return w.add("MatMul", w.add("Softmax", scores, axis=-1), v)


def _terms(w: Writer, attrs: dict[str, Any], q: str, k: str, mask: str, added: str) -> list[str]:
    """The terms that are added to the scores [B, H, rows, keys]."""
    dtype = w.dtype(q)
    batch, _, rows, _ = w.shape(q)
    keys = w.shape(k)[2]
    terms = []
    if added:
        terms.append(added)
    if mask:
        visible = _visible(w, mask, batch, rows, keys)
        zero = w.constant(0.0, dtype)
        hidden = w.constant(attrs.get("mask_filter_value", _HIDDEN), dtype)
        terms.append(w.add("Where", visible, zero, hidden))
    if attrs.get("unidirectional", 0):
        ahead = numpy.arange(keys)[None, :] > numpy.arange(rows)[:, None] + keys - rows
        if ahead.any():
            terms.append(w.constant(numpy.where(ahead, least(dtype), 0.0)[None, None], dtype))
    return terms


def _visible(w: Writer, mask: str, batch: int, rows: int, keys: int) -> str:
    """The mask as booleans that broadcast to [B, H, rows, keys], from any of its forms:

    - flags [B, keys] or [B, rows, keys];
    - ends [B];
    - ends, then starts [2 * B];
    - a longer list [3 * B + 2] that begins with the lengths [B].
    """
    shape = w.shape(mask)
    dtype = w.dtype(mask)
    if shape == (batch, keys) or shape == (batch, rows, keys):
        there = w.add("Greater", mask, w.constant(0, dtype))
        return w.reshape(there, (batch, 1, shape[1] if len(shape) == 3 else 1, keys))
    if len(shape) != 1 or shape[0] not in (batch, 2 * batch, 3 * batch + 2):
        raise Unsuitable(
            f"a mask of shape {list(shape)} is not supported: it may be ({batch}, {keys}), "
            f"({batch}, {rows}, {keys}), ({batch},) or ({2 * batch},)"
        )
    place = w.constant(numpy.arange(keys).reshape(1, 1, 1, keys), dtype)

    def bound(part: int) -> str:
        return w.reshape(w.slice(mask, 0, part * batch, (part + 1) * batch), (batch, 1, 1, 1))

    visible = w.add("Less", place, bound(0))
    if shape[0] == 2 * batch:
        before = w.add("Less", place, bound(1))
        visible = w.add("And", visible, w.add("Not", before))
    return visible


def rotary_embedding(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Turns pairs of channels by the angle of their place (Su et al. 2021, eq. 34).

    x is [B, N, H * d] or [B, H, N, d]. The two halves of the turned channels form the pairs; with
    ``interleaved`` neighbours do. The channels after them do not change.
    """
    w, attrs = walk.writer, attributes(node)
    x, places, cosines, sines = node.input[:4]
    if attrs.get("scale", 1.0) != 1.0:
        raise Unsuitable("a scale other than 1 is not supported")
    shape = w.shape(x)
    half = w.shape(cosines)[1]
    apart = len(shape) == 4
    heads = int(attrs.get("num_heads", 0))
    if apart:
        batch, _, tokens, depth = shape
    else:
        batch, tokens, width = shape
        depth = width // heads if attrs.get("rotary_embedding_dim", 0) and heads else 2 * half
        x = w.reshape(x, (batch, tokens, width // depth, depth))
    along = list(w.shape(x)[:3])
    if len(w.shape(places)) == 1:  # the first token's place
        steps = w.constant(numpy.arange(tokens), w.dtype(places))
        places = w.reshape(w.add("Add", steps, places), (1, tokens))
    rows = w.shape(places)[0]
    middle = (rows, 1, tokens) if apart else (rows, tokens, 1)

    def angles(table: str) -> str:
        return w.reshape(w.add("Gather", table, places, axis=0), (*middle, half))

    cos, sin = angles(cosines), angles(sines)
    turning = w.slice(x, 3, 0, 2 * half)
    if attrs.get("interleaved", 0):
        pairs = w.split(w.reshape(turning, (*along, half, 2)), [1, 1], 4)
        a, b = (w.reshape(part, (*along, half)) for part in pairs)
    else:
        a, b = w.split(turning, [half, half], 3)
    first = w.add("Sub", w.add("Mul", a, cos), w.add("Mul", b, sin))
    second = w.add("Add", w.add("Mul", b, cos), w.add("Mul", a, sin))
    if attrs.get("interleaved", 0):
        pairs = [w.reshape(part, (*along, half, 1)) for part in (first, second)]
        y = w.reshape(w.add("Concat", *pairs, axis=4), (*along, 2 * half))
    else:
        y = w.add("Concat", first, second, axis=3)
    if depth > 2 * half:
        y = w.add("Concat", y, w.slice(x, 3, 2 * half, depth), axis=3)
    return [w.reshape(y, shape)]


def least(dtype: int) -> float:
    """The least number of a float type. The type is given in ONNX's numbers."""
    return float(ml_dtypes.finfo(helper.tensor_dtype_to_np_dtype(dtype)).min)
