"""Scales that move from activations into weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from gtco.frontend.onnx import read_onnx
from gtco.frontend.weights import whole
from gtco.quantization.products import products_of
from gtco.quantization.smoothing import smoothed
from tests.quantization.models import Evaluated, block, images, quantized


def test_smoothing_helps_where_a_channel_is_large() -> None:
    model, data = block(outlier=200.0), images()
    plain, smooth = quantized(model, data), quantized(model, data, smooth="auto")
    assert smooth.report.smooth > 0
    assert smooth.report.error < 0.5 * plain.report.error
    strengths = {one.smooth for one in smooth.report.tried}
    assert strengths == {0.0, 0.25, 0.5, 0.75}
    best = min(smooth.report.tried, key=lambda one: one.error)
    assert (best.smooth, best.observer) == (smooth.report.smooth, smooth.report.observer)
    given = quantized(model, data, smooth=smooth.report.smooth)
    assert given.model.SerializeToString() == smooth.model.SerializeToString()
    # the norm took the factors, since only q, k and v read it
    tensors = {t.name: numpy_helper.to_array(t) for t in smooth.model.graph.initializer}
    assert tensors["gain_smoothed"][7] < 200
    names = {layer.label for layer in smooth.report.layers}
    assert names == {layer.label for layer in plain.report.layers}


def test_smoothing_leaves_the_float_model_as_it_is() -> None:
    """To the last bit, since it multiplies by powers of two."""
    model = block(outlier=200.0)
    source = read_onnx(model)
    products = products_of(source)
    largest = {p.tensor: np.full(p.depth, 3.0, np.float32) for p in products if p.kind == "MatMul"}
    largest["n"][7] = 600
    found = smoothed(source, products, largest, 0.5)
    made = whole(found.skeleton, found.weights)
    assert made != model
    image = {"image": images(1)}
    np.testing.assert_array_equal(
        Evaluated(made).run(image)["logits"], Evaluated(model).run(image)["logits"]
    )


W = np.random.default_rng(1).standard_normal((4, 4))


def normed(w: np.ndarray, outputs: str = "float[2,4] y") -> onnx.ModelProto:
    """A norm, and a product of what it gives."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        normed (float[2,4] x) => ({outputs}) {{
            n = LayerNormalization(x, gain, bias) y = MatMul(n, w)
        }}"""
    )
    rng = np.random.default_rng(0)
    arrays = {"gain": rng.standard_normal(4), "bias": rng.standard_normal(4), "w": w}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


def smooth(model: onnx.ModelProto, largest: Sequence[float]) -> onnx.ModelProto:
    source = read_onnx(model)
    given = {"n": np.array(largest, np.float32)}
    found = smoothed(source, products_of(source), given, 0.5)
    return whole(found.skeleton, found.weights)


def test_a_norm_that_is_an_output_is_left_as_it_is() -> None:
    model = normed(W, "float[2,4] n, float[2,4] y")
    made = smooth(model, [1, 1, 1, 600])
    assert made != model
    x = np.random.default_rng(2).standard_normal((2, 4)).astype(np.float32)
    ours, wanted = (ReferenceEvaluator(m).run(None, {"x": x}) for m in (made, model))
    for our, want in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(our, want)


@pytest.mark.parametrize("largest", [[1, 1, 1, 1e30], [1, 1, 0, 600]], ids=["huge", "never"])
def test_factors_are_bounded(largest: list[float]) -> None:
    """Also those of channels that are zero, or whose weights are."""
    w = W.copy()
    w[0] = 0
    made = smooth(normed(w), largest)
    tensors = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    factors = tensors["w_smoothed"][1:] / w[1:].astype(np.float32)
    assert (factors >= 2.0**-10).all() and (factors <= 2.0**10).all()
    assert np.isfinite(tensors["gain_smoothed"]).all()
