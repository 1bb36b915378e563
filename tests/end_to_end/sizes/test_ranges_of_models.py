"""Whole vision transformers, compiled for a range of batches, beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from gtco.compiler import compile_model
from gtco.models.export import EXPORTERS, export_onnx
from gtco.models.segformer import SegFormer
from gtco.models.swin import Swin
from gtco.models.vit import VisionTransformer
from gtco.support.options import CompileKeywords
from gtco.support.sizes import Range

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "vit": lambda: VisionTransformer((32, 32), patch_size=8, width=48, depth=2, heads=3, classes=9),
    "swin": lambda: Swin((56, 56), width=24, depths=(2, 2), heads=(2, 4), classes=9),
    "segformer": lambda: SegFormer(
        (64, 64),
        widths=(16, 24, 32, 40),
        depths=(1, 1, 1, 1),
        decoder_width=32,
        classes=5,
        heads=(1, 2, 2, 4),
    ),
}
SIDES = {"vit": 32, "swin": 56, "segformer": 64}  # of the square images


# what depends on the number of samples in ways that a proof at some sizes may miss
OF_THE_BATCH = {
    "the same remainder at all parts": "r = Mod(s, three) f = Cast<to=1>(r) y = Add(x, f)",
    "another factor at one sample": """c = Greater(s, one) k = Where(c, two, three)
        f = Cast<to=1>(k) m = MatMul(x, w) y = Mul(m, f)""",
    "another column at one sample": """d = Sub(s, one) i = Min(d, one) t = Gather<axis=1>(x, i)
        y = Add(x, t)""",
    "all but the last of 64": "y = Slice(x, zero, most, zero)",
}


@pytest.mark.parametrize("name", OF_THE_BATCH)
@pytest.mark.parametrize("largest", [16, 40, 64])
def test_what_depends_on_the_batch_is_seen(name: str, largest: int) -> None:
    """Such a model is compiled for each batch."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[b, 4] x) => (float[c, 4] y) {{
            s = Shape<start=0, end=1>(x) {OF_THE_BATCH[name]} }}"""
    )
    numbers = {"zero": 0, "one": 1, "two": 2, "three": 3, "most": 63}
    constants = {key: np.array([value]) for key, value in numbers.items()}
    constants["w"] = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    for key, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, key))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    options: CompileKeywords = {"dims": {"b": f"1..{largest}"}, "threads": 1, "tune": "off"}
    with compile_model(model, **options) as compiled:
        for batch in (1, 2, 3, 5, 16, largest):
            x = np.random.default_rng(batch).standard_normal((batch, 4)).astype(np.float32)
            (want,) = session.run(None, {"x": x})
            np.testing.assert_allclose(compiled(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.scheduled
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODELS)
def test_random_batches(name: str, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    shape = (3, SIDES[name], SIDES[name])
    path = export_onnx(
        module,
        [torch.randn(2, *shape)],
        tmp_path / f"{name}.onnx",
        exporter=exporter,
        open_axes={0: "batch"},
    )
    (image,) = onnx.load(path).graph.input
    assert image.type.tensor_type.shape.dim[0].dim_param == "batch"
    session = onnxruntime.InferenceSession(path)
    rng = np.random.default_rng(0)
    with compile_model(path, dims={"batch": Range(1, 40, weighted=(8,))}, threads=2) as model:
        assert {1, 8} <= {one.sizes["batch"] for one in model.variants}
        for batch in (1, 8, *map(int, rng.integers(1, 41, 6))):
            x = rng.standard_normal((batch, *shape)).astype(np.float32)
            found = model.run(None, {"image": x})
            for mine, its in zip(found, session.run(None, {"image": x}), strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4 * abs(its).max())
