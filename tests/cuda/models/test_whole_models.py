"""Whole models as a GPU would run them: through the library's C interface on the fake driver,
kernel by kernel in the emulator, against PyTorch and ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gtco import cli
from gtco.runtime.module import load
from gtco.verification.compare import compare
from gtco.verification.verify import BOUNDS
from models.export import export_onnx
from models.weights import initialise
from tests.cuda.emulate import launches_of
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.whole import emulated, outputs
from tests.models.test_models import TINY, seeded

# The largest error of an output, relative to the largest output: operands of matrix products have
# 11 bits (8 in bfloat16), everything else has 24, and more layers add more error.
CASES = [
    ("vit", "sm_80", "fp16", 2e-3),
    ("vit", "sm_75", "fp16", 2e-3),
    ("vit", "sm_80", "bf16", 2e-2),
    ("vit", "sm_90a", "fp32", 1e-5),
    ("swin", "sm_80", "fp16", 2e-3),
    ("setr", "sm_89", "fp16", 5e-3),
    ("detr", "sm_80", "fp16", 1e-2),
]


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(40), nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(nn.functional.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_feedforward_block(driver: FakeDriver, tmp_path: Path, precision: str) -> None:
    check(driver, tmp_path, Feedforward(), (1, 21, 40), "sm_80", precision)


def check(
    driver: FakeDriver,
    folder: Path,
    model: nn.Module,
    shape: tuple[int, ...],
    arch: str,
    precision: str,
) -> None:
    model = model.eval().requires_grad_(False)
    initialise(model, seed=3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(precision)))
    report, loaded, workers = emulated(driver, folder, model, (x,), arch, precision=precision)
    assert not report.notes
    bound = BOUNDS[precision]
    with loaded:
        found = outputs(loaded, workers, {loaded.inputs[0].name: x.numpy()})
    wanted = model.double()(x.double())
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    assert len(found) == len(wanted)
    for (name, got), want in zip(found.items(), wanted, strict=True):
        expected = want.numpy().astype(np.float32)
        difference = compare("random", name, got, expected, bound.tolerance, floor=bound.floor)
        assert not difference.failure, difference
    if precision != "fp32":
        assert any("float16" in stage["output"] for stage in report.stages)


def block(tokens: int, width: int, heads: int) -> onnx.ModelProto:
    """A transformer's block on x[tokens, width]: LayerNorm, attention, LayerNorm, an MLP with an
    erf GELU, and two residual sums.
    """
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


@pytest.mark.parametrize(
    ("name", "arch", "precision", "tolerance"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.scheduled) for case in CASES[1:])],
)
def test_models(
    driver: FakeDriver, tmp_path: Path, name: str, arch: str, precision: str, tolerance: float
) -> None:
    create, (_, *shape) = TINY[name]
    torch.manual_seed(0)
    model, x = seeded(create()), torch.randn(1, *shape)
    export_onnx(model, (x,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    wanted = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    report, whole, workers = emulated(
        driver, tmp_path, model, (x,), arch, precision=precision, launches="persistent"
    )
    assert not report.notes and report.launches == "persistent"
    with whole, load(whole.path, launches="graph") as loaded:
        for run in (1, 2):  # the second replays a graph
            found = outputs(loaded, workers, {loaded.inputs[0].name: x.numpy()})
            assert launches_of(workers.path.resolve()) == run * len(report.stages)
            for array, right in zip(found.values(), wanted, strict=True):
                error = np.abs(array - right).max() / np.abs(right).max()
                assert error <= tolerance, f"{name} {arch} {precision}: {error:.2g}"
        assert whole.launches.startswith("persistent: ") and loaded.launches.startswith("graph: ")
        for _ in (1, 2):  # the second finds the barrier as the first left it
            again = outputs(whole, workers, {loaded.inputs[0].name: x.numpy()})
            for output, array in found.items():
                np.testing.assert_array_equal(again[output], array)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("fp16", 5e-3)])
def test_a_block_of_a_transformer(
    driver: FakeDriver, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """Against ONNX Runtime's float32. The tolerance is absolute; outputs are about 1 in size."""
    model = block(tokens=21, width=64, heads=2)
    onnx.save(model, tmp_path / "model.onnx")
    _, loaded, workers = emulated(
        driver, tmp_path, tmp_path / "model.onnx", None, "sm_80", precision=precision
    )
    session = onnxruntime.InferenceSession(model.SerializeToString())
    rng = np.random.default_rng(1)
    with loaded:
        for _ in range(2):
            x = rng.standard_normal((21, 64)).astype(np.float32)
            (wanted,) = session.run(None, {"x": x})
            (found,) = outputs(loaded, workers, {"x": x}).values()
            np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)
        assert len(loaded.profile(x, repeat=1)) == len(loaded.stages)
    driver.check()


def test_a_model_whose_own_numbers_are_float16(driver: FakeDriver, tmp_path: Path) -> None:
    """Weights, inputs and outputs are float16. Its product still uses Tensor Cores, and ``inspect``
    reads the library.
    """
    rng = np.random.default_rng(2)
    w = (rng.standard_normal((32, 40)) / 6).astype(np.float16)
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["z"]),
            helper.make_node("Softmax", ["z"], ["y"], axis=-1),
        ],
        "half",
        [helper.make_tensor_value_info("x", half, [19, 32])],
        [helper.make_tensor_value_info("y", half, [19, 40])],
        [numpy_helper.from_array(w, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "half.onnx")
    report, loaded, workers = emulated(driver, tmp_path, tmp_path / "half.onnx", None, "sm_80")
    assert [s["schedule"].get("row") for s in report.stages] == ["mma.m16n8k16", None]
    x = rng.standard_normal((19, 32)).astype(np.float16)
    with loaded:
        (found,) = outputs(loaded, workers, {"x": x}).values()
        assert cli.main(["inspect", str(loaded.path), "--no-profile"]) == 0
    scores = x.astype(np.float64) @ w
    wanted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted /= wanted.sum(axis=-1, keepdims=True)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, wanted, rtol=8e-3, atol=1e-4)
