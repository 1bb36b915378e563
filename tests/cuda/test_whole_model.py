"""Whole models for GPUs without a GPU: compiled for sm_80, their kernels emulated behind the fake
driver, opened and run through the C interface of the library, and held against ONNX Runtime.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco import compilation, compiler
from gtco.codegen.generate import Generated
from gtco.runtime.artifact import write_artifact
from gtco.runtime.gpu_plan import GpuArtifact, GpuStep
from gtco.runtime.module import load
from gtco.tensor import space
from tests.cuda.emulate import build_shared, faults_of
from tests.cuda.fake_driver import FakeDriver, image

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}


def block(tokens: int, width: int, heads: int) -> onnx.ModelProto:
    """A transformer's block on x[tokens, width]: LayerNorm, attention, LayerNorm, an MLP with an
    erf GELU, two residual sums."""
    rng = np.random.default_rng(0)
    nodes: list[Any] = []
    weights: list[Any] = []

    def constant(name: str, array: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        out = f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def norm(x: str, name: str) -> str:
        scale = constant(f"{name}_scale", 1 + normal(width))
        shift = constant(f"{name}_shift", normal(width))
        return op("LayerNormalization", x, scale, shift, axis=-1, epsilon=1e-6)

    def linear(x: str, name: str, rows: int, columns: int) -> str:
        product = op("MatMul", x, constant(f"{name}_weight", normal(rows, columns)))
        return op("Add", product, constant(f"{name}_bias", normal(columns)))

    split = constant("split", np.array([tokens, heads, width // heads], np.int64))
    joined = constant("joined", np.array([tokens, width], np.int64))
    y = norm("x", "first")
    q, k, v = (
        op("Transpose", op("Reshape", linear(y, name, width, width), split), perm=order)
        for name, order in (("q", [1, 0, 2]), ("k", [1, 2, 0]), ("v", [1, 0, 2]))
    )
    scale = constant("scale", np.float32((width // heads) ** -0.5))
    scores = op("Softmax", op("Mul", op("MatMul", q, k), scale), axis=-1)
    heads_out = op("Transpose", op("MatMul", scores, v), perm=[1, 0, 2])
    x = op("Add", "x", linear(op("Reshape", heads_out, joined), "out", width, width))
    y = linear(norm(x, "second"), "up", width, 4 * width)
    half, one = constant("half", np.float32(0.5)), constant("one", np.float32(1))
    root = constant("root", np.float32(2**-0.5))
    bell = op("Add", op("Erf", op("Mul", y, root)), one)
    y = op("Mul", op("Mul", y, half), bell)
    y = linear(y, "down", 4 * width, width)
    nodes.append(helper.make_node("Add", [x, y], ["y"]))
    shape = [tokens, width]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def nbytes(text: str) -> int:
    """Bytes of a tensor as a step describes it, "float32[2x3]"."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    return SIZES[dtype] * prod(int(size) for size in sizes.split("x") if size)


def argument_sizes(artifact: GpuArtifact, step: GpuStep) -> list[int]:
    """Bytes of each argument of a launch; a weight's as it lies packed."""
    weights = {offset: array.nbytes for offset, array in artifact.weights}
    types = (*step.info["inputs"], step.info["output"])
    return [
        weights[ref.index] if ref.kind == "weight" else nbytes(text)
        for ref, text in zip(step.buffers, types, strict=True)
    ]


def emulated(model: onnx.ModelProto, folder: Path, precision: str) -> tuple[Path, Path]:
    """The library of the model with its kernels emulated, and the shared object of these."""
    kept: list[tuple[GpuArtifact, Generated]] = []
    assemble = compilation.assemble

    def keep(name: str, graph: Any, generated: Generated, *rest: Any) -> Any:
        artifact = assemble(name, graph, generated, *rest)
        assert isinstance(artifact, GpuArtifact)
        kept.append((artifact, generated))
        return artifact

    onnx.save(model, folder / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "assemble", keep)
        compiler.compile_to_file(
            folder / "model.onnx", folder / "model.so", target="cuda:sm_80", precision=precision
        )
    ((artifact, generated),) = kept
    programs: dict[str, Any] = {}
    for stage in generated.stages:
        symbol, pick = generated.kernels[stage.key].symbol, generated.choices[stage.key]
        programs[symbol] = space.build(pick.sketch, pick.config, symbol)
    sizes = {step.kernel: argument_sizes(artifact, step) for step in artifact.steps}
    kernels = build_shared({name: (programs[name], sizes[name]) for name in sizes})
    images = {"sm_80": {name: image("sm_80", kernels) for name in sizes}}
    return write_artifact(replace(artifact, images=images), folder / "fake.so"), kernels


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("fp16", 5e-3)])
def test_a_block_of_a_transformer(
    driver: FakeDriver, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """Against ONNX Runtime's float32; the tolerance is absolute, of outputs about 1 in size."""
    model = block(tokens=21, width=64, heads=2)
    library, kernels = emulated(model, tmp_path, precision)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    rng = np.random.default_rng(1)
    with load(library) as opened:
        for _ in range(2):
            x = rng.standard_normal((21, 64)).astype(np.float32)
            (wanted,) = session.run(None, {"x": x})
            found = opened(x)
            assert faults_of(kernels) == []
            np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)
        assert len(opened.profile(x, repeat=1)) == len(opened.stages)
    driver.check()
