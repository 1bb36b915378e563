"""Activations and softmax are found in the operators that exporters write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from tests.graphs import build, number, same


def _erf_gate(g: Graph, x: str, divide: bool) -> str:
    inner = (
        g.add("divide", (x, number(g, 2**0.5)))
        if divide
        else g.add("multiply", (x, number(g, 0.70710677)))
    )
    return g.add("add", (g.add("erf", (inner,)), number(g, 1)))


GELUS: dict[str, Callable[[Graph, str], str]] = {
    "(x * gate) * 0.5": lambda g, x: g.add(
        "multiply", (g.add("multiply", (x, _erf_gate(g, x, True))), number(g, 0.5))
    ),
    "(0.5 * x) * gate": lambda g, x: g.add(
        "multiply", (g.add("multiply", (number(g, 0.5), x)), _erf_gate(g, x, False))
    ),
    "x * (gate * 0.5)": lambda g, x: g.add(
        "multiply", (x, g.add("multiply", (_erf_gate(g, x, False), number(g, 0.5))))
    ),
    "x * gate / 2": lambda g, x: g.add(
        "divide", (g.add("multiply", (_erf_gate(g, x, True), x)), number(g, 2))
    ),
}


@pytest.mark.parametrize("order", GELUS)
def test_gelu(order: str) -> None:
    same(build(GELUS[order]), {"gelu": 1}, 1e-5)


@pytest.mark.parametrize("factored", [True, False])
def test_gelu_tanh(factored: bool) -> None:
    def body(g: Graph, x: str) -> str:
        c = number(g, (2 / np.pi) ** 0.5)
        if factored:  # (c x) (1 + 0.044715 x x)
            square = g.add("multiply", (g.add("multiply", (x, number(g, 0.044715))), x))
            inner = g.add(
                "multiply", (g.add("multiply", (x, c)), g.add("add", (square, number(g, 1))))
            )
        else:  # c (x + 0.044715 x^3)
            cube = g.add("multiply", (g.add("power", (x, number(g, 3))), number(g, 0.044715)))
            inner = g.add("multiply", (g.add("add", (x, cube)), c))
        gate = g.add("add", (g.add("tanh", (inner,)), number(g, 1)))
        return g.add("multiply", (g.add("multiply", (x, number(g, 0.5))), gate))

    same(build(body), {"gelu_tanh": 1}, 1e-5)


def test_silu_and_what_only_looks_like_gelu() -> None:
    same(build(lambda g, x: g.add("multiply", (x, g.add("sigmoid", (x,))))), {"silu": 1})
    half = build(
        lambda g, x: g.add(
            "multiply", (g.add("multiply", (x, _erf_gate(g, x, True))), number(g, 0.4))
        )
    )
    assert "gelu" not in canonicalize(half).histogram()


def _one_and_exp(g: Graph, x: str) -> str:
    return g.add("log", (g.add("add", (g.add("exp", (x,)), number(g, 1))),))


def _spelled_softplus(g: Graph, x: str) -> str:
    small = g.add("negative", (g.add("abs", (x,)),))
    return g.add("add", (g.add("relu", (x,)), _one_and_exp(g, small)))


def _spelled_elu(g: Graph, x: str, alpha: float, kind: str = "add") -> str:
    below = g.add("relu", (g.add("subtract", (number(g, 1), g.add("exp", (x,)))),))
    tail = g.add("multiply", (below, number(g, -alpha if kind == "add" else alpha)))
    return g.add(kind, (g.add("relu", (x,)), tail))


EXPONENTIAL: dict[str, Callable[[Graph, str], str]] = {
    "softplus": _spelled_softplus,
    "mish": lambda g, x: g.add("multiply", (x, g.add("tanh", (_one_and_exp(g, x),)))),
    "mish of a softplus": lambda g, x: g.add(
        "multiply", (g.add("tanh", (_spelled_softplus(g, x),)), x)
    ),
    "elu": lambda g, x: _spelled_elu(g, x, 0.7),
    "elu by a subtraction": lambda g, x: _spelled_elu(g, x, 0.7, "subtract"),
    "elu of a negative alpha": lambda g, x: _spelled_elu(g, x, -0.7),
}


@pytest.mark.parametrize("name", EXPONENTIAL)
def test_exponential_activations(name: str) -> None:
    same(build(EXPONENTIAL[name]), {name.split()[0]: 1})


def test_log_of_a_sigmoid() -> None:
    wanted = {"negative": 2, "softplus": 1}
    same(build(lambda g, x: g.add("log", (g.add("sigmoid", (x,)),))), wanted)


def test_what_only_looks_like_an_exponential_activation() -> None:
    def shifted(g: Graph, x: str) -> str:
        return g.add("multiply", (x, g.add("tanh", (_one_and_exp(g, g.add("abs", (x,))),))))

    for body in (_one_and_exp, shifted):
        assert not {"softplus", "mish", "elu"} & canonicalize(build(body)).histogram().keys()


@pytest.mark.parametrize("shifted", [True, False])
def test_softmax(shifted: bool) -> None:
    def body(g: Graph, x: str) -> str:
        if shifted:
            x = g.add("subtract", (x, g.add("max", (x,), axes=(2,), keepdims=True)))
        e = g.add("exp", (x,))
        return g.add("divide", (e, g.add("sum", (e,), axes=(2,), keepdims=True)))

    same(build(body), {"softmax": 1})
