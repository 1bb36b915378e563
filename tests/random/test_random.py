"""The same random graphs on every run (``make check-random`` for any number of others)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from tests.random.__main__ import search
from tests.random.builder import model_of
from tests.random.draw import OPSETS, draw
from tests.random.engine import Wanted, difference, wanted
from tests.random.shrink import shrink

SEED, COUNT = 0, 180


def test_graphs_of_the_family_agree_with_onnx_runtime(tmp_path: Path) -> None:
    total = search(SEED, COUNT, 1e9, tmp_path, small=False)
    assert not total.found, "\n".join(map(str, total.found))
    assert total.compared + total.invalid == total.drawn == COUNT
    assert total.invalid <= COUNT // 50
    assert {"Conv", "Softmax", "MatMul", "Where", "Pad", "IsNaN"} <= set(total.kinds)


def test_a_seed_is_a_graph() -> None:
    for seed in range(20):
        first, again = (model_of([draw(seed, OPSETS[0])]) for _ in range(2))
        assert first.SerializeToString() == again.SerializeToString()


def test_every_difference_is_seen() -> None:
    value = np.array([1.0, np.nan, np.inf, -3.0], np.float32)
    want = Wanted(value, value)
    assert difference(value, want, True) == ""
    for at, other in ((0, 1.01), (0, np.nan), (1, 0.0), (2, -np.inf), (2, 3e38), (3, np.inf)):
        wrong = value.copy()
        wrong[at] = other
        assert difference(wrong, want, True), (at, other)
    assert difference(value.astype(np.float64), want, True)
    assert difference(value[:3], want, True)
    one = Wanted(np.float32(np.nan), np.float32(np.nan))
    assert difference(np.float32(np.nan), one, True) == ""
    assert difference(np.float32(0), one, True)


def test_shrinking_keeps_what_fails() -> None:
    """ "Fails" where a Softmax reads negative numbers: one node is left of a dozen."""
    graph = next(g for s in range(500) if (g := draw(s, 18)).kinds.count("Softmax") == 1)

    def fails(case: tuple[onnx.ModelProto, dict[str, np.ndarray]]) -> bool:
        wanted(*case)  # a valid model, fed right
        return any(n.op_type == "Softmax" for n in case[0].graph.node)

    model, feeds = shrink(model_of([graph]), graph.feeds, fails)
    assert len(graph.nodes) > 1
    assert [n.op_type for n in model.graph.node] == ["Softmax"] and len(feeds) == 1
