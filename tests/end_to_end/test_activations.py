"""Activations by exponentials keep their digits where they come near 0: against float64, element by
element. Comparisons with ONNX Runtime that scale by a tensor's size do not see it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest

import gtco

TAIL = 4e-6  # of each value: about 30 ulp


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def elu(x: np.ndarray, alpha: float) -> np.ndarray:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


MEANINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Softplus": softplus,
    "Mish": lambda x: x * np.tanh(softplus(x)),
    "Elu <alpha=0.7>": lambda x: elu(x, 0.7),
    "Selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772),
    "Celu <alpha=0.5>": lambda x: 0.5 * elu(x / 0.5, 1.0),
}


@pytest.fixture(scope="module")
def compiled() -> gtco.CompiledModel:
    """All of them, of one tensor, each as an output."""
    names = [f"y{n}" for n in range(len(MEANINGS))]
    nodes = [f"{y} = {op} (x)" for y, op in zip(names, MEANINGS, strict=True)]
    outputs = ", ".join(f"float[3,67] {y}" for y in names)
    text = f"""<ir_version: 10, opset_import: ["" : 22]>
    activations (float[3,67] x) => ({outputs}) {{ {" ".join(nodes)} }}"""
    return gtco.compile_model(onnx.parser.parse_model(text), tune="off")


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("op", MEANINGS)
def test_digits_near_zero(compiled: gtco.CompiledModel, op: str, sign: int) -> None:
    size = np.exp(np.random.default_rng().uniform(-14, 3, (3, 67)))  # 1e-6 to 20
    x = np.float32(sign) * size.astype(np.float32)
    got = compiled(x)[list(MEANINGS).index(op)]
    wanted = MEANINGS[op](x.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=TAIL)
