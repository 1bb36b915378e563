"""Functions of a model's own, and files of the oldest form: what stands in the message is what is
computed.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError, UnsupportedError
from gtco.support.onnx_functions import inlined

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]


def refers(node: onnx.NodeProto, name: str, to: str) -> onnx.NodeProto:
    """The node, whose attribute is that of the function's call."""
    kind = onnx.AttributeProto.FLOAT
    node.attribute.append(onnx.AttributeProto(name=name, type=kind, ref_attr_name=to))
    return node


def leaky(default: float) -> onnx.FunctionProto:
    """my.Leaky(x, slope=default)"""
    node = refers(helper.make_node("LeakyRelu", ["x"], ["y"]), "alpha", "slope")
    given = [helper.make_attribute("slope", default)]
    return helper.make_function("my", "Leaky", ["x"], ["y"], [node], OPSETS, [], given)


def calling(
    nodes: list[onnx.NodeProto], functions: list[onnx.FunctionProto], **constants: np.ndarray
) -> onnx.ModelProto:
    """x -> nodes -> y"""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, X.shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=OPSETS, functions=functions)


def run(model: onnx.ModelProto) -> np.ndarray:
    """What the graph of the model computes of X."""
    (y,) = lower(load_onnx(model)).check().evaluate({"x": X}).values()
    return y


@pytest.mark.parametrize("given", [None, 0.5])
def test_a_call_takes_the_defaults_of_its_function(given: float | None) -> None:
    node = helper.make_node("Leaky", ["x"], ["y"], domain="my")
    if given is not None:
        node.attribute.append(helper.make_attribute("slope", given))
    model = calling([node], [leaky(0.3)])
    text = model.SerializeToString()
    slope = 0.3 if given is None else given
    np.testing.assert_allclose(run(model), np.where(X < 0, slope * X, X), rtol=1e-6)
    assert model.SerializeToString() == text
    # float64, which decides for --verify, reads the same
    assert [n.attribute[0].f for n in inlined(model).graph.node] == [pytest.approx(slope)]


@pytest.mark.parametrize("given", [None, 0.5])
def test_a_call_within_takes_them_where_its_attribute_is_left_out_outside(
    given: float | None,
) -> None:
    """The outer function hands its attribute on, which has no default of its own."""
    inner = refers(helper.make_node("Leaky", ["x"], ["y"], domain="my"), "slope", "steep")
    outer = helper.make_function("my", "Outer", ["x"], ["y"], [inner], OPSETS, ["steep"])
    last = helper.make_function(
        "my", "Last", ["x"], ["y"],
        [refers(helper.make_node("Outer", ["x"], ["y"], domain="my"), "steep", "steeper")],
        OPSETS, ["steeper"],
    )  # fmt: skip
    node = helper.make_node("Last", ["x"], ["y"], domain="my")
    if given is not None:
        node.attribute.append(helper.make_attribute("steeper", given))
    slope = 0.3 if given is None else given
    for functions in ([leaky(0.3), outer, last], [last, outer, leaky(0.3)]):
        model = calling([node], functions)
        np.testing.assert_allclose(run(model), np.where(X < 0, slope * X, X), rtol=1e-6)
        assert [n.op_type for n in inlined(model).graph.node] == ["LeakyRelu"]


def test_a_call_within_a_function_and_within_a_branch_takes_them_too() -> None:
    inner = helper.make_node("Leaky", ["x"], ["y"], domain="my")
    outer = helper.make_function("my", "Outer", ["x"], ["y"], [inner], OPSETS)
    type_ = helper.make_tensor_value_info("o", TensorProto.FLOAT, X.shape)
    branch = helper.make_node("Outer", ["x"], ["o"], domain="my")
    other = helper.make_node("Leaky", ["x"], ["o"], domain="my")
    choice = helper.make_node(
        "If",
        ["c"],
        ["t"],
        then_branch=helper.make_graph([branch], "t", [], [type_]),
        else_branch=helper.make_graph([other], "e", [], [type_]),
    )
    last = helper.make_node("Neg", ["t"], ["y"])
    for taken in (True, False):
        model = calling([choice, last], [outer, leaky(0.3)], c=np.array(taken))
        np.testing.assert_allclose(run(model), -np.where(X < 0, 0.3 * X, X), rtol=1e-6)


def test_a_function_may_call_another_of_its_name() -> None:
    """They differ by what the format calls an overload."""
    call = helper.make_node("F", ["x"], ["y"], domain="my", overload="inner")
    outer = helper.make_function("my", "F", ["x"], ["y"], [call], OPSETS, overload="outer")
    node = helper.make_node("Neg", ["x"], ["y"])
    inner = helper.make_function("my", "F", ["x"], ["y"], [node], OPSETS, overload="inner")
    first = helper.make_node("F", ["x"], ["y"], domain="my", overload="outer")
    np.testing.assert_array_equal(run(calling([first], [outer, inner])), -X)
    node.CopyFrom(first)
    inner = helper.make_function("my", "F", ["x"], ["y"], [node], OPSETS, overload="inner")
    with pytest.raises(ModelError, match="calls itself"):
        load_onnx(calling([first], [outer, inner]))


def test_a_file_whose_weights_are_inputs_too() -> None:
    """Before version 4 of the format each initializer had to be one."""
    w = np.eye(4, dtype=np.float32) * 3
    model = calling([helper.make_node("MatMul", ["x", "w"], ["y"])], [], w=w)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 8))
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4]))
    onnx.checker.check_model(model)
    np.testing.assert_array_equal(run(model), 3 * X)


@pytest.mark.parametrize("constant", [False, True])
def test_sparse_weights_are_named(constant: bool) -> None:
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    where = helper.make_tensor("w_indices", TensorProto.INT64, [2], [0, 5])
    sparse = helper.make_sparse_tensor(values, where, [4, 4])
    model = calling([helper.make_node("MatMul", ["x", "w"], ["y"])], [])
    if constant:
        node = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
        model.graph.node.insert(0, node)
    else:
        model.graph.sparse_initializer.append(sparse)
    with pytest.raises(UnsupportedError, match="sparse weights: 'w'"):
        load_onnx(model)
