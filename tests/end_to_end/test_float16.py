"""float16 models on CPUs: they are computed in float32 and rounded at their outputs, by kernels as
good as those of a float32 model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import gtco
from gtco import cli
from gtco.cli.console import size
from gtco.support.options import CompileKeywords
from models import export_onnx
from models.weights import initialise
from tests.end_to_end.halved import Halved, assert_rounded, halved
from tests.end_to_end.nodes.runner import InProcess
from tests.end_to_end.test_bfloat16 import Convolutions
from tests.end_to_end.test_models import swin, vit

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vit": (lambda: vit((48, 80)), (1, 3, 48, 80)),
    "swin": (lambda: swin((56, 56)), (1, 3, 56, 56)),
    "convolutions": (Convolutions, (2, 3, 37, 29)),
}


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles in this process, which already has TVM."""
    monkeypatch.setattr("gtco.driver.making.Workers", InProcess)


def exported(name: str, folder: Path) -> onnx.ModelProto:
    make, shape = MODELS[name]
    model = make().eval().requires_grad_(False)
    initialise(model, seed=len(name))
    return onnx.load(export_onnx(model, (torch.zeros(shape),), folder / "model.onnx"))


def graph(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return model


def drawn(model: onnx.ModelProto, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Random values of a model's inputs, all of them float16."""
    rng = np.random.default_rng(seed)
    return {
        value.name: (
            scale * rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim])
        ).astype(np.float16)
        for value in model.graph.input
    }


def check(model: Halved, compiled: gtco.CompiledModel, scale: float = 1.0) -> None:
    """Checks that the result is as exact as the rounding of its outputs allows and no less exact
    than ONNX Runtime's, and that no kernel is slow.
    """
    feeds = drawn(model.model, scale=scale)
    got, right, peer = compiled.run(feeds), model.right(feeds), model.peer(feeds)
    for name, value in right.items():
        assert_rounded(got[name], value)
        ours, theirs = (np.abs(x[name].astype(np.float64) - value).max() for x in (got, peer))
        assert ours <= theirs + 2e-5 * np.abs(value).max()
    assert "fallback" not in {s["schedule"]["sketch"] for s in compiled.stages}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    model = halved(exported(name, tmp_path))
    compiled = gtco.compile_model(model.model)
    assert not compiled.report.notes
    assert [t.dtype for t in (*compiled.inputs, *compiled.outputs)] == ["float16"] * 2
    check(model, compiled)
    check(model, compiled, scale=30.0)
    # by the constants of a target: rates that were measured beside busy processes say other things
    compiled = gtco.compile_model(model.model, target="x86-64-v3")
    products = [s for s in compiled.stages if {"matmul", "conv2d"} & set(s["operators"])]
    weights = [s for s in products if any(t.startswith("float16[") for t in s["inputs"])]
    # the other products are depthwise, use Winograd's filtering, or have two computed operands
    assert len(weights) >= 0.5 * len(products)


def test_half_of_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model in float32 keeps its weights in float32, although float16 would hold them."""
    model = halved(exported("vit", tmp_path))
    # by the constants of a target: rates that were measured beside busy processes say other things
    options: CompileKeywords = {"target": "x86-64-v3"}
    half = gtco.compile_model(model.model, **options)
    plain = gtco.compile_model(model.meaning, **options)
    assert half.report.weights_bytes < 0.6 * plain.report.weights_bytes
    formats = half.metadata["weights_by_dtype"]
    assert 0.9 * half.report.weights_bytes < sum(formats.values()) <= half.report.weights_bytes
    # a product that is predicted to be slower keeps its weights
    assert formats["float16"] > 2 * formats["float32"]
    library = str(half.save(tmp_path / "half.so"))
    assert cli.main(["inspect", library, "--no-profile"]) == 0
    assert f"kB float16, {size(formats['float32'])} float32" in capsys.readouterr().out
    assert not any("float16" in t for stage in plain.stages for t in stage["inputs"])


def test_verified() -> None:
    """ONNX Runtime rounds inside and gtco at the end; neither is an error."""
    model = halved(
        graph(
            """g (float[1,19,24] x) => (float[1,19,24] y) {
                n = LayerNormalization(x, g, b)  m = MatMul(n, w)  s = Sigmoid(m)
                o = MatMul(s, v)  y = Add(o, x) }""",
            g=np.linspace(0.5, 2, 24, dtype=np.float32),
            b=np.linspace(-1, 1, 24, dtype=np.float32),
            w=np.random.default_rng(1).standard_normal((24, 52)).astype(np.float32),
            v=np.random.default_rng(2).standard_normal((52, 24)).astype(np.float32),
        )
    )
    compiled = gtco.compile_model(model.model, verify=True)
    assert compiled.report.verification.passed
    check(model, compiled)


def test_islands_of_float32_are_no_borders(tmp_path: Path) -> None:
    """Casts to float32 and back inside the model vanish: there are as many stages as with all of it
    in float16.
    """
    plain = exported("vit", tmp_path)
    mixed = halved(plain, islands=("LayerNormalization", "Softmax", "ReduceMean", "Gelu"))
    compiled = gtco.compile_model(mixed.model)
    check(mixed, compiled)
    assert len(compiled.stages) == len(gtco.compile_model(halved(plain).model).stages)


def test_modules_in_half(tmp_path: Path) -> None:
    make, shape = MODELS["vit"]
    module = make().eval().requires_grad_(False)
    initialise(module, seed=5)
    module.half()
    image = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    compiled = gtco.compile_model(module, (image,))
    got = compiled(image)
    assert got.dtype == torch.float16
    assert_rounded(got.numpy(), module.double()(image.double()).numpy())


def test_infinity_arises_at_outputs_alone() -> None:
    """The square passes 65504 inside the model, where ONNX Runtime may turn it into an infinity."""
    model = graph(
        """g (float16[1,64] x) => (float16[1,64] y, float16[1,64] z) {
            z = Mul(x, x)  b = Mul(z, scale)  y = Sqrt(b) }""",
        scale=np.array(2.0**-8, np.float16),
    )
    x = np.linspace(-1000, 1000, 64, dtype=np.float16)[None]
    y, z = gtco.compile_model(model).run({"x": x}).values()
    wide = x.astype(np.float64)
    assert_rounded(y, np.abs(wide) / 16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(z, (wide**2).astype(np.float16))
    assert np.isinf(z).sum() == (np.abs(x) > 256).sum() > 0


def test_denormal_numbers_of_float16_are_numbers() -> None:
    """This holds for inputs, constants and outputs, although kernels treat denormal float32 numbers
    as zero.
    """
    small = np.array([6e-8, 1.2e-7, -5e-6, 3e-5] * 8, np.float16)
    model = graph("g (float16[32] x) => (float16[32] y) { y = Add(x, c) }", c=small)
    x = np.roll(small, 1)
    np.testing.assert_array_equal(gtco.compile_model(model)(x), x + small)


@pytest.mark.parametrize("hidden", [-65504.0, -np.inf])
def test_masks(hidden: float) -> None:
    """Hidden keys count for nothing, whether the mask is finite or not."""
    model = graph(
        """g (float16[2,19,16] q, float16[2,19,16] k, float16[2,19,16] v, float16[1,1,19] m)
           => (float16[2,19,16] y) {
            t = Transpose<perm = [0, 2, 1]>(k)  s = MatMul(q, t)  d = Div(s, root)
            a = Add(d, m)  p = Softmax<axis = -1>(a)  y = MatMul(p, v) }""",
        root=np.array(4.0, np.float16),
    )
    feeds = drawn(model)
    feeds["m"] = np.where(np.arange(19) % 3 == 1, hidden, 0).astype(np.float16)[None, None]
    compiled = gtco.compile_model(model)
    assert [stage["schedule"]["sketch"] for stage in compiled.stages].count("attention") == 1
    q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
    shown = np.arange(19) % 3 != 1
    scores = np.exp(q @ k[:, shown].swapaxes(1, 2) / 4)
    right = scores @ v[:, shown] / scores.sum(-1, keepdims=True)
    assert_rounded(compiled.run(feeds)["y"], right)


def test_operators_that_tvm_compiles_run_in_float32() -> None:
    """A sum along an axis in the fallback: in float16 it would have errors of whole numbers."""
    model = graph(
        "g (float16[3000] x) => (float16[3000] y) { s = CumSum(x, axis)  y = Mul(s, c) }",
        axis=np.array(0),
        c=np.array(2.0**-4, np.float16),
    )
    x = np.random.default_rng(0).uniform(0, 200, 3000).astype(np.float16)
    right = np.cumsum(x.astype(np.float64)) / 16
    assert_rounded(gtco.compile_model(model)(x), right)
