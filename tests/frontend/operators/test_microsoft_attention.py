"""Attention, MultiHeadAttention, RotaryEmbedding and packed attention of ONNX Runtime's domain.

Forms that its kernels for CPUs lack (packed sequences, packed Q, K and V) are compared with numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from gtco.graph.rewrites.pipeline import canonicalize
from tests.few_nodes import by_onnxruntime, compare, model, node, normal, refused

SOME = settings(max_examples=40, deadline=None)
MASKS = st.sampled_from([None, "keys", "rows", "ends", "both ends"])


def mask_of(kind: str, batch: int, rows: int, keys: int) -> np.ndarray:
    """Flags for keys, flags for rows and keys, the end of each sequence, or its end and its
    start.
    """
    rng = np.random.default_rng(batch * 100 + rows * 10 + keys)
    if kind == "keys":
        drawn = rng.integers(0, 2, (batch, keys))
    elif kind == "rows":
        drawn = rng.integers(0, 2, (batch, rows, keys))
    else:
        drawn = rng.integers(1, keys + 1, batch)
        if kind == "both ends":
            drawn = np.concatenate([drawn, drawn - 1])
    return drawn.astype(np.int32)


@SOME
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 6),
    heads=st.integers(1, 3),
    mask=MASKS,
    bias=st.booleans(),
    added=st.sampled_from([None, (1, 1), (1, "heads"), ("batch", "heads")]),
    past=st.integers(0, 3),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    wide_values=st.booleans(),
    hidden=st.sampled_from([None, -50.0]),
)
def test_attention(
    batch, tokens, heads, mask, bias, added, past, causal, scale, wide_values, hidden
):
    depth, width = 4, 7
    keys = tokens + past
    sizes = [heads * depth, heads * depth, heads * (6 if wide_values and not past else depth)]
    arrays = {"x": normal(1, batch, tokens, width)}
    constants = {"w": normal(2, width, sum(sizes))}
    inputs = ["x", "w", "", "", "", ""]
    if bias:
        constants["b"], inputs[2] = normal(3, sum(sizes)), "b"
    if mask:
        arrays["mask"], inputs[3] = mask_of(mask, batch, tokens, keys), "mask"
    if past:
        arrays["past"], inputs[4] = normal(4, 2, batch, heads, past, depth), "past"
    if added and not past:  # ONNX Runtime takes only one of the two
        lead = [{"batch": batch, "heads": heads}.get(size, size) for size in added]
        arrays["added"], inputs[5] = normal(5, *lead, tokens, keys), "added"
    outputs = ["y", "present"] if past else ["y"]
    made = node(
        "Attention",
        inputs,
        outputs,
        num_heads=heads,
        unidirectional=int(causal),
        scale=scale,
        mask_filter_value=hidden,
        qkv_hidden_sizes=sizes if wide_values else None,
    )
    compare(model([made], arrays, constants, outputs), arrays)


@SOME
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 5),
    more=st.integers(0, 3),
    heads=st.integers(1, 3),
    mask=st.sampled_from([None, "keys", "ends"]),
    bias=st.booleans(),
    added=st.sampled_from([None, (1, 1), ("batch", "heads")]),
    past=st.integers(0, 2),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    apart=st.booleans(),
)
def test_multi_head_attention(
    batch, rows, more, heads, mask, bias, added, past, causal, scale, apart
):
    depth = 4
    tokens = rows + more
    if past:
        apart, mask = False, None if mask == "ends" else mask
    if apart:
        bias = False
    if causal:
        tokens = rows
    keys = tokens + past
    width = heads * depth
    shape = (batch, heads, tokens, depth) if apart else (batch, tokens, width)
    arrays = {"q": normal(1, batch, rows, width), "k": normal(2, *shape), "v": normal(3, *shape)}
    inputs = ["q", "k", "v", *[""] * 5]
    if bias:
        arrays["b"], inputs[3] = normal(4, 3 * width), "b"
    if mask:
        arrays["mask"], inputs[4] = mask_of(mask, batch, rows, keys), "mask"
    if added:
        lead = [{"batch": batch, "heads": heads}.get(size, size) for size in added]
        arrays["added"], inputs[5] = normal(5, *lead, rows, keys), "added"
    outputs = ["y"]
    if past:
        for place, name in enumerate(("past_key", "past_value")):
            arrays[name], inputs[6 + place] = normal(6 + place, batch, heads, past, depth), name
        outputs = ["y", "present_key", "present_value"]
    made = node(
        "MultiHeadAttention",
        inputs,
        outputs,
        num_heads=heads,
        unidirectional=int(causal),
        scale=scale,
    )
    compare(model([made], arrays, {}, outputs), arrays)


@pytest.mark.parametrize("packed", ["all", "keys and values"])
def test_packed_inputs_are_those_apart(packed):
    q, k, v = (normal(seed, 2, 5, 3, 4) for seed in range(3))
    flat = {name: t.reshape(2, 5, 12) for name, t in (("q", q), ("k", k), ("v", v))}
    wanted = by_onnxruntime(
        model([node("MultiHeadAttention", ["q", "k", "v"], num_heads=3)], flat), flat
    )
    if packed == "all":
        arrays = {"q": np.stack([q, k, v], 3)}
    else:
        arrays = {"q": flat["q"], "k": np.stack([k, v], 3)}
    compare(model([node("MultiHeadAttention", list(arrays), num_heads=3)], arrays), arrays, wanted)


def plain_block(arrays, constants, heads, depth):
    """Self-attention with one projection as torch's exporter writes it."""
    batch, tokens, _ = arrays["x"].shape
    width = heads * depth
    shapes = {
        "apart": np.asarray([batch, tokens, 3, heads, depth]),
        "one": np.asarray([batch, heads, tokens, depth]),
        "joined": np.asarray([batch, tokens, width]),
    }
    shapes |= {f"at{i}": np.asarray([i]) for i in range(4)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["pb"]),
        helper.make_node("Reshape", ["pb", "apart"], ["five"]),
        helper.make_node("Transpose", ["five"], ["turned"], perm=[2, 0, 3, 1, 4]),
    ]
    for i, name in enumerate("qkv"):
        cut = helper.make_node("Slice", ["turned", f"at{i}", f"at{i + 1}", "at0"], [f"{name}1"])
        nodes += [cut, helper.make_node("Reshape", [f"{name}1", "one"], [name])]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["ss"]),
        helper.make_node("Softmax", ["ss"], ["soft"], axis=-1),
        helper.make_node("MatMul", ["soft", "v"], ["o"]),
        helper.make_node("Transpose", ["o"], ["ot"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["ot", "joined"], ["y"]),
    ]
    shapes["scale"] = np.asarray(depth**-0.5, np.float32)
    return model(nodes, arrays, constants | shapes)


def canonical(proto, arrays):
    return [op.kind for op in canonicalize(compare(proto, arrays)).operators.values()]


def test_fused_attention_is_the_attention_of_a_plain_export():
    heads, depth, width = 3, 4, 10
    arrays = {"x": normal(1, 2, 5, width)}
    constants = {"w": normal(2, width, 3 * heads * depth), "b": normal(3, 3 * heads * depth)}
    plain = canonical(plain_block(arrays, constants, heads, depth), arrays)
    assert plain.count("attention") == 1 and plain.count("matmul") <= 3
    fused = node("Attention", ["x", "w", "b"], num_heads=heads)
    assert canonical(model([fused], arrays, constants), arrays) == plain
    # the product is outside of the operator, and its bias inside
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Split", ["p"], ["q", "k", "v"], axis=2),
        node("MultiHeadAttention", ["q", "k", "v", "b"], num_heads=heads),
    ]
    kinds = canonical(model(nodes, arrays, constants), arrays)
    assert kinds.count("attention") == 1 and kinds.count("matmul") == plain.count("matmul")


@pytest.mark.parametrize("mask", ["keys", "ends", "both ends"])
def test_masks_and_biases_stay_part_of_attention(mask):
    arrays = {"x": normal(1, 2, 5, 12), "mask": mask_of(mask, 2, 5, 5)}
    constants = {"w": normal(2, 12, 36), "added": normal(3, 1, 3, 5, 5)}
    inputs = ["x", "w", "", "mask", "", "added"]
    made = node("Attention", inputs, num_heads=3, unidirectional=1)
    kinds = canonical(model([made], arrays, constants), arrays)
    assert kinds.count("attention") == 1 and "softmax" not in kinds


# -- rotary embeddings -----------------------------------------------------------------------------


@SOME
@given(
    batch=st.integers(1, 2),
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    apart=st.booleans(),
    interleaved=st.booleans(),
    partial=st.booleans(),
    first=st.sampled_from([None, 0, 3]),
)
def test_rotary_embedding(batch, tokens, heads, apart, interleaved, partial, first):
    depth = 8
    turned = 4 if partial else depth
    shape = (batch, heads, tokens, depth) if apart else (batch, tokens, heads * depth)
    rng = np.random.default_rng(tokens)
    places = rng.integers(0, 9, (batch, tokens)) if first is None else np.asarray([first])
    angle = normal(2, 9, turned // 2)
    arrays = {"x": normal(1, *shape), "places": places.astype(np.int64)}
    constants = {"cos": np.cos(angle), "sin": np.sin(angle)}
    given_heads = heads if partial else None
    made = node(
        "RotaryEmbedding",
        ["x", "places", "cos", "sin"],
        num_heads=given_heads,
        rotary_embedding_dim=turned if partial else None,
        interleaved=int(interleaved),
    )
    compare(model([made], arrays, constants), arrays)


# -- packed sequences ------------------------------------------------------------------------------


def packed_reference(q, k, v, lengths, heads, scale, added):
    """Each sequence alone, in float64; q, k and v are [tokens, width]."""
    rows = []
    start = 0
    for number, length in enumerate(lengths):
        part = slice(start, start + length)
        one = [np.moveaxis(t[part].reshape(length, heads, -1), 1, 0) for t in (q, k, v)]
        a, b, c = (t.astype(np.float64) for t in one)
        scores = a @ np.swapaxes(b, 1, 2) * (scale or a.shape[-1] ** -0.5)
        if added is not None:
            scores = scores + added[number % len(added)][:, :length, :length]
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        y = powers / powers.sum(-1, keepdims=True) @ c
        rows.append(np.moveaxis(y, 0, 1).reshape(length, -1))
        start += length
    return np.concatenate(rows).astype(np.float32)


@SOME
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    scale=st.sampled_from([None, 0.4]),
    added=st.sampled_from([None, (1, 1), ("batch", 1), ("batch", "heads")]),
    form=st.sampled_from(["weights", "apart", "packed"]),
    bias=st.booleans(),
    opset=st.sampled_from([12, 17]),
)
def test_packed_sequences(lengths, heads, scale, added, form, bias, opset):
    depth, wide = 4, 6 if form == "apart" else 4
    tokens, longest = sum(lengths), max(lengths)
    width = heads * depth
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    # the padding comes after the tokens, as RemovePadding gives it; the operator needs neither
    arrays = {"offset": np.zeros((len(lengths), longest), np.int32), "ends": ends}
    table = None
    if added:
        lead = [{"batch": len(lengths), "heads": heads}.get(size, size) for size in added]
        table = normal(9, *lead, longest, longest)
    if form == "weights":
        x, weight, b = normal(1, tokens, 5), normal(2, 5, 3 * width), normal(3, 3 * width)
        arrays |= {"x": x, "w": weight, "b": b}
        q, k, v = np.split(x @ weight + b, 3, axis=1)
        kind, inputs = "PackedAttention", ["x", "w", "b", "offset", "ends"]
    else:
        kind, inputs = "PackedMultiHeadAttention", ["q", "k", "v", "", "offset", "ends"]
        q, k = normal(1, tokens, width), normal(2, tokens, width)
        v = normal(3, tokens, heads * wide)
        if form == "packed":
            packed = [t.reshape(tokens, heads, depth) for t in (q, k, v)]
            arrays["q"], inputs[1], inputs[2] = np.stack(packed, 2), "", ""
        else:
            arrays |= {"q": q, "k": k, "v": v}
        if bias:
            arrays["b"], inputs[3] = normal(4, 2 * width + heads * wide), "b"
            parts = np.split(arrays["b"], [width, 2 * width])
            q, k, v = (t + part for t, part in zip((q, k, v), parts, strict=True))
    if table is not None:
        arrays["table"] = table
        inputs.append("table")
    made = model([node(kind, inputs, num_heads=heads, scale=scale)], arrays, opset=opset)
    compare(made, arrays, [packed_reference(q, k, v, lengths, heads, scale, table)])


def test_uses_that_are_not_supported_are_refused():
    arrays = {"x": normal(1, 2, 3, 8), "w": normal(2, 8, 24)}
    made = node("Attention", ["x", "w"], num_heads=2, do_rotary=1)
    refused(model([made], arrays), r"the Attention.*do_rotary")
    arrays = {"x": normal(1, 2, 3, 8)}
    outputs = ["y", "", "", "qk"]
    made = node("MultiHeadAttention", ["x", "x", "x"], outputs, num_heads=2)
    refused(model([made], arrays, {}, ["y", "qk"]), "its output 'qk' is not supported")
    made = node("MultiHeadAttention", ["x", "x", "x"], num_heads=3)
    refused(model([made], arrays), "8 channels cannot be dealt to 3 heads")
    arrays["mask"] = np.ones((2, 1, 3, 3), np.int32)
    made = node("MultiHeadAttention", ["x", "x", "x", "", "mask"], num_heads=2)
    refused(model([made], arrays), r"a mask of shape \[2, 1, 3, 3\]")


def test_a_mask_of_lengths_and_starts_has_the_lengths_alone():
    """ONNX Runtime's form of 3 * batch + 2: lengths, starts of queries, starts of keys. Starts are
    for its packed kernels; keys are hidden by the lengths.
    """
    arrays, constants = {"x": normal(1, 2, 5, 12)}, {"w": normal(2, 12, 24)}
    ends = np.array([3, 4], np.int32)
    listed = np.array([*ends, 1, 6, 11, 0, 3, 7], np.int32)
    made = [
        model(
            [node("Attention", ["x", "w", "", "mask"], num_heads=2)],
            {**arrays, "mask": mask},
            constants,
        )
        for mask in (ends, listed)
    ]
    wanted = by_onnxruntime(made[0], {**arrays, "mask": ends})
    compare(made[1], {**arrays, "mask": listed}, wanted)
