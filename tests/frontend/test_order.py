"""Models whose nodes are out of order, as tools that convert to float16 write them: they append the
casts of the inputs at the end. ONNX Runtime takes them.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import gtco
from gtco.frontend.onnx import load_onnx
from gtco.support.errors import ModelError
from gtco.support.onnx_order import in_order

HALF = """g (float[2,3] x) => (float[2,3] y) {
    e = Exp(h)
    s = Add(e, c)
    h = Cast<to = 10>(x)
    y = Cast<to = 1>(s)
}"""
NESTED = """g (bool b, float[2,3] x) => (float[2,3] y) {
    y = If(b) <then_branch = t () => (float[2,3] u) { u = Add(v, a)  v = Neg(a) },
               else_branch = f () => (float[2,3] w) { w = Exp(a) }>
    a = Relu(x)
}"""
OUTSIDE = NESTED.replace("u = Add(v, a)  v = Neg(a)", "v = Neg(a)  u = Add(v, a)")
CYCLE = "g (float[2,3] x) => (float[2,3] y) { a = Add(x, d)  d = Exp(a)  y = Relu(a) }"
SORTED = "g (float[2,3] x) => (float[2,3] y) { b = Exp(x)  a = Relu(x)  y = Add(a, b) }"


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    if "c)" in text:
        bias = np.array([1.0, 2.0, 3.0], np.float16)
        model.graph.initializer.append(numpy_helper.from_array(bias, "c"))
    return model


def test_a_node_stands_behind_those_that_it_reads() -> None:
    model = parsed(HALF)
    before = model.SerializeToString()
    assert [n.output[0] for n in in_order(model).graph.node] == ["h", "e", "s", "y"]
    assert model.SerializeToString() == before  # the message given is the caller's


def test_nested_graphs_are_sorted_and_read_what_is_outside() -> None:
    sorted_model = in_order(parsed(NESTED))
    assert [n.op_type for n in sorted_model.graph.node] == ["Relu", "If"]
    branch = sorted_model.graph.node[1].attribute[0].g
    assert [n.op_type for n in branch.node] == ["Neg", "Add"]
    onnx.checker.check_model(sorted_model, full_check=True)


def test_a_model_in_order_is_left_alone() -> None:
    model = parsed(SORTED)
    assert in_order(model) is model


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ModelError, match="topologically sorted"):
        load_onnx(parsed(CYCLE))


@pytest.mark.parametrize("text", [HALF, OUTSIDE])  # ONNX Runtime wants nested graphs in order
def test_they_compile_and_are_verified(text: str) -> None:
    model = parsed(text)
    compiled = gtco.compile_model(model, verify=True)
    feeds = {"x": np.array([[0.5, -1.0, 2.0], [0.0, 3.0, -2.0]], np.float32)}
    if text is OUTSIDE:
        feeds["b"] = np.array(True)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (want,) = session.run(None, feeds)
    np.testing.assert_allclose(compiled.run(feeds)["y"], want, rtol=2e-3)
