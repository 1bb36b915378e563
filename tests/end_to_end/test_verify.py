"""What ``verify`` catches: a real compiled model beside a reference that differs in one respect, or
with one broken lane in its output.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gtco
from gtco.support.errors import VerificationError
from gtco.verification import verify
from tests.verification.changed import Changed, compiled_here

BATCH, TOKENS, HEADS, SIZE = 2, 19, 3, 8
WIDTH = HEADS * SIZE


def encoder(
    mask: str | None = "int64",
    heads: tuple[int, ...] = (0, 1, 2),
    masked: bool = True,
    vocabulary: int | None = None,
) -> onnx.ModelProto:
    """One attention with its projections, on images ``x`` or on ``ids``.

    ``mask`` is ``int64`` (1 for a token that counts, turned into (1 - m) * min as Hugging Face
    does) or ``float32`` (added to the scores); ``masked=False`` leaves it out of the scores.
    ``heads`` says with which head's values each head's probabilities are multiplied.
    """
    rng = np.random.default_rng(7)
    values: dict[str, np.ndarray] = {
        name: (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        for name in ("wq", "wk", "wv", "wo")
    }
    blocks = values["wv"].reshape(WIDTH, HEADS, SIZE)
    values["wv"] = np.ascontiguousarray(blocks[:, list(heads)].reshape(WIDTH, WIDTH))
    values["split"] = np.array([0, 0, HEADS, SIZE])
    values["join"] = np.array([0, 0, WIDTH])
    values["scale"] = np.array(SIZE**-0.5, np.float32)
    nodes, inputs = [], []

    def node(kind: str, given: list[str], result: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(kind, given, [result], **attributes))

    if vocabulary is None:
        shape = (BATCH, TOKENS, WIDTH)
        inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
    else:
        values["table"] = rng.standard_normal((vocabulary, WIDTH)).astype(np.float32)
        inputs.append(helper.make_tensor_value_info("ids", TensorProto.INT64, (BATCH, TOKENS)))
        node("Gather", ["table", "ids"], "x")
    for name, axes in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        node("MatMul", ["x", f"w{name}"], f"{name}0")
        node("Reshape", [f"{name}0", "split"], f"{name}1")
        node("Transpose", [f"{name}1"], name, perm=axes)
    node("MatMul", ["q", "k"], "s0")
    node("Mul", ["s0", "scale"], "s1")
    scores = "s1"
    if mask == "int64":
        values["one"] = np.array(1, np.float32)
        values["min"] = np.array(np.finfo(np.float32).min)
        values["axes"] = np.array([1, 2])
        inputs.append(helper.make_tensor_value_info("keep", TensorProto.INT64, (BATCH, TOKENS)))
        node("Unsqueeze", ["keep", "axes"], "m0")
        node("Cast", ["m0"], "m1", to=TensorProto.FLOAT)
        node("Sub", ["one", "m1"], "m2")
        node("Mul", ["m2", "min"], "m")
    elif mask == "float32":
        shape = (BATCH, 1, TOKENS, TOKENS)
        inputs.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, shape))
    if mask and masked:
        node("Add", ["s1", "m"], "s2")
        scores = "s2"
    node("Softmax", [scores], "p", axis=-1)
    node("MatMul", ["p", "v"], "o0")
    node("Transpose", ["o0"], "o1", perm=[0, 2, 1, 3])
    node("Reshape", ["o1", "join"], "o2")
    node("MatMul", ["o2", "wo"], "y")
    graph = helper.make_graph(
        nodes,
        "encoder",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (BATCH, TOKENS, WIDTH))],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def compiled() -> gtco.Model:
    return compiled_here(encoder())


def failing(report: Any) -> set[str]:
    return {d.case for d in report.failures}


def test_the_right_model_passes_on_every_mask(compiled: gtco.Model) -> None:
    report = verify(compiled, encoder())
    assert report.passed, report.failures
    assert {"mask ones", "mask zeros", "mask random", "mask row"} < {
        d.case for d in report.differences
    }
    assert report.worst is not None and report.worst.relative < 1e-4


def test_a_swapped_head_is_caught(compiled: gtco.Model) -> None:
    report = verify(compiled, encoder(heads=(1, 0, 2)), check=False)
    assert {"random", "large", "spike", "mask random"} <= failing(report)
    with pytest.raises(VerificationError, match=r"y on random inputs: off by"):
        report.check()


@pytest.mark.parametrize("mask", ["int64", "float32"])
def test_a_dropped_mask_is_caught(mask: str) -> None:
    dropped = compiled_here(encoder(mask, masked=False))
    report = verify(dropped, encoder(mask), check=False)
    assert {"random", "mask random", "mask row"} <= failing(report)
    assert "mask ones" not in failing(report)  # there it changes nothing
    assert mask == "int64" or {"mask random -inf", "mask row -inf"} <= failing(report)


def test_an_additive_mask_passes() -> None:
    report = verify(compiled_here(encoder("float32")), encoder("float32"))
    assert {"mask zeros", "mask row", "mask zeros -inf", "mask row -inf", "mask random -inf"} < {
        d.case for d in report.differences
    }


def test_a_file_whose_name_is_not_utf8_is_verified(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"mod\xe8le.onnx")
    onnx.save(encoder(), path)
    compiled = gtco.compile_model(path, tune="off", verify=True)
    assert compiled.report.verification is not None
    assert compiled.report.verification.reference == "ONNX Runtime"
    with pytest.raises(VerificationError, match="not UTF-8, and ONNX Runtime takes no other"):
        verify(compiled, path)


def test_onnxs_attention_passes_on_every_mask() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 23]>
        g (float[2,3,5,8] q, float[2,3,15,8] k, float[2,3,15,8] v, float[2,1,5,15] m)
          => (float[2,3,5,8] y) { y = Attention(q, k, v, m) }"""
    )
    report = verify(compiled_here(model), model)
    assert {"mask zeros", "mask row", "mask row -inf"} < {d.case for d in report.differences}


def lane(number: int, factor: float) -> Callable[[np.ndarray], None]:
    def change(value: np.ndarray) -> None:
        value[..., number::8] *= np.float32(factor)

    return change


def one_element(value: np.ndarray) -> None:
    value[1, TOKENS - 1, WIDTH - 1] += np.float32(0.05)


def last_row(value: np.ndarray) -> None:
    value[-1, -1] = 0


@pytest.mark.parametrize(
    "change", [lane(0, 0.0), lane(7, 0.95), lane(3, -1.0), one_element, last_row]
)
def test_a_broken_lane_is_caught(
    compiled: gtco.Model, change: Callable[[np.ndarray], None]
) -> None:
    report = verify(Changed(compiled, change), encoder(), check=False)
    assert {"random", "large", "mask ones"} <= failing(report)


def test_ids_reach_over_the_table_and_a_wrong_row_of_it_is_caught() -> None:
    """The wrong row is 900 of 1000; ids of 0 to 3 would never read it."""
    model = encoder(None, vocabulary=1000)
    library = compiled_here(model)
    report = verify(library, model)
    assert report.passed and report.differences[0].case == "random"
    other = encoder(None, vocabulary=1000)
    for tensor in other.graph.initializer:
        if tensor.name == "table":
            table = numpy_helper.to_array(tensor).copy()
            table[500:] *= -1
            tensor.CopyFrom(numpy_helper.from_array(table, "table"))
    with pytest.raises(VerificationError, match="y on random inputs"):
        verify(library, other)
