"""Files whose weights alone are quantized: the library keeps them in 8 or 4 bits, and its results
are as exact as those of float32 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)
from torch import nn

import gtco
from gtco.driver import canonical
from gtco.verification.float64.evaluator import Evaluator, Limits
from gtco.verification.float64.operators import Arithmetic
from models import export_onnx
from models.vit import VisionTransformer
from models.weights import initialise
from tests.end_to_end.nodes.runner import InProcess
from tests.end_to_end.test_bfloat16 import Convolutions
from tests.kernels import fresh_seed

# By its constants: whether 8 bits pay depends on the rates that a machine measured, most of all on
# those of its memory.
TARGET = "x86-64-v3"


def vit() -> nn.Module:
    return VisionTransformer((48, 80), patch_size=16, width=96, depth=2, heads=3, classes=11)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vit": (vit, (1, 3, 48, 80)),
    "convolutions": (Convolutions, (2, 3, 37, 29)),
}


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in this process, which already has TVM."""
    monkeypatch.setattr("gtco.driver.making.Workers", InProcess)


def exact(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The first output in float64."""
    return Evaluator(model, Limits(60.0, 2**30)).run(feeds, Arithmetic(np.float64))[0]


def drawn(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return {
        value.name: rng.standard_normal(
            [d.dim_value for d in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }


def check(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> gtco.CompiledModel:
    """Compiles the file with its weights as they are and in float32, and compares the errors."""
    compiled = gtco.compile_model(model, tune="off", strict=True, target=TARGET)
    with monkeypatch.context() as patch:
        patch.setattr(canonical, "byte_weights", lambda graph, *prices: graph)
        wide = gtco.compile_model(model, tune="off", strict=True, target=TARGET)
    assert not narrow(wide) and not narrow(wide, "int4")
    errors = np.zeros(2)
    for _ in range(3):
        feeds = drawn(model)
        right = exact(model, feeds)
        made = [np.asarray(*c.run(feeds).values()) for c in (compiled, wide)]
        errors += [np.linalg.norm(x - right) / np.linalg.norm(right) for x in made]
    print(f"errors {errors}")
    # sums in another order: both are a few roundings of float32
    assert errors[0] <= 2 * errors[1] + 1e-7 and errors[0] < 1e-5
    assert "fallback" not in {s["schedule"]["sketch"] for s in compiled.stages}
    return compiled


def narrow(compiled: gtco.CompiledModel, dtype: str = "int8") -> int:
    """The products with weights of the dtype."""
    products = [s for s in compiled.stages if {"matmul", "conv2d"} & set(s["operators"])]
    dtypes = [{t.partition("[")[0] for t in s["inputs"]} for s in products]
    # zero points of int4 are int8
    return sum(dtype in d and (dtype == "int4" or "int4" not in d) for d in dtypes)


@pytest.mark.parametrize(
    ("name", "bits", "least"),
    [("vit", 8, 6), ("convolutions", 8, 2), ("vit", 4, 5)],
)
def test_models(
    name: str, bits: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = MODELS[name]
    model = make().eval().requires_grad_(False)
    initialise(model, seed=len(name))
    floats = export_onnx(model, (torch.zeros(shape),), tmp_path / "model.onnx")
    made = gtco.quantize_weights(floats, bits=bits)
    assert narrow(check(made.model, monkeypatch), f"int{bits}") >= least


GRAPH = """
network (float[3,37] x) => (float[3,1,19] y)
<float s2 = {0.003}, int8 z = {0}, int64[4] image = {3, 29, 1, 1}, int64[3] rows = {3, 1, 21}> {
    a = DequantizeLinear <axis = 1> (w1, s1)
    h = MatMul(x, a) g = Gelu(h)
    b = DequantizeLinear(w2, s2, z)
    i = Gemm <transB = 1> (g, b, bias)
    r = Relu(i) j = Reshape(r, image)
    c = DequantizeLinear <axis = 0> (w3, s3, z3)
    k = Conv(j, c)
    t = Tanh(k) l = Reshape(t, rows)
    d = DequantizeLinear <axis = 1> (w4, s4, z4)
    y = MatMul(l, d)
}"""


def test_forms_of_dequantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of columns, of the tensor, of a convolution's outputs; uint8 around 128."""
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)

    def scales(count: int) -> np.ndarray:
        return rng.uniform(1e-3, 1e-2, count).astype(np.float32)

    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {GRAPH}')
    constants = {
        "w1": rng.integers(-128, 128, (37, 45), np.int8),
        "s1": scales(45),
        "w2": rng.integers(-128, 128, (29, 45), np.int8),
        "bias": rng.standard_normal(29).astype(np.float32),
        "w3": rng.integers(-128, 128, (21, 29, 1, 1), np.int8),
        "s3": scales(21),
        "z3": np.zeros(21, np.int8),
        "w4": rng.integers(0, 256, (21, 19), np.uint8),
        "s4": scales(19),
        "z4": np.full(19, 128, np.uint8),
    }
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    assert narrow(check(model, monkeypatch)) == 4


DEPTHWISE = """
network (float[2,24,9,11] x) => (float[2,48,9,6] y)
{
    a = DequantizeLinear <axis = 0> (w1, s1)
    h = Conv <group = 24, pads = [1, 1, 1, 1]> (x, a, bias) g = Gelu(h)
    b = DequantizeLinear <axis = 0> (w2, s2, z2)
    i = Conv <group = 24, kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [1, 2]> (g, b)
    c = DequantizeLinear (w3, s3)
    y = Conv <group = 24, pads = [1, 1, 1, 1]> (i, c)
}"""


def test_depthwise_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of channels and of the tensor, zero points that are not in the middle, two filters a
    channel, groups of several channels.
    """
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {DEPTHWISE}')
    constants = {
        "w1": rng.integers(-128, 128, (24, 1, 3, 3), np.int8),
        "s1": rng.uniform(1e-3, 1e-2, 24).astype(np.float32),
        "bias": rng.standard_normal(24).astype(np.float32),
        "w2": rng.integers(0, 256, (48, 1, 3, 3), np.uint8),
        "s2": rng.uniform(1e-3, 1e-2, 48).astype(np.float32),
        "z2": rng.integers(0, 256, 48, np.uint8),
        "w3": rng.integers(-128, 128, (48, 2, 3, 3), np.int8),
        "s3": np.float32(0.003),
    }
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    assert narrow(check(model, monkeypatch)) == 3


FOUR_BITS = """
network (float[3,37] x) => (float[3,19] y) {
    a = DequantizeLinear <axis = 1> (w1, s1, z1)
    h = MatMul(x, a) g = Gelu(h)
    b = DequantizeLinear <axis = 0> (w2, s2)
    i = Gemm <transB = 1> (g, b) j = Relu(i)
    c = DequantizeLinear <axis = 0, block_size = 16> (w3, s3, z3)
    y = MatMul(j, c)
}"""


def test_forms_of_dequantizing_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """uint4 and int4, zero points of columns and of blocks, scales that float16 does not hold."""
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)

    def drawn(signed: bool, *shape: int) -> np.ndarray:
        least = -8 if signed else 0
        dtype = ml_dtypes.int4 if signed else ml_dtypes.uint4
        return rng.integers(least, least + 16, shape).astype(dtype)

    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {FOUR_BITS}')
    constants = {
        "w1": drawn(False, 37, 45),
        "z1": drawn(False, 45),
        "w2": drawn(True, 32, 45),
        "w3": drawn(False, 32, 19),
        "z3": drawn(False, 2, 19),
    }
    for name, shape in (("s1", (45,)), ("s2", (32,)), ("s3", (2, 19))):
        constants[name] = rng.uniform(1e-3, 1e-2, shape).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    assert narrow(check(model, monkeypatch), "int4") == 3


@pytest.mark.parametrize(
    ("bits", "block", "form", "symmetric"),
    [
        (4, 32, QuantFormat.QOperator, False),
        (4, 16, QuantFormat.QDQ, True),
        (2, 64, QuantFormat.QOperator, False),
        (8, 32, QuantFormat.QOperator, False),
    ],
)
def test_blocks_of_onnxruntimes_quantizer(
    bits: int, block: int, form: QuantFormat, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of blocks of rows, of which the last is not whole in MatMulNBits."""
    rng = np.random.default_rng(bits)
    depth = 77 if form == QuantFormat.QOperator else 96
    text = f"network (float[3,67,{depth}] x) => (float[3,67,19] y) {{"
    text += "h = MatMul(x, w1) g = Relu(h) y = MatMul(g, w2)}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for name, shape in (("w1", (depth, 64)), ("w2", (64, 19))):
        values = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    config = DefaultWeightOnlyQuantConfig(
        block_size=block, is_symmetric=symmetric, bits=bits, quant_format=form
    )
    quantizer = MatMulNBitsQuantizer(model, algo_config=config)
    quantizer.process()
    stored = "int8" if bits == 8 else "int4"
    assert narrow(check(quantizer.model.model, monkeypatch), stored) == 2


def test_size_of_the_library(tmp_path: Path) -> None:
    """A library whose weights are large has little more than a quarter of their float32 bytes, or
    little more than an eighth with the scales of blocks.
    """
    model = nn.Sequential(nn.Linear(768, 1536), nn.GELU(), nn.Linear(1536, 768)).eval()
    floats = export_onnx(model, (torch.zeros(5, 768),), tmp_path / "model.onnx")
    gtco.quantize_weights(floats).save(tmp_path / "bytes.onnx")
    gtco.quantize_weights(floats, bits=4).save(tmp_path / "nibbles.onnx")
    sizes, formats = [], []
    for name in ("model", "bytes", "nibbles"):
        library = tmp_path / f"{name}.so"
        gtco.compile_model(tmp_path / f"{name}.onnx", tune="off", target=TARGET).save(library)
        sizes.append(library.stat().st_size)
        formats.append(gtco.load(library).metadata["weights_by_dtype"])
    assert sizes[1] <= 0.30 * sizes[0] and sizes[2] <= 0.18 * sizes[0]
    assert formats[1]["int8"] == 2 * 768 * 1536
    assert formats[2]["int4"] == 768 * 1536 and formats[2]["float16"] == 2 * 768 * 1536 * 2 // 32
