"""Every stage has the name of a node of the model whose work it does."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.compiler import compile_model

# operators of a stage that is named after a node of this type
DOES = {
    "LayerNormalization": {"layer_norm"},
    "MatMul": {"matmul", "attention"},
    "Softmax": {"softmax", "attention"},
    "Gelu": {"gelu"},
    "Add": {"add"},
    "ReduceMean": {"mean", "sum", "reduce_mean"},
    "Transpose": {"permute"},
    "Slice": {"slice"},
}


def block(tokens: int, width: int) -> onnx.ModelProto:
    """Layer normalisation, single-headed attention, a residual and an MLP; each node is named after
    its type.
    """
    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {
        "one": np.ones(width, np.float32),
        "zero": np.zeros(width, np.float32),
        "begin": np.array([0]),
        "end": np.array([1]),
        "axis": np.array([1]),
    }
    for name in "qkvo":
        made[name] = rng.standard_normal((width, width), np.float32) / width
    made["up"] = rng.standard_normal((width, 4 * width), np.float32) / width
    made["down"] = rng.standard_normal((4 * width, width), np.float32) / width
    steps = [
        ("LayerNormalization", ["x", "one", "zero"], "n", {"axis": -1}),
        *(("MatMul", ["n", name], f"{name}_", {}) for name in "qkv"),
        ("Transpose", ["k_"], "kt", {"perm": [0, 2, 1]}),
        ("MatMul", ["q_", "kt"], "scores", {}),
        ("Softmax", ["scores"], "weights", {"axis": -1}),
        ("MatMul", ["weights", "v_"], "heads", {}),
        ("MatMul", ["heads", "o"], "out", {}),
        ("Add", ["x", "out"], "r", {}),
        ("LayerNormalization", ["r", "one", "zero"], "m", {"axis": -1}),
        ("MatMul", ["m", "up"], "h", {}),
        ("Gelu", ["h"], "g", {}),
        ("MatMul", ["g", "down"], "d", {}),
        ("Add", ["r", "d"], "s", {}),
        ("Slice", ["s", "begin", "end", "axis"], "c", {}),
        ("LayerNormalization", ["c", "one", "zero"], "y", {"axis": -1}),
    ]
    nodes = [
        helper.make_node(kind, inputs, [output], name=f"{kind}.{output}", **attributes)
        for kind, inputs, output, attributes in steps
    ]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, tokens, width))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, width))],
        [numpy_helper.from_array(array, name) for name, array in made.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("tokens", [3, 50])
def test_a_stage_holds_the_node_that_it_is_called_by(tokens):
    with compile_model(block(tokens, 24), threads=1) as model:
        found = [(stage["name"], stage["operators"]) for stage in model.stages]
    assert len(found) >= 4
    for name, operators in found:
        kind = re.split("[._]", name)[0]  # onnxsim numbers the nodes that it makes
        assert DOES[kind] & set(operators), (name, operators)
    # the heaviest node of a stage gives the name
    for name, operators in found:
        assert "matmul" not in operators or name.startswith("MatMul"), (name, operators)
