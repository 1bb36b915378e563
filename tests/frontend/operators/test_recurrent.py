"""LSTM, GRU and RNN, written out step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import UnsupportedError
from tests.frontend.operators.one_node import check, node_model

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTH, BATCH, WIDTH, HIDDEN = 4, 2, 5, 3


def _model(
    kind: str, leave_out: str = "", **attrs: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node and its inputs. ``leave_out`` names inputs by their letters."""
    rng = np.random.default_rng(0)
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    batch_first = attrs.get("layout", 0)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / 2

    def sequence(first: int, *rest: int) -> np.ndarray:
        made = values(first, *rest)
        return np.ascontiguousarray(made.swapaxes(0, 1)) if batch_first else made

    gates = GATES[kind] * HIDDEN
    constants = {
        "w": values(directions, gates, WIDTH),
        "r": values(directions, gates, HIDDEN),
        "b": values(directions, 2 * gates),
        "l": np.full(BATCH, LENGTH, np.int32),
        "h": sequence(directions, BATCH, HIDDEN),
    }
    if kind == "LSTM":
        constants |= {"c": sequence(directions, BATCH, HIDDEN), "p": values(directions, 3 * HIDDEN)}
    order = ["x", *("" if name in leave_out else name for name in constants)]
    kept = {name: value for name, value in constants.items() if name not in leave_out}
    inputs = {"x": sequence(LENGTH, BATCH, WIDTH)}
    outputs = 3 if kind == "LSTM" else 2
    model = node_model(kind, inputs, kept, order, outputs, hidden_size=HIDDEN, **attrs)
    return model, inputs


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
def test_directions(kind: str, direction: str) -> None:
    check(*_model(kind, direction=direction))
    check(*_model(kind, "blhcp", direction=direction))


@pytest.mark.parametrize(
    ("kind", "attrs"),
    [
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"clip": 0.3}),
        ("GRU", {"linear_before_reset": 1, "direction": "bidirectional"}),
        ("GRU", {"clip": 0.2}),
        ("RNN", {"activations": ["LeakyRelu"], "activation_alpha": [0.3]}),
        (
            "LSTM",
            {
                "direction": "bidirectional",
                "activations": "HardSigmoid Elu Tanh Sigmoid LeakyRelu Softsign".split(),
                "activation_alpha": [0.3, 0.7, 0.2],
                "activation_beta": [0.4],
            },
        ),
    ],
    ids=str,
)
def test_attributes(kind: str, attrs: dict[str, Any]) -> None:
    check(*_model(kind, **attrs))


@pytest.mark.parametrize("kind", GATES)
def test_batch_first(kind: str) -> None:
    """ONNX Runtime has no such layout: it is the other one with axes exchanged."""
    (plain, inputs), (turned, exchanged) = (
        _model(kind, "c", direction="bidirectional", layout=layout) for layout in (0, 1)
    )
    wanted = check(plain, inputs)
    got = lower(load_onnx(turned, simplify=False)).evaluate(exchanged)
    orders = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]
    for y, other, order in zip(got.values(), wanted, orders, strict=False):
        np.testing.assert_allclose(y, other.transpose(order), rtol=0, atol=1e-6)


def test_lengths_of_single_sequences_are_refused() -> None:
    model, _ = _model("GRU")
    (lengths,) = (t for t in model.graph.initializer if t.name == "l")
    lengths.CopyFrom(onnx.numpy_helper.from_array(np.array([LENGTH, 2], np.int32), "l"))
    with pytest.raises(UnsupportedError, match="lengths of their own"):
        load_onnx(model)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    model, _ = _model("RNN", "blh")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 10_000
    with pytest.raises(UnsupportedError, match="10000 steps"):
        load_onnx(model)


@pytest.mark.parametrize("left_out", [1, 2])
def test_an_output_that_is_left_out_is_nobodys_input(left_out: int) -> None:
    """Both are written as "": a later node's input that is left out is not the state before it."""
    model, inputs = _model("LSTM", "blhcp")
    node = model.graph.node[0]
    node.output[left_out] = ""
    del model.graph.output[left_out]
    most = helper.make_node("Constant", [], ["most"], value_float=0.1)
    model.graph.node.extend([most, helper.make_node("Clip", ["y0", "", "most"], ["clipped"])])
    model.graph.output.append(helper.make_tensor_value_info("clipped", TensorProto.FLOAT, None))
    check(model, inputs)


@pytest.mark.parametrize("opset", [7, 9, 10])
@pytest.mark.parametrize("kind", GATES)
def test_files_of_older_opsets(kind: str, opset: int) -> None:
    """Slice has attributes before opset 10. torch wrote opset 9 for years."""
    model, inputs = _model(kind, "p", direction="bidirectional")
    model.opset_import[0].version = opset
    model.ir_version = 4
    model.graph.input.extend(  # initializers are inputs there
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer
    )
    check(model, inputs)
