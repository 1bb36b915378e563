"""The same random graphs in every run (``make check-random`` for any number of others)."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from gtco.support.options import PRECISIONS
from tests.random import batches
from tests.random.__main__ import BATCH, opset_of, precision_of, search
from tests.random.builder import Drawn, Tensor, model_of
from tests.random.definitions import written_out
from tests.random.draw import OPSETS, draw
from tests.random.engine import BOUNDS, Wanted, difference, orders_nan, session, wanted
from tests.random.shrink import shrink

SEED, COUNT = 0, 80


def test_graphs_of_the_family_agree_with_onnx_runtime(tmp_path: Path) -> None:
    total = search(SEED, COUNT, 1e9, tmp_path, small=False)
    assert not total.found, "\n".join(map(str, total.found))
    assert total.compared + total.invalid == total.drawn == COUNT
    assert total.invalid <= COUNT // 50
    assert total.ranged >= 4 and total.sized >= 2
    assert {"Conv", "Softmax", "MatMul", "Where", "Pad", "IsNaN"} <= set(total.kinds)


def test_the_proof_of_a_range_agrees_with_the_graphs_meaning() -> None:
    """A batch has the outputs of its halves, by ONNX Runtime alone. This finds what the proof takes
    and should not; what it refuses costs speed and no more.
    """
    graphs = [graph for opset in OPSETS for graph in batches.graphs_of(40 * opset, 12, opset)]
    assert len(graphs) >= 8
    assert [graph.seed for graph in graphs if batches.halves_differ(graph)] == []


def test_halves_that_differ_are_seen() -> None:
    text = "g (float[13,3] x) => (float[13,3] y) "
    model = graph_of(text + "{ s = Softmax <axis = 0> (x) y = Neg(s) }")
    x = np.random.default_rng(0).standard_normal((13, 3)).astype(np.float32)
    output = (Tensor("y", (13, 3)),)
    mixed = Drawn(0, 18, tuple(model.graph.node), {}, {"x": x}, output, True)
    assert batches.runs(mixed) and not batches.is_proven(mixed)
    assert batches.halves_differ(mixed)
    alone = graph_of(text + "{ y = Neg(x) }")
    proven = Drawn(0, 18, tuple(alone.graph.node), {}, {"x": x}, output, True)
    assert batches.runs(proven) and batches.is_proven(proven) and not batches.halves_differ(proven)


def test_rows_gathered_beside_other_graphs(tmp_path: Path) -> None:
    """LLVM left out the comparison of these gathered rows' indices with zero. The graphs before
    leave a value where its result would have been, so they were wrong in this batch alone.
    """
    total = search(86003664, 3, 1e9, tmp_path, small=False)
    assert not total.found, "\n".join(map(str, total.found))
    assert total.compared == 3


def test_a_seed_is_a_graph() -> None:
    for seed in range(20):
        first, again = (model_of([draw(seed, OPSETS[0])]) for _ in range(2))
        assert first.SerializeToString() == again.SerializeToString()


def test_every_difference_is_seen() -> None:
    value = np.array([1.0, np.nan, np.inf, -3.0], np.float32)
    want = Wanted(value, (value,))
    assert difference(value, want, True) == ""
    for at, other in ((0, 1.01), (0, np.nan), (1, 0.0), (2, -np.inf), (2, 3e38), (3, np.inf)):
        wrong = value.copy()
        wrong[at] = other
        assert difference(wrong, want, True), (at, other)
    assert difference(value.astype(np.float64), want, True)
    assert difference(value[:3], want, True)
    one = Wanted(np.float32(np.nan), (np.float32(np.nan),))
    assert difference(np.float32(np.nan), one, True) == ""
    assert difference(np.float32(0), one, True)


def test_nan_that_is_ordered_is_found() -> None:
    text = "agraph (float[2,3] x) => (float[2,3] y) { r = Sqrt(x) y = %s }"
    x = np.array([[1, 4, 9], [1, 4, 0]], np.float32)
    for end, found in (("Max(x, r)", True), ("Add(x, r)", False)):
        model = graph_of(text % end)
        assert not orders_nan(model, {"x": x})
        assert orders_nan(model, {"x": x - 1}) is found


def test_bfloat16_is_held_to_its_own_roundings() -> None:
    """A product of operands rounded to 8 bits passes. One without the last row of k does not, and
    neither passes as float32.
    """
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((9, 16), (16, 8)))
    model = graph_of("agraph (float[9,16] x) => (float[9,8] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    rounded = [a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in (x, w)]
    near, wrong = rounded[0] @ rounded[1], x[:, :-1] @ w[:-1]
    for precision, passes in (("bf16", True), ("fp32", False)):
        want = wanted(model, {"x": x}, precision)["y"]
        assert (difference(near, want, True) == "") is passes
        assert difference(wrong, want, True)


def test_every_third_batch_is_bfloat16() -> None:
    drawn = {(precision_of(s), opset_of(s)) for s in range(0, 12 * BATCH, BATCH)}
    assert drawn == {(p, o) for p in PRECISIONS for o in OPSETS}
    assert precision_of(3 * BATCH - 1) == "bf16" == precision_of(2 * BATCH)


def test_shrinking_keeps_what_fails() -> None:
    """Here a model "fails" if a Softmax reads negative numbers. Of a dozen nodes one is left."""
    graph = next(g for s in range(500) if (g := draw(s, 18)).kinds.count("Softmax") == 1)

    def fails(case: tuple[onnx.ModelProto, dict[str, np.ndarray]]) -> bool:
        wanted(*case)  # a valid model with right inputs
        return any(n.op_type == "Softmax" for n in case[0].graph.node)

    model, feeds = shrink(model_of([graph]), graph.feeds, fails)
    assert len(graph.nodes) > 1
    assert [n.op_type for n in model.graph.node] == ["Softmax"] and len(feeds) == 1


def graph_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')


def test_what_may_fall_either_way_is_held_to_no_more() -> None:
    """Roundings of ties, differences and comparisons of equal values, and scores of which a mask of
    -3e4 leaves three digits: engines may differ in their values.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8)).astype(np.float32)
    tie = "agraph (float[4,8] x) => (float[4,8] y) { %s }"
    for body, feed, other in (
        ("a = Mul(x, x) r = Round(a) y = Neg(r)", np.full_like(x, 0.5**0.5), -1.0),
        ("a = Mul(x, x) b = Mul(x, x) y = Sub(a, b)", x, 3e-8),
    ):
        want = wanted(graph_of(tie % body), {"x": feed})["y"]
        value = np.full_like(x, other)
        assert (want.value != value).any() and difference(value, want, True) == "", body
        assert difference(value + 300, want, True), body
    compared = (
        "agraph (float[4,8] x) => (bool[4,8] y) { a = Mul(x, x) b = Mul(x, x) y = Less(a, b) }"
    )
    want = wanted(graph_of(compared), {"x": x})["y"]
    assert difference(~want.value, want, True) == ""
    low = "<float low = {-3e4}> { a = Mul(x, x) b = Add(a, low) y = Softmax <axis = 1> (b) }"
    want = wanted(graph_of(f"agraph (float[4,8] x) => (float[4,8] y) {low}"), {"x": x})["y"]
    exact = np.exp(x.astype(np.float64) ** 2)
    exact /= exact.sum(1, keepdims=True)
    assert np.abs(want.value - exact).max() > BOUNDS["fp32"].tolerance
    assert difference(exact.astype(np.float32), want, True) == ""


def test_what_float32_absorbs_is_held_to() -> None:
    """A row that is entirely masked by -1e9 or finfo.min is the mean: every engine rounds the
    scores away.
    """
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    for low in ("-1e9", "-3.4028234663852886e38"):
        body = "{ a = Mul(x, x) b = Add(a, low) y = Softmax <axis = 1> (b) }"
        text = f"agraph (float[4,8] x) => (float[4,8] y) <float low = {{{low}}}> {body}"
        want = wanted(graph_of(text), {"x": x})["y"]
        np.testing.assert_allclose(want.value, 1 / 8, rtol=1e-6)
        assert difference(want.value, want, True) == ""
        assert difference(want.value * np.float32(1.001), want, True)


def test_what_cancels_inside_an_operator_is_held_to_no_more() -> None:
    """GELU's tail, and an InstanceNormalization of one element, which is its bias. ONNX Runtime's
    own kernels have errors there, and gtco's GELU has the error that it states.
    """
    rng = np.random.default_rng(0)
    gelu = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]> g (float[3] x) => (float[3] y) { y = Gelu(x) }'
    )
    x = np.array([-4.7, -4.8, -4.9], np.float32)
    want = wanted(gelu, {"x": x})["y"]
    exact = np.array([0.5 * v * math.erfc(-v / 2**0.5) for v in x.tolist()])
    assert difference((exact + 4e-7 * x).astype(np.float32), want, True) == ""
    assert difference((exact + 4e-5 * x).astype(np.float32), want, True)
    text = "g (float[9,3,1] x, float[3] s, float[3] b) => (float[9,3,1] y)"
    norm = graph_of(f"{text} {{ y = InstanceNormalization(x, s, b) }}")
    feeds = {k: rng.standard_normal(n).astype(np.float32) for k, n in (("s", 3), ("b", 3))}
    feeds["x"] = (1e3 * rng.standard_normal((9, 3, 1))).astype(np.float32)
    (theirs,) = session(norm).run(None, feeds)
    bias = np.broadcast_to(feeds["b"].reshape(1, 3, 1), (9, 3, 1))
    assert np.abs(theirs - bias).max() > 1e-3 * np.abs(bias).max()
    want = wanted(norm, feeds)["y"]
    assert difference(bias, want, True) == "" == difference(theirs, want, True)
    assert difference(bias + 30, want, True)


def test_the_tail_of_a_sigmoid_is_wanted_as_it_is() -> None:
    """Drawing found an output of nothing but such tails, where ONNX Runtime has 0."""
    sigmoid = graph_of("g (float[4] x) => (float[4] y) { y = Sigmoid(x) }")
    x = np.array([-20.2, -30.0, -60.0, -19.0], np.float32)
    (theirs,) = session(sigmoid).run(None, {"x": x})
    assert not theirs.any()
    want = wanted(sigmoid, {"x": x})["y"]
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert difference(exact.astype(np.float32), want, True) == ""
    for wrong in (theirs, 1.01 * exact.astype(np.float32)):
        assert difference(wrong, want, True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_written_out_operators_mean_what_they_did(approximate: str) -> None:
    body = f'{{ n = InstanceNormalization(x, s, b) g = Gelu <approximate = "{approximate}"> (n)'
    body += " y = Sigmoid(g) }"
    text = f"g (float[2,3,5,4] x, float[3] s, float[3] b) => (float[2,3,5,4] y) {body}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]> {text}')
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 5, 4), "s": (3,), "b": (3,)}
    feeds = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    written = written_out(model)
    gone = {"Gelu", "InstanceNormalization", "Sigmoid"}
    assert not gone & {node.op_type for node in written.graph.node}
    (want,), (got,) = (session(m).run(None, feeds) for m in (model, written))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
