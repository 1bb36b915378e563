"""Outputs whose shape neither the file nor ONNX's inference knows, and what onnxsim makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import gtco
from gtco.frontend.simplify import simplify
from gtco.frontend.unknown_outputs import simplified


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def recognizer(
    *ending: onnx.NodeProto, outputs: Sequence[str] = ("yo", "z"), opset: int = 13
) -> onnx.ModelProto:
    """As in files by Paddle: a shape that ONNX's inference does not follow, and a Shape behind it.
    ``y`` is [1, 4, 6], and ``p`` has the 4, as a vector.
    """
    sizes = {"zero": 0, "one": 1, "two": 2, "minus": -1, "three": 3}
    nodes = [
        node("Sigmoid", "x", "x1"),
        node("Shape", "x1", "s"),
        node("Slice", "s zero two zero", "s1"),
        node("Concat", "s1 minus", "s2", axis=0),
        node("Reshape", "x1 s2", "r"),
        node("Transpose", "r", "t", perm=[0, 2, 1]),
        node("Add", "t b", "y"),
        node("Identity", "y", "yo"),
        node("Shape", "y", "p1"),
        node("Cast", "p1", "p2", to=TensorProto.INT32),
        node("Slice", "p2 one two zero", "p3"),
        node("Cast", "p3", "p", to=TensorProto.INT64),
    ]
    graph = helper.make_graph(
        [*nodes, *ending],
        "recognizer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 6, 1, 4])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            *(helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in sizes.items()),
            helper.make_tensor("b", TensorProto.FLOAT, [6], range(6)),
        ],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


RESHAPED = (node("Concat", "zero p two three", "p4", axis=0), node("Reshape", "y p4", "z"))
# The 4 becomes a value: with the shape that was made up it would be the sum of nothing, 0.
MULTIPLIED = (
    node("Cast", "p", "f", to=TensorProto.FLOAT),
    node("ReduceSum", "f", "g", keepdims=0),
    node("Mul", "x g", "z"),
)


@pytest.mark.parametrize("ending", [RESHAPED, MULTIPLIED], ids=["reshaped", "multiplied"])
@pytest.mark.parametrize("outputs", [("yo", "z"), ("z", "y"), ("y", "yo", "z")], ids=" ".join)
@pytest.mark.parametrize("opset", [13, 17])
def test_a_shape_that_is_made_up_is_believed_by_nobody(
    ending: tuple[onnx.NodeProto, ...], outputs: tuple[str, ...], opset: int
) -> None:
    model = recognizer(*ending, outputs=outputs, opset=opset)
    x = np.random.default_rng(0).standard_normal((1, 6, 1, 4), np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    compiled = gtco.compile_model(model)
    assert not compiled.report.notes
    for wanted, got in zip(session.run(None, {"x": x}), compiled(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_what_onnxsim_sees_and_what_comes_back() -> None:
    model = recognizer(*RESHAPED)
    seen = []

    def onnxsim(given: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
        seen.append(onnx.ModelProto.FromString(given.SerializeToString()))
        return simplify(given, 60)

    for value in model.graph.output:
        value.type.tensor_type.shape.SetInParent()
    got, note = simplified(model, {"yo", "z"}, onnxsim)
    assert not note
    for value in seen[0].graph.output:  # a vector of any length
        (dim,) = value.type.tensor_type.shape.dim
        assert not dim.HasField("dim_value")
    assert [value.name for value in got.graph.output] == ["yo", "z"]
    assert [value.name for value in got.graph.input] == ["x"]
    assert not {"Compress", "Shape"} & {node.op_type for node in got.graph.node}
    made = {name for node in got.graph.node for name in node.output}
    assert {"yo", "z"} <= made


def test_a_model_that_onnxsim_cannot_simplify_is_unchanged() -> None:
    model = recognizer(*RESHAPED)
    got, note = simplified(model, {"yo", "z"}, lambda given: (given, "too slow"))
    assert got is model and note == "too slow"


def test_outputs_that_are_known_change_nothing() -> None:
    model = recognizer(*RESHAPED)
    got, _ = simplified(model, set(), lambda given: (given, ""))
    assert got is model
