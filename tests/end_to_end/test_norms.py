"""Normalisations of images in the forms that exporters write, between convolutions and alone,
compiled and compared with ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import gtco
from tests.kernels import fresh_seed, runnable, targets

MODEL = """
<ir_version: 10, opset_import: ["": 21]>
norms (float[1,8,96,96] x, float[16,8,3,3] w, float[16,16,1,1] v, float[16] g, float[16] b,
       float[16,1,1] g1, float[16,1,1] b1, float[8] g8, float[8] b8)
  => (float[1,16,32,32] y, float[1,8,96,96] z, float[1,8,96,96] t)
{
  z = GroupNormalization<num_groups=1, epsilon=1e-5>(x, g8, b8)
  t = InstanceNormalization<epsilon=1e-5>(x, g8, b8)
  c0 = Conv<strides=[3,3], pads=[1,1,1,1]>(x, w)
  c1 = GroupNormalization<num_groups=4, epsilon=1e-5>(c0, g, b)
  c2 = Relu(c1)
  c3 = Conv(c2, v)
  axis = Constant<value_ints=[1]>()
  two = Constant<value_float=2.0>()
  eps = Constant<value_float=1e-6>()
  mean = ReduceMean<keepdims=1>(c3, axis)
  d = Sub(c3, mean)
  square = Pow(d, two)
  var = ReduceMean<keepdims=1>(square, axis)
  vare = Add(var, eps)
  root = Sqrt(vare)
  n = Div(d, root)
  n1 = Mul(n, g1)
  n2 = Add(n1, b1)
  c4 = Conv(n2, v)
  flat = Constant<value_ints=[0,2,-1]>()
  ones = Constant<value_floats=[1.0,1.0]>()
  zeros = Constant<value_floats=[0.0,0.0]>()
  rows = Reshape(c4, flat)
  norm = InstanceNormalization<epsilon=1e-5>(rows, ones, zeros)
  back = Constant<value_ints=[1,16,32,32]>()
  image = Reshape(norm, back)
  scaled = Mul(image, g1)
  shifted = Add(scaled, b1)
  y = Conv(shifted, v)
}
"""


def test_norms_of_images() -> None:
    """Weights are constants, as in a model; no stage runs in the fallback."""
    rng = np.random.default_rng(5)
    made = onnx.parser.parse_model(MODEL)
    values = {}
    for given in list(made.graph.input)[1:]:
        shape = [d.dim_value for d in given.type.tensor_type.shape.dim]
        value = rng.standard_normal(shape).astype(np.float32) * 0.4
        values[given.name] = value
        made.graph.initializer.append(onnx.numpy_helper.from_array(value, given.name))
        made.graph.input.remove(given)
    x = (rng.standard_normal((1, 8, 96, 96)) + 20).astype(np.float32)
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    compiled = gtco.compile_model(made)
    assert all(s["schedule"]["sketch"] != "fallback" for s in compiled.stages)
    got = compiled(x)
    (y,) = session.run(["y"], {"x": x})
    # a mean of 20 costs ONNX Runtime's GroupNormalization 3.5e-4 of its result: float64 decides
    wide = x.astype(np.float64)
    gamma, beta = (values[name].astype(np.float64)[:, None, None] for name in ("g8", "b8"))
    normal = [
        (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
        for axes in ((1, 2, 3), (2, 3))
    ]
    for ours, wanted in zip(got, (y, *(n * gamma + beta for n in normal)), strict=True):
        assert np.abs(ours - wanted).max() <= 5e-6 * np.abs(wanted).max()


TOKENS = """
<ir_version: 8, opset_import: ["": 17]>
tokens (int64[1,{rows}] i) => (float[1,{rows},{width}] y)
{{ e = Gather(t, i) a = Add(e, p) y = LayerNormalization(a, g, b) }}
"""


@pytest.mark.parametrize("name", [*targets(), "native"])
@pytest.mark.parametrize("width", [32, 48, 64])
def test_norms_of_embeddings(name: str, width: int) -> None:
    """Scalar tests of several indices for negative numbers, beside long vectors: LLVM 22 read their
    signs from a register of the norm's parameters.
    """
    runnable(name)
    rng = np.random.default_rng(fresh_seed())
    for rows in (3, 6, 7):
        values = {
            "t": rng.standard_normal((50, width)),
            "p": rng.standard_normal((1, rows, width)),
            "g": rng.standard_normal(width),
            "b": rng.standard_normal(width),
        }
        made = onnx.parser.parse_model(TOKENS.format(rows=rows, width=width))
        for key, value in values.items():
            made.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), key))
        indices = rng.integers(-50, 50, (1, rows))
        (wanted,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"i": indices})
        found = gtco.compile_model(made, target=name, tune="off", cache=False)(indices)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
