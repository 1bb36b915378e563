"""The vector functions against float64, over all of float32."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.codegen.llvm import compile_functions
from gtco.tensor import special_functions
from gtco.tensor.cost import instructions, vectors
from gtco.tensor.emit import scalar, vector_math
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments, kernel
from gtco.tensor.stage import Operator, TensorType, make_stage
from tests.kernels import elementwise_kernel, fresh_seed, runnable, targets

SIZE = 1 << 18
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e-38,
        -1e-38,
        3e38,
        -3e38,
        1.0,
        -1.0,
        88.72283,
        88.72284,
        -87.0,
        -87.4,
        -103.9,
        -104.1,
        9.1,
        -9.1,
        4.0,
        -4.0,
        1000.0,
        -1000.0,
    ],
    np.float32,
)


def samples(low: float, high: float, seed: int) -> np.ndarray:
    """Special values, random bit patterns, and a dense uniform sample of [low, high]."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    with np.errstate(invalid="ignore"):
        patterns = rng.integers(0, 1 << 32, SIZE // 4, dtype=np.uint32).view(np.float32)
    dense = rng.uniform(low, high, SIZE - SIZE // 4 - SPECIAL.size).astype(np.float32)
    return np.concatenate([SPECIAL, patterns, dense])


def nonpositive(low: float) -> np.ndarray:
    """:func:`samples` of [low, 0], -inf, and NaN with many payloads."""
    x = -np.abs(samples(low, 0, fresh_seed()))
    payloads = np.arange(1, 512, dtype=np.uint32) | np.uint32(0x7FC00000)
    x[: payloads.size], x[payloads.size] = payloads.view(np.float32), -np.inf
    return x


def ulps(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The distance in units of the last place of the float32 nearest to ``wanted``; NaN and
    infinities must agree.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = wanted.astype(np.float32)
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(got[~finite], rounded[~finite])
        spacing = np.spacing(np.abs(rounded[finite])).astype(np.float64)
        return np.abs(got[finite].astype(np.float64) - wanted[finite]) / spacing


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_exp(name: str, explicit: bool) -> None:
    x = samples(-110, 95, fresh_seed())
    got = elementwise_kernel(vector_math.exp, SIZE, runnable(name), explicit)(x)
    with np.errstate(over="ignore", invalid="ignore"):
        assert ulps(got, np.exp(x.astype(np.float64))).max() <= 1.1


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_exp_nonpositive(name: str, explicit: bool) -> None:
    x = nonpositive(-95)
    got = elementwise_kernel(vector_math.exp_nonpositive, SIZE, runnable(name), explicit)(x)
    wanted = np.exp(x.astype(np.float64))
    assert (got[x < -87] == 0).all()
    assert ulps(got[~(x < -87)], wanted[~(x < -87)]).max() <= 2.2
    assert got[x == 0].tolist() == [1.0] * int((x == 0).sum())


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_exp2_nonpositive(name: str, explicit: bool) -> None:
    x = nonpositive(-170)
    got = elementwise_kernel(vector_math.exp2_nonpositive, SIZE, runnable(name), explicit)(x)
    wanted = np.exp2(x.astype(np.float64))
    normal = ~(x < -126)
    assert ulps(got[normal], wanted[normal]).max() <= 2.7
    assert (got[~normal] <= 2.0**-126).all() and (got[x <= -150] == 0).all()
    assert got[x == 0].tolist() == [1.0] * int((x == 0).sum())


@pytest.mark.parametrize("name", targets())
def test_a_shorter_power_of_two_is_right_to_a_bfloat16(name: str) -> None:
    """Its error is a twentieth of the rounding error of a bfloat16."""

    def short(em: Emitter, x: Expr) -> Expr:
        return vector_math.exp2_nonpositive(em, x, 3)

    x = -np.abs(samples(-126, 0, fresh_seed()))
    x[~(x >= -126)] = 0
    got = elementwise_kernel(short, SIZE, runnable(name), True)(x)
    assert (np.abs(got / np.exp2(x.astype(np.float64)) - 1) <= 1.1e-4).all()


def _wide(function):  # type: ignore[no-untyped-def]
    def evaluate(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(x.astype(np.float64))

    return evaluate


ULP_BOUNDS = [
    ("erf", _wide(special_functions.erf), -5, 5, -np.inf, 2.0),
    ("tanh", _wide(np.tanh), -10, 10, -np.inf, 2.0),
    ("log", _wide(np.log), -1, 50, -np.inf, 2.0),
    ("sigmoid", _wide(lambda x: 1 / (1 + np.exp(-x))), -87, 30, -87, 3.0),
    ("silu", _wide(lambda x: x / (1 + np.exp(-x))), -87, 30, -87, 3.0),
    (
        "softplus",
        _wide(lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))),
        -87,
        30,
        -87,
        4.0,
    ),
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    "kind, wanted, low, high, least, bound", ULP_BOUNDS, ids=[r[0] for r in ULP_BOUNDS]
)
def test_ulp(
    kind: str, wanted, low: float, high: float, least: float, bound: float, name: str
) -> None:  # type: ignore[no-untyped-def]
    x = samples(low, high, fresh_seed())
    x = x[(x >= least) | np.isnan(x)] if np.isfinite(least) else x
    x = np.concatenate([x, np.ones(SIZE - x.size, np.float32)])
    if kind == "silu":
        x[np.isinf(x)] = 1.0  # inf * 0
    explicit = name == "x86-64-v3"
    got = elementwise_kernel(getattr(vector_math, kind), SIZE, runnable(name), explicit)(x)
    worst = ulps(got, wanted(x)).max()
    print(kind, worst)
    assert worst <= bound


def _phi(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + special_functions.erf(x * 0.5**0.5))


RELATIVE_BOUNDS = [
    ("gelu", _wide(lambda x: x * _phi(x)), 4e-7),
    ("gelu_rounded", _wide(lambda x: x * _phi(x)), 3.2e-5),
    (
        "gelu_tanh",
        _wide(lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        1e-6,
    ),
    ("mish", _wide(lambda x: x * np.tanh(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))), 1e-6),
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    "kind, wanted, bound", RELATIVE_BOUNDS, ids=[r[0] for r in RELATIVE_BOUNDS]
)
def test_gates(kind: str, wanted, bound: float, name: str) -> None:  # type: ignore[no-untyped-def]
    """Products of x and a function from 0 to 1; the error is relative to |x|."""
    x = samples(-8, 8, fresh_seed())
    got = elementwise_kernel(getattr(vector_math, kind), SIZE, runnable(name), name == "x86-64-v3")(
        x
    )
    finite = np.isfinite(x)
    want = wanted(x[finite])
    error = np.abs(got[finite] - want) / np.maximum(np.abs(x[finite].astype(np.float64)), 1e-30)
    print(kind, error.max())
    assert error.max() <= bound
    assert np.isposinf(got[x == np.inf]).all() and np.isnan(got[np.isnan(x)]).all()
    assert (np.abs(got[finite & (x < -100)]) <= 1e-35).all() and (
        got[finite & (x > 30)] == x[finite & (x > 30)]
    ).all()


@pytest.mark.parametrize("name", targets())
def test_gates_close(name: str) -> None:
    """Far below zero a gate is 0, and so is its product with any x, however large. -inf times 0 is
    NaN, and a NaN of any payload stays NaN.
    """
    x = np.linspace(-2000, -88.5, SIZE, dtype=np.float32)
    x[:3] = -3e38, -1e30, -np.inf
    payloads = np.arange(1, 512, dtype=np.uint32) | np.uint32(0x7FC00000)
    x[100 : 100 + payloads.size] = payloads.view(np.float32)
    number = ~np.isnan(x)
    got = elementwise_kernel(vector_math.sigmoid, SIZE, runnable(name))(x)
    assert (got[number] == 0).all() and np.isnan(got[~number]).all()
    got = elementwise_kernel(vector_math.silu, SIZE, runnable(name))(x)
    assert np.isnan(got[2]) and np.isnan(got[~number]).all()
    assert (got[number & np.isfinite(x)] == 0).all()


def arithmetic(kind: str, name: str) -> list[str]:
    """The vector instructions of the function for one vector, without moves and constants."""
    machine = runnable(name)
    one = TensorType((machine.lanes,))

    def body(em: Emitter, args: KernelArguments) -> None:
        x = em.load_vector(args.inputs["x"], [0])
        em.store_vector(args.output, [0], getattr(vector_math, kind)(em, x))

    assembly = compile_functions(
        [kernel("k", {"x": one}, one, 0, machine.lanes, body)], machine
    ).inspect_source("asm")
    lines = assembly[assembly.index("\nk:") : assembly.index("retq")].splitlines()
    found = [line.split()[0] for line in lines if line.startswith("\tv") and "mm" in line]
    return [x for x in found if not x.startswith(("vmov", "vbroadcast", "vpbroadcast"))]


def test_gelu_is_cheap() -> None:
    """The epilogue of every MLP has no division and no call, and under 25 vector instructions a
    vector.
    """
    found = arithmetic("gelu", "x86-64-v4")
    assert "vdivps" not in found
    assert len(found) < 25, found
    assert len(arithmetic("gelu_rounded", "x86-64-v4")) == len(found) - 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_only_what_is_rounded_is_computed_shortly(dtype: str) -> None:
    """gelu -> cast, beside gelu -> cast and add."""
    size, narrow = TensorType((4, 64)), TensorType((4, 64), dtype)
    gelu = Operator("gelu", ("x",), "g", size)
    short = make_stage([gelu, Operator("cast", ("g",), "y", narrow)], {"x": size}, [])
    assert scalar.rounded(short) == {"g"}
    total = [gelu, Operator("cast", ("g",), "r", narrow), Operator("cast", ("r",), "w", size)]
    total.append(Operator("add", ("w", "g"), "y", size))
    assert not scalar.rounded(make_stage(total, {"x": size}, []))
    assert vectors(short, [gelu], 16).total == instructions(gelu, ["float32"], 16) - 5


@pytest.mark.parametrize(
    ("kind", "name", "most"),
    [
        ("exp", "x86-64-v4", 15),  # 12 to p, then n as an integer, as a float, and vscalefps
        ("exp", "x86-64-v3", 18),
        ("exp_nonpositive", "x86-64-v4", 12),
        ("exp_nonpositive", "x86-64-v3", 13),
        ("exp2_nonpositive", "x86-64-v4", 7),
        ("exp2_nonpositive", "x86-64-v3", 11),
    ],
)
def test_exp_is_cheap(kind: str, name: str, most: int) -> None:
    found = arithmetic(kind, name)
    assert len(found) <= most, found
