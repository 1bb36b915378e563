"""The steps of a recurrent network, which are written out, share kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.compiler import compile_model, compile_to_file
from gtco.driver.compiled import CompiledModel
from gtco.driver.sizes.sharing import ALONE, alike
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage
from tests.by_constants import by_constants

STEPS, SIZE, HIDDEN = 12, 10, 24


def recurrent(kind: str = "LSTM") -> onnx.ModelProto:
    """Both directions of a sequence of any length."""
    rng = np.random.default_rng(0)
    gates = {"LSTM": 4, "GRU": 3}[kind]

    def weight(name: str, *shape: int) -> Any:
        return numpy_helper.from_array((0.3 * rng.standard_normal(shape)).astype("f4"), name)

    constants = [
        weight("w", 2, gates * HIDDEN, SIZE),
        weight("r", 2, gates * HIDDEN, HIDDEN),
        weight("b", 2, 2 * gates * HIDDEN),
    ]
    node = helper.make_node(
        kind, ["x", "w", "r", "b"], ["y"], hidden_size=HIDDEN, direction="bidirectional"
    )
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("length", 1, SIZE))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("length", 2, 1, HIDDEN))],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    return model


OPTIONS: Any = {"threads": 2, "tune": "off", "cache": False}


@pytest.fixture(scope="module", params=["LSTM", "GRU"])
def compiled(request: pytest.FixtureRequest) -> Iterator[tuple[str, CompiledModel]]:
    model = recurrent(request.param)
    with by_constants(), compile_model(model, shapes={"length": STEPS}, **OPTIONS) as made:
        yield request.param, made


def test_the_values(compiled: tuple[str, CompiledModel]) -> None:
    kind, made = compiled
    session = onnxruntime.InferenceSession(recurrent(kind).SerializeToString())
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((STEPS, 1, SIZE)).astype(np.float32)
        (wanted,) = session.run(None, {"x": x})
        np.testing.assert_allclose(made(x), wanted, rtol=1e-4, atol=1e-5)


def test_steps_share_kernels(compiled: tuple[str, CompiledModel]) -> None:
    """Those that differ in which part of the sequence they read alone. The first and the last steps
    of both directions may be cut in another way.
    """
    _, made = compiled
    products = [s for s in made.stages if "matmul" in s["operators"] and "slice" in s["operators"]]
    assert len({stage["key"] for stage in products}) >= STEPS
    [(_, uses)] = Counter(stage["kernel"] for stage in products).most_common(1)
    assert uses >= 2 * (STEPS - 3)


def test_a_library_is_the_same_each_time(tmp_path: Path) -> None:
    made = []
    for name in "ab":
        path = tmp_path / name / "m.so"
        path.parent.mkdir()
        compile_to_file(recurrent(), path, shapes={"length": STEPS}, **OPTIONS)
        made.append(path.read_bytes())
    assert made[0] == made[1]


def test_lengths_of_one_library() -> None:
    lengths = [3, 10, 11, 16, 20]
    session = onnxruntime.InferenceSession(recurrent().SerializeToString())
    with compile_model(recurrent(), dims={"length": lengths}, **OPTIONS) as made:
        for length in (*lengths, *lengths[::-1]):
            x = np.random.default_rng(length).standard_normal((length, 1, SIZE)).astype(np.float32)
            (wanted,) = session.run(None, {"x": x})
            np.testing.assert_allclose(made(x), wanted, rtol=1e-4, atol=1e-5)


def test_only_many_stages_that_differ_in_their_places_are_alike() -> None:
    whole, part = TensorType((32, 4)), TensorType((1, 4))

    def stage(begin: int, stride: int = 1) -> Any:
        attrs = make_attrs(begin=(begin, 0), strides=(stride, 1))
        ops = [
            Operator("slice", ("x",), "s", part, attrs),
            Operator("relu", ("s",), "y", part),
        ]
        return make_stage(ops, {"x": whole, "s": part, "y": part}, ())

    many = [stage(begin) for begin in range(ALONE + 1)]
    assert [s.key for s in alike(many * 2)] == [s.key for s in many]
    assert alike(many[:-1] * 2) == []
    assert alike([*many[:-1], stage(ALONE, 2)]) == []
