"""Operators of ONNX that read or write at indices, against ONNX Runtime; none of them uses the
fallback.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import gtco
import gtco.compiler
from tests.kernels import fresh_seed


class Cases:
    """Nodes of one model; ``check`` compiles it and compares every output."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(fresh_seed())
        self.nodes: list[onnx.NodeProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.outputs: list[str] = []

    def given(self, array: np.ndarray, constant: bool = False) -> str:
        name = f"x{len(self.feeds) + len(self.constants)}"
        (self.constants if constant else self.feeds)[name] = array
        return name

    def numbers(self, *shape: int) -> str:
        return self.given(self.rng.standard_normal(shape).astype(np.float32))

    def indices(self, shape: tuple[int, ...], sizes: list[int], constant: bool = False) -> str:
        """Along the last axis one index for each size; some are negative."""
        parts = [self.rng.integers(-n, n, (*shape[:-1], 1)) for n in sizes]
        whole = np.concatenate(parts, -1) if len(sizes) > 1 else None
        if whole is None:
            whole = self.rng.integers(-sizes[0], sizes[0], shape)
        return self.given(whole, constant)

    def add(self, kind: str, *inputs: str, results: int = 1, **attrs: object) -> None:
        made = [f"y{len(self.outputs) + n}" for n in range(results)]
        self.nodes.append(helper.make_node(kind, inputs, made, **attrs))
        self.outputs += made

    def check(self) -> None:
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        inputs = [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in self.feeds.items()
        ]
        constants = [numpy_helper.from_array(v, k) for k, v in self.constants.items()]
        graph = helper.make_graph(self.nodes, "indexing", inputs, outputs, constants)
        opset = [helper.make_opsetid("", 18)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=9)
        model = onnx.shape_inference.infer_shapes(model)
        session = onnxruntime.InferenceSession(model.SerializeToString())
        wanted = session.run(None, self.feeds)
        # by constants: what is measured while other tests run may take the fallback for the fastest
        compiled = gtco.compile_model(model, tune="off", strict=True, target="x86-64-v3")
        got = compiled(*self.feeds.values())
        for name, ours, theirs in zip(self.outputs, got, wanted, strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)
        assert "fallback" not in {stage["schedule"]["sketch"] for stage in compiled.stages}


def test_gathers() -> None:
    c = Cases()
    for axis in (0, 1, -1):
        shape = [4, 5, 6]
        taken = (3, 4, 5)
        c.add("GatherElements", c.numbers(*shape), c.indices(taken, [shape[axis]]), axis=axis)
    c.add("GatherElements", c.numbers(9), c.indices((4,), [9], constant=True), axis=0)
    c.add("GatherND", c.numbers(4, 5, 6), c.indices((7, 2), [4, 5]))
    c.add("GatherND", c.numbers(4, 5, 6), c.indices((2, 7, 3), [4, 5, 6]))
    c.add("GatherND", c.numbers(4, 5, 6), c.indices((3, 1), [4], constant=True))
    c.add("GatherND", c.numbers(3, 5, 6, 2), c.indices((3, 7, 2), [5, 6]), batch_dims=1)
    c.add("GatherND", c.numbers(3, 2, 6, 2), c.indices((3, 2, 1), [6]), batch_dims=2)
    c.check()


def test_scatters() -> None:
    """Each element is written once, because ONNX does not say which of several writes is kept."""
    c = Cases()
    every = np.stack([c.rng.permutation(5)[:3] for _ in range(4)])  # all different in a row
    every[1] -= 5
    c.add("ScatterElements", c.numbers(4, 5), c.given(every), c.numbers(4, 3), axis=1)
    rows = c.given(c.rng.permutation(6)[:4].reshape(4, 1) - 6)
    c.add("ScatterND", c.numbers(6, 7, 3), rows, c.numbers(4, 7, 3))
    for reduction in ("add", "mul", "max", "min"):
        indices = c.indices((3, 4), [5])
        c.add(
            "ScatterElements", c.numbers(5, 6), indices, c.numbers(3, 4), axis=0,
            reduction=reduction,
        )  # fmt: skip
        indices = c.indices((8, 2), [3, 4])
        c.add("ScatterND", c.numbers(3, 4, 5), indices, c.numbers(8, 5), reduction=reduction)
    c.check()


def test_indices_outside_read_and_write_nothing_outside(tmp_path: Path) -> None:
    """ONNX Runtime gives an error. A kernel gives none, and stays in its tensors."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
    agraph (float[5,3] x, int64[4] i, int64[4,1] j, float[4,3] u)
        => (float[4,3] y, float[4,3] z, float[4,1] e, float[5,3] s) {
      y = Gather(x, i) z = GatherND(x, j) e = GatherElements<axis = 1>(x, j) s = ScatterND(x, j, u)
    }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(fresh_seed())
    x, u = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (4, 3)))
    i = np.array([5, -6, 2**31 - 1, -(2**31)])
    gtco.compiler.compile_to_file(model, tmp_path / "outside.so")
    with gtco.load(tmp_path / "outside.so") as compiled:
        result = compiled.run({"x": x, "i": i, "j": i[:, None], "u": u})
    for name in "yze":
        assert np.isin(result[name], x).all(), name
    np.testing.assert_array_equal(result["s"], x)


@pytest.mark.parametrize("k", [1, 4, 70])
def test_topk(k: int) -> None:
    c = Cases()
    count = c.given(np.array([k]), constant=True)
    few = c.given(c.rng.integers(-3, 4, (3, 90)).astype(np.float32))
    c.add("TopK", few, count, results=2)
    c.add("TopK", few, count, results=2, largest=0)
    c.add("TopK", c.numbers(80, 2, 3), count, results=2, axis=0)
    c.add("TopK", c.numbers(2, 80, 3), count, results=2, axis=-2, largest=0)
    c.check()


@pytest.mark.parametrize("kind", ["Gather", "GatherElements", "GatherND"])
def test_gathers_of_no_elements(kind: str) -> None:
    """As where token merging leaves no token: what is gathered is then one part of a Concat."""
    c = Cases()
    x, rest = c.numbers(2, 5, 4), c.numbers(2, 3, 4)
    shape = {"Gather": (2,), "GatherElements": (2, 2, 4), "GatherND": (2, 2, 2)}[kind]
    given = c.given(np.zeros(shape, np.int64))
    begin, axis = (c.given(np.array([n]), constant=True) for n in (0, min(len(shape) - 1, 1)))
    c.nodes.append(helper.make_node("Slice", [given, begin, begin, axis], ["none"]))
    attrs = {} if kind == "GatherND" else {"axis": 1}
    c.nodes.append(helper.make_node(kind, [x, "none"], ["gathered"], **attrs))
    c.add("Concat", "gathered", rest, axis=1)
    c.add("Neg", rest)
    c.check()
