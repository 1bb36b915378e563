"""The table of a tiny model's plan: steps, places in the arena, weights, tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco import compiler
from gtco.driver import making
from gtco.driver.linking import finishing
from gtco.runtime.artifact import Artifact
from gtco.runtime.writing.table import plan_source
from tests.end_to_end.nodes.runner import InProcess

WIDTH, HIDDEN, TOKENS = 16, 24, 5


def tiny() -> onnx.ModelProto:
    """x + MLP(LayerNorm(x)), and the sum over its tokens."""
    rng = np.random.default_rng(0)
    shapes = {"g": (WIDTH,), "b": (WIDTH,), "w1": (WIDTH, HIDDEN), "b1": (HIDDEN,)}
    shapes |= {"w2": (HIDDEN, WIDTH), "b2": (WIDTH,)}
    nodes = [
        helper.make_node("LayerNormalization", ["x", "g", "b"], ["norm"], axis=-1),
        helper.make_node("MatMul", ["norm", "w1"], ["product"]),
        helper.make_node("Add", ["product", "b1"], ["inner"]),
        helper.make_node("Gelu", ["inner"], ["active"]),
        helper.make_node("MatMul", ["active", "w2"], ["outer"]),
        helper.make_node("Add", ["outer", "b2"], ["shifted"]),
        helper.make_node("Add", ["x", "shifted"], ["tokens"]),
        helper.make_node("ReduceMean", ["tokens", "axes"], ["pooled"], keepdims=0),
    ]
    values = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, TOKENS, WIDTH))],
        [
            helper.make_tensor_value_info("tokens", TensorProto.FLOAT, (2, TOKENS, WIDTH)),
            helper.make_tensor_value_info("pooled", TensorProto.FLOAT, (2, WIDTH)),
        ],
        [
            *(numpy_helper.from_array(value, name) for name, value in values.items()),
            numpy_helper.from_array(np.array([1], np.int64), "axes"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_plan(
    name: str,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    artifacts: list[Artifact] = []
    monkeypatch.setattr(making, "Workers", InProcess)
    build = finishing.build_artifact

    def keep(artifact: Artifact, *rest: Any) -> Any:
        artifacts.append(artifact)
        return build(artifact, *rest)

    monkeypatch.setattr(finishing, "build_artifact", keep)
    compiler.compile_to_file(tiny(), tmp_path / "tiny.so", target=name, threads=2)
    (artifact,) = artifacts
    source = plan_source(artifact, weights_inside=True, identity=bytes(32))
    stages = [
        f"// {step.kernel}: {'+'.join(step.info['operators'])}, {step.info['structure']}, "
        f"{step.info['schedule']}"
        for step in artifact.steps
    ]
    weights = [f"// weights at {at}: {a.dtype}{a.shape}" for at, a in artifact.weights]
    golden(f"plan.{name}.c", "\n".join([*stages, *weights, source]))
