"""Whole models that ONNX Runtime's quantizer wrote: with its fused operators (``QOperator``), and
with scales that are found at run time; compared with ONNX Runtime.

Integers agree step by step, so that a whole network of integers agrees too, up to steps that the
roundings of float32 between (LayerNorm, GELU, softmax) decide otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from torch import nn

import gtco
from gtco.machine.target import detect
from gtco.support.errors import VerificationError
from gtco.tensor.intrinsics.table import kinds
from gtco.verification import verify
from models.export import export_onnx
from models.vit import VisionTransformer
from models.weights import initialise
from tests.few_nodes import by_onnxruntime

SIZE = 32


class ConvNet(nn.Module):
    """A residual network with what QOperator files have: pooling, concatenation, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.LeakyReLU(0.1))
        self.right = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Sigmoid())
        self.mix = nn.Conv2d(32, 24, 1)
        self.head = nn.Linear(24, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        y = x + self.left(x)
        z = torch.cat([y, x * self.right(y)], 1)
        z = nn.functional.avg_pool2d(self.mix(z), 2)
        return self.head(nn.functional.adaptive_avg_pool2d(z, 1).flatten(1))


def vit() -> nn.Module:
    return VisionTransformer(
        (SIZE, SIZE), patch_size=8, width=48, depth=2, heads=3, mlp_dim=96, classes=10
    )


class Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self.images = iter([image(seed) for seed in range(count)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        found = next(self.images, None)
        return None if found is None else {"image": found}


def image(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, 3, SIZE, SIZE)).astype(np.float32)


def exported(make: Callable[[], nn.Module], folder: Path) -> Path:
    module = make().eval().requires_grad_(False)
    initialise(module, seed=7)
    return export_onnx(module, (torch.from_numpy(image(0)),), folder / "float.onnx", opset=17)


def static(path: Path, activations: QuantType, per_channel: bool, **options: object) -> Path:
    made = path.with_name("quantized.onnx")
    quantize_static(
        path,
        made,
        Samples(8),
        quant_format=QuantFormat.QOperator,
        activation_type=activations,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
        extra_options=options,
    )
    return made


def compared(path: Path) -> tuple[gtco.Model, float]:
    """The library, and the largest difference from ONNX Runtime as a share of the largest output,
    over several images.
    """
    model = onnx.load(path)
    compiled = gtco.compile_model(path, tune="off", strict=True)
    worst = 0.0
    for seed in range(20, 26):
        (want,) = by_onnxruntime(model, {"image": image(seed)})
        got = compiled(image(seed))
        got = got[0] if isinstance(got, (tuple, list)) else got
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return compiled, worst


def products(compiled: gtco.Model) -> int:
    """The stages that multiply bytes."""
    rows = tuple(kind.name for kind in kinds(detect(), "int8"))
    tiles = [str(stage["schedule"].get("tile", "")) for stage in compiled.stages]
    return sum(tile.rpartition(":")[0] in rows for tile in tiles)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("activations", [QuantType.QUInt8, QuantType.QInt8])
def test_a_convolutional_network(activations: QuantType, per_channel: bool, tmp_path: Path) -> None:
    path = static(exported(ConvNet, tmp_path), activations, per_channel)
    kept = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert {"QLinearConv", "QLinearAdd", "QLinearMul", "QLinearConcat"} <= kept.keys(), kept
    assert {"QLinearLeakyRelu", "QLinearSigmoid", "QGemm"} <= kept.keys(), kept
    compiled, worst = compared(path)
    assert worst < 1e-6
    if kinds(detect(), "int8"):
        assert products(compiled) >= 4


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_transformer(per_channel: bool, tmp_path: Path) -> None:
    path = static(exported(vit, tmp_path), QuantType.QUInt8, per_channel)
    kept = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert {"QLinearMatMul", "QLinearAdd", "QLinearSoftmax"} <= kept.keys(), kept
    compiled, worst = compared(path)
    assert worst < 0.05
    if kinds(detect(), "int8"):
        assert products(compiled) >= 9


def test_verification_knows_what_a_step_costs(tmp_path: Path) -> None:
    """A value in the middle of two steps may become either, and the layers behind it spread that.
    That is not a failure. A product whose scale is wrong is one.
    """
    path = static(exported(vit, tmp_path), QuantType.QUInt8, True)
    compiled = gtco.compile_model(path, tune="off", strict=True)
    for seed in range(4):
        verify(compiled, path, seed=seed)
    spoilt = onnx.load(path)
    (head,) = (node for node in spoilt.graph.node if node.op_type == "QGemm")
    scale = head.input[1]
    (tensor,) = (t for t in spoilt.graph.initializer if t.name == scale)
    value = np.float32(2) * numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(value, scale))
    with pytest.raises(VerificationError, match=r"differs from ONNX Runtime"):
        verify(compiled, spoilt, seed=0)


@pytest.mark.parametrize("weights", [QuantType.QInt8, QuantType.QUInt8])
def test_a_transformer_with_scales_of_run_time(weights: QuantType, tmp_path: Path) -> None:
    path = exported(vit, tmp_path)
    made = path.with_name("dynamic.onnx")
    quantize_dynamic(path, made, weight_type=weights)
    kept = Counter(node.op_type for node in onnx.load(made).graph.node)
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= kept.keys(), kept
    compiled, worst = compared(made)
    assert worst < 0.02
    if kinds(detect(), "int8") and weights == QuantType.QInt8:
        assert products(compiled) >= 8
