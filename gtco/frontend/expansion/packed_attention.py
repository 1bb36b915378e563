"""Attention over packed sequences: the tokens of all sequences of a batch, one after the other and
without padding, [tokens, width].

The number of tokens is a size of the model, so it is known. The beginnings of the sequences are
not. So every token attends over all tokens, and a mask hides the tokens of other sequences::

    sequence[t] = how many of cumulative_sequence_length[1:] are <= t
    scores[i, j] is kept where sequence[i] = sequence[j]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import onnx
from onnx import TensorProto

from gtco.frontend.expansion.attention import attend, heads_of, least, projected
from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.walk import Walk
from gtco.frontend.expansion.writer import Writer


def packed_attention(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w, attrs = walk.writer, attributes(node)
    x, weight, bias, _, ends, added = (*node.input, "")[:6]
    q, k, v = projected(w, x, weight, bias, attrs)
    return [_attention(w, node, (q, k, v, ""), ends, added)]


def packed_multi_head_attention(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Q, K and V apart, or as [tokens, heads, 3, d]."""
    q, k, v, bias, _, ends, added = (*node.input, "")[:7]
    return [_attention(walk.writer, node, (q, k, v, bias), ends, added)]


def _attention(
    w: Writer, node: onnx.NodeProto, given: tuple[str, str, str, str], ends: str, added: str
) -> str:
    attrs = attributes(node)
    query, key, value = (w.reshape(t, (1, *w.shape(t))) if t else "" for t in given[:3])
    q, k, v = heads_of(w, int(attrs["num_heads"]), query, key, value, given[3])
    dtype, tokens = w.dtype(q), w.shape(q)[2]
    sequence, place = _places(w, ends, tokens)
    row, column = w.reshape(sequence, (tokens, 1)), w.reshape(sequence, (1, tokens))
    zero, hidden = w.constant(0.0, dtype), w.constant(least(dtype), dtype)
    terms = [w.add("Where", w.add("Equal", row, column), zero, hidden)]
    if added:
        terms.insert(0, _bias(w, added, sequence, place, tokens))
    y = attend(w, q, k, v, attrs.get("scale", 0.0), terms)
    _, heads, _, depth = w.shape(y)
    return w.reshape(w.transpose(y, [0, 2, 1, 3]), (tokens, heads * depth))


def _places(w: Writer, ends: str, tokens: int) -> tuple[str, str]:
    """Each token's sequence and its place there, both int64 [tokens]."""
    ends = w.cast(ends, TensorProto.INT64)
    count = w.shape(ends)[0] - 1
    token = w.integers(numpy.arange(tokens))
    last = w.reshape(w.slice(ends, 0, 1, count + 1), (count, 1))
    passed = w.cast(w.add("LessOrEqual", last, w.reshape(token, (1, tokens))), TensorProto.INT64)
    if w.opset >= 13:
        sequence = w.add("ReduceSum", passed, w.integers([0]), keepdims=0)
    else:
        sequence = w.add("ReduceSum", passed, axes=[0], keepdims=0)
    return sequence, w.add("Sub", token, w.add("Gather", ends, sequence, axis=0))


def _bias(w: Writer, added: str, sequence: str, place: str, tokens: int) -> str:
    """Takes the bias of each pair of tokens by their sequence and places: [B or 1, H or 1, N, N] ->
    [1, H or 1, tokens, tokens].
    """
    batch, heads, length, _ = w.shape(added)
    rows = w.reshape(place, (tokens, 1))
    # One index into [B * N * N], so that a gather can take it. Every place is less than N, so the
    # index is inside. For tokens of different sequences the mask hides the result.
    index = w.add("Mul", rows, w.integers(length))
    index = w.add("Add", index, w.reshape(place, (1, tokens)))
    if batch > 1:
        first = w.add("Mul", sequence, w.integers(length * length))
        index = w.add("Add", index, w.reshape(first, (tokens, 1)))
    flat = w.reshape(w.transpose(added, [1, 0, 2, 3]), (heads, batch * length * length))
    return w.reshape(w.add("Gather", flat, index, axis=1), (1, heads, tokens, tokens))
