"""Activations keep their digits; those with exponentials also keep them near 0. They are compared
with float64, element by element. Comparisons with ONNX Runtime that scale by a tensor's size do not
see this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx.parser
import pytest
import torch

import gtco
from tests.kernels import fresh_seed

TAIL = 4e-6  # of each value: about 30 ulp
ULP = 1.2e-7


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-softplus(-x))


def elu(x: np.ndarray, alpha: float) -> np.ndarray:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@dataclass(frozen=True)
class Activation:
    """``meaning`` is in float64. ``share`` of x and ``rounding`` are allowed errors beside the
    digits of the value: terms of that size may cancel, and GELU has a documented bound.
    """

    meaning: Callable[[np.ndarray], np.ndarray]
    share: float = 0.0
    rounding: float = 0.0


ACTIVATIONS: dict[str, Activation] = {
    "Softplus(x)": Activation(softplus),
    "Mish(x)": Activation(lambda x: x * np.tanh(softplus(x))),
    "Elu <alpha=0.7>(x)": Activation(lambda x: elu(x, 0.7)),
    "Selu(x)": Activation(lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772)),
    "Celu <alpha=0.5>(x)": Activation(lambda x: 0.5 * elu(x / 0.5, 1.0)),
    "Sigmoid(x)": Activation(sigmoid),
    "Tanh(x)": Activation(np.tanh),
    "Erf(x)": Activation(np.vectorize(math.erf)),
    "Softsign(x)": Activation(lambda x: x / (1 + np.abs(x))),
    "HardSigmoid(x)": Activation(lambda x: np.clip(0.2 * x + 0.5, 0, 1), rounding=ULP),
    "HardSwish(x)": Activation(lambda x: x * np.clip(x / 6 + 0.5, 0, 1), share=ULP),
    "Gelu(x)": Activation(gelu, share=4e-7),
    'Gelu <approximate="tanh">(x)': Activation(gelu_tanh, share=1e-6),
    "Swish(x)": Activation(lambda x: x * sigmoid(x)),
    "Swish <alpha=1.702>(x)": Activation(lambda x: x * sigmoid(1.702 * x)),  # QuickGelu
    "LeakyRelu <alpha=0.125>(x)": Activation(lambda x: np.where(x < 0, 0.125 * x, x)),
    "PRelu(x, slope)": Activation(lambda x: np.where(x < 0, SLOPE * x, x)),
    "ThresholdedRelu <alpha=1.5>(x)": Activation(lambda x: np.where(x > 1.5, x, 0)),
    "Shrink <lambd=0.5, bias=0.25>(x)": Activation(
        lambda x: np.where(np.abs(x) > 0.5, x - np.copysign(0.25, x), 0), share=ULP
    ),
    "Log(gate)": Activation(lambda x: -softplus(-x)),  # as PyTorch exports LogSigmoid
}
SLOPE = np.linspace(-0.5, 1.5, 67).astype(np.float32)


@pytest.fixture(scope="module")
def compiled() -> gtco.CompiledModel:
    """All activations of one tensor, each as an output."""
    names = [f"y{n}" for n in range(len(ACTIVATIONS))]
    nodes = [f"{y} = {op}" for y, op in zip(names, ACTIVATIONS, strict=True)]
    outputs = ", ".join(f"float[3,67] {y}" for y in names)
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
    activations (float[3,67] x) => ({outputs}) {{ gate = Sigmoid(x) {" ".join(nodes)} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(SLOPE, "slope"))
    return gtco.compile_model(model, tune="off")


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_digits_near_zero(compiled: gtco.CompiledModel, op: str, sign: int) -> None:
    size = np.exp(np.random.default_rng(fresh_seed()).uniform(-14, 4.38, (3, 67)))  # 1e-6 to 80
    x = np.float32(sign) * size.astype(np.float32)
    got = compiled(x)[list(ACTIVATIONS).index(op)].astype(np.float64)
    wide, activation = x.astype(np.float64), ACTIVATIONS[op]
    wanted = activation.meaning(wide)
    # exp multiplies the rounding error of its argument; values near the denormals become 0
    allowed = TAIL * np.maximum(1, np.abs(wide) / 8) * np.abs(wanted) + 1e-36
    allowed += activation.share * np.abs(wide) + activation.rounding
    assert np.all(np.abs(got - wanted) <= allowed), f"at {x[np.abs(got - wanted) > allowed]}"


def test_none_of_them_is_left_to_the_fallback(compiled: gtco.CompiledModel) -> None:
    assert {stage["schedule"]["sketch"] for stage in compiled.stages} == {"elementwise"}


# -- of rows ---------------------------------------------------------------------------------------


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - log_sum_exp(x)


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    largest = x.max(-1, keepdims=True)
    return largest + np.log(np.exp(x - largest).sum(-1, keepdims=True))


ROWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "LogSoftmax <axis=-1>(x)": log_softmax,
    "Log(weights)": log_softmax,
    "ReduceLogSumExp(x, last)": log_sum_exp,
    "ReduceLogSum(size, last)": lambda x: np.log(np.abs(x).sum(-1, keepdims=True)),
}


@pytest.fixture(scope="module")
def rows() -> gtco.CompiledModel:
    nodes = " ".join(f"y{n} = {op}" for n, op in enumerate(ROWS))
    sizes = [67 if "last" not in op else 1 for op in ROWS]
    outputs = ", ".join(f"float[3,{size}] y{n}" for n, size in enumerate(sizes))
    text = f"""<ir_version: 10, opset_import: ["" : 22]> of_rows (float[3,67] x) => ({outputs})
    {{ last = Constant <value_ints=[-1]>() size = Abs(x) weights = Softmax <axis=-1>(x)
       {nodes} }}"""
    return gtco.compile_model(onnx.parser.parse_model(text), tune="off")


@pytest.mark.parametrize("scale, shift", [(1, 0), (80, 0), (1, 1e4), (1, -1e4), (1e28, -1e30)])
@pytest.mark.parametrize("op", ROWS)
def test_rows_far_from_zero(rows: gtco.CompiledModel, op: str, scale: float, shift: float) -> None:
    """The exponential of an input itself would be 0 or infinite, so none is taken."""
    x = np.random.default_rng(fresh_seed()).normal(shift, scale, (3, 67)).astype(np.float32)
    got = rows(x)[list(ROWS).index(op)]
    # the logarithm of a sum near 1 has the digits of the sum
    np.testing.assert_allclose(got, ROWS[op](x.astype(np.float64)), rtol=TAIL, atol=2 * ULP)


def test_log_sigmoid_of_pytorch() -> None:
    """Its exporter writes log(sigmoid(x)), which is 0 from 17 on and -inf from -90 on."""
    x = torch.linspace(-200, 80, 101)
    model = gtco.compile_model(torch.nn.LogSigmoid(), (x,), tune="off")
    wanted = torch.nn.functional.logsigmoid(x.double())
    np.testing.assert_allclose(model(x.numpy()), wanted, rtol=TAIL, atol=1e-36)


def test_products_with_what_elu_chooses() -> None:
    """They follow a softmax and a product, whose epilogues bind every value. TVM asks for the
    interval of a bound value, and for that of such a product it once made an integer constant of a
    float type.
    """
    text = """<ir_version: 9, opset_import: ["" : 18]>
    choices (float[5,24] x, float[16,24] w, float[5,16] z) => (float[5,24] a, float[5,24] b) {
        s = Softmax(x) t = Abs(s) u = Elu(s) a = Mul(t, u)
        m = MatMul(z, w) p = Elu(m) r = Relu(m) q = Mul(p, r) b = Mul(q, m)
    }"""
    compiled = gtco.compile_model(onnx.parser.parse_model(text), tune="off", strict=True)
    rng = np.random.default_rng(fresh_seed())
    x, w, z = (rng.standard_normal(n).astype(np.float32) for n in ((5, 24), (16, 24), (5, 16)))
    a, b = compiled(x, w, z)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    s = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(a, s * elu(s, 1.0), rtol=1e-5)
    m = z.astype(np.float64) @ w
    np.testing.assert_allclose(b, elu(m, 1.0) * np.maximum(m, 0) * m, rtol=1e-4, atol=1e-4)
