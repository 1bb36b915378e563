"""ReverseSequence as it is written out, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import UnsupportedError
from tests.frontend.operators.one_node import check, node_model

RNG = np.random.default_rng(0)
AXES = [{"time_axis": 0, "batch_axis": 1}, {"time_axis": 1, "batch_axis": 0}]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("rest", [(), (3,), (2, 3)])
@pytest.mark.parametrize("given", [True, False])
def test_samples_of_several_lengths(
    axes: dict[str, int], rest: tuple[int, ...], given: bool
) -> None:
    shape = (5, 4, *rest) if axes["time_axis"] == 0 else (4, 5, *rest)
    x = {"x": RNG.standard_normal(shape).astype(np.float32)}
    lengths = {"n": np.array([1, 5, 3, 2], np.int64)}
    inputs, constants = (x, lengths) if given else (x | lengths, {})
    check(node_model("ReverseSequence", inputs, constants, ["x", "n"], 1, **axes), inputs)


@pytest.mark.parametrize("axes", AXES)
def test_whole_samples_are_flipped(axes: dict[str, int]) -> None:
    x = {"x": RNG.standard_normal((5, 5, 2)).astype(np.float32)}
    lengths = {"n": np.full(5, 5, np.int64)}
    model = node_model("ReverseSequence", x, lengths, ["x", "n"], 1, **axes)
    check(model, x)
    kinds = {op.kind for op in lower(load_onnx(model, simplify=False)).operators.values()}
    assert "gather" not in kinds and "relax" not in kinds


def test_axes_that_onnx_does_not_allow_are_refused() -> None:
    x = {"x": RNG.standard_normal((5, 4, 3)).astype(np.float32)}
    lengths = {"n": np.array([1, 5, 3, 2], np.int64)}
    model = node_model(
        "ReverseSequence", x, lengths, ["x", "n"], 1, time_axis=2, batch_axis=1
    )
    with pytest.raises(UnsupportedError, match="first two axes"):
        load_onnx(model, simplify=False)
