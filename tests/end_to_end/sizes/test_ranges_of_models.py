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


def test_a_number_that_is_the_same_at_all_parts() -> None:
    """The remainder by 3 is 1 at 1, 4 and 16. So the batch is not run in parts."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18]> g (float[b, 4] x) => (float[b, 4] y) {
            s = Shape<start=0, end=1>(x) r = Mod(s, three) f = Cast<to=1>(r) y = Add(x, f) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3]), "three"))
    with compile_model(model, dims={"b": "1..16"}, threads=1, tune="off") as compiled:
        for batch in (1, 2, 3, 5, 16):
            x = np.zeros((batch, 4), np.float32)
            np.testing.assert_array_equal(compiled(x), x + batch % 3)


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
