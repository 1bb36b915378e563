"""Every element-wise row of the operator table, in every dtype that it takes, against the numpy
reference.
"""

from __future__ import annotations

import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.emit import scalar
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, TensorType, make_attrs
from tests.kernels import Built, assert_close, fresh_seed, runnable, targets

SIZE = 192
# functions of a byte are tables in kernels (tests/sketch/test_byte_functions.py)
APART = ("cast", "byte_function")
FLOATS, INTEGERS, CONDITIONS = (
    [k for k, row in ELEMENTWISE_OPERATORS.items() if kind in row.dtypes and k not in APART]
    for kind in "fib"
)
ATTRIBUTES = {
    "clip": {"min": -0.5, "max": 1.25},
    "leaky_relu": {"alpha": 0.1},
    "elu": {"alpha": 0.7},
    "quantize": {"min": -5.0, "max": 6.0},
}
GATES = ("gelu", "gelu_tanh", "mish")
POSITIVE = ("log", "sqrt", "rsqrt", "power")


def run(op: Operator, arrays: list[np.ndarray], name: str, vectors: str) -> np.ndarray:
    """Runs the operator in a vectorized loop, in a serial loop or on explicit vectors.

    In the vectorized loop it reads bound values, as other operators leave them. TVM turns what it
    cannot vectorize into scalar code, and that code does not see bound values.
    """
    machine = runnable(name)
    types = {x: TensorType(a.shape, a.dtype.name) for x, a in zip(op.inputs, arrays, strict=True)}
    dtypes = [t.dtype for t in types.values()]

    def body(em: Emitter, args: KernelArguments) -> None:
        inputs = list(args.inputs.values())
        with em.loop(SIZE // em.lanes, "block") as block:
            if vectors == "explicit":
                loaded = [em.load_vector(x, [block * em.lanes]) for x in inputs]
                em.store_vector(
                    args.output, [block * em.lanes], scalar.apply(em, op, loaded, dtypes)
                )
                return
            with em.vector(em.lanes) if vectors == "loop" else em.loop(em.lanes, "lane") as lane:
                at = [block * em.lanes + lane]
                bound = [em.let(em.load(x, at)) for x in inputs]
                em.store(args.output, at, scalar.apply(em, op, bound, dtypes))

    library = load([kernel("kernel_under_test", types, op.type, 0, machine.lanes, body)], machine)
    built = Built(library, "kernel_under_test", tuple(types.items()), op.type, 1, 0, {})
    return built(*arrays)


def make(kind: str, dtype: str, seed: int) -> tuple[Operator, list[np.ndarray]]:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    row = ELEMENTWISE_OPERATORS[kind]
    count = row.inputs
    arrays = []
    for i in range(count):
        if dtype == "bool":
            arrays.append(rng.integers(0, 2, SIZE).astype(bool))
        elif dtype.startswith("float"):
            x = rng.standard_normal(SIZE) * 3
            if kind in ("asin", "acos", "atanh"):
                x = rng.uniform(-1, 1, SIZE)
            elif kind in ("multiply_pair", "quantize") and i == 2:
                x *= 2.0**-24  # the lower part of a factor
            elif kind in POSITIVE and i == 0:
                x = np.abs(x)
            elif kind == "acosh":
                x = 1 + np.abs(x)
            elif i == 1:
                x[:64] = arrays[0][:64].astype(np.float64)  # ties, for the comparisons
            special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.5, -1.5])
            if kind != "dequantize":  # the reference's product is beyond float32
                special = np.append(special, [1e10, -1e10, 1e20, -1e20, 3e38, -3e38])
            if kind not in (
                "mod",
                "floor_mod",
                "floor_divide",
                "divide",
                "power",
                "sin",
                "cos",
                "tan",
            ):
                x[64 : 64 + special.size] = special if i == 0 else special[::-1]
            arrays.append(x.astype(dtype))
        else:
            low, high = (0, 12) if dtype.startswith("uint") or "shift" in kind else (-12, 12)
            x = rng.integers(low, high, SIZE)
            if kind == "power":
                x = rng.integers(0, 4, SIZE)
            arrays.append(x.astype(dtype))
    if kind == "where":
        arrays[0] = rng.integers(0, 2, SIZE).astype(bool)
    out = "bool" if row.tests else dtype
    names = tuple(f"x{i}" for i in range(count))
    attrs = dict(ATTRIBUTES.get(kind, {}))
    if kind == "clip" and not dtype.startswith("float"):
        attrs = {"min": -3 if dtype.startswith("int") else 3, "max": float("inf")}
    return Operator(kind, names, "out", TensorType((SIZE,), out), make_attrs(**attrs)), arrays


def check(op: Operator, arrays: list[np.ndarray], got: np.ndarray, tolerance: float) -> None:
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]
    if op.kind in ("mod", "floor_mod", "floor_divide"):
        wide = arrays
    wanted = evaluate(op, *wide)
    if got.dtype.kind == "f":
        # Each element has its own margin, so that large ones do not hide the errors of small ones.
        # The errors of gates x f(x) are relative to |x| (see test_vector_math).
        margin = (
            tolerance * np.where(np.isfinite(wide[0]), np.abs(wide[0]), 1)
            if op.kind in GATES
            else tolerance / 10
        )
        close = (
            np.abs(
                np.subtract(got, wanted, where=np.isfinite(wanted), out=np.full(got.shape, np.inf))
            )
            <= tolerance * np.abs(wanted) + margin
        )
        close |= (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        assert close.all(), (
            op.kind,
            [a[~close][:4] for a in arrays],
            got[~close][:4],
            wanted[~close][:4],
        )
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("vectors", ["loop", "explicit"])
@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("kind", dict.fromkeys(FLOATS + CONDITIONS))
def test_float32(kind: str, name: str, vectors: str) -> None:
    op, arrays = make(kind, "float32", fresh_seed())
    check(op, arrays, run(op, arrays, name, vectors), 2e-6)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (dtype, kind)
        for dtype in ("int64", "int32", "uint8")
        for kind in INTEGERS
        if np.dtype(dtype).kind in ELEMENTWISE_OPERATORS[kind].dtypes
    ],
)
def test_integers(dtype: str, kind: str) -> None:
    op, arrays = make(kind, dtype, fresh_seed())
    check(op, arrays, run(op, arrays, "x86-64-v3", "loop"), 0)


@pytest.mark.parametrize("kind", CONDITIONS)
def test_bool(kind: str) -> None:
    op, arrays = make(kind, "bool", fresh_seed())
    check(op, arrays, run(op, arrays, "x86-64-v3", "loop"), 0)


@pytest.mark.parametrize("kind", dict.fromkeys(FLOATS + CONDITIONS))
def test_float64(kind: str) -> None:
    op, arrays = make(kind, "float64", fresh_seed())
    serial = not scalar.vectorizable(op, ["float64"])
    check(op, arrays, run(op, arrays, "x86-64-v3", "serial" if serial else "loop"), 1e-12)


@pytest.mark.parametrize("kind", ["add", "gelu", "sigmoid", "maximum", "sqrt"])
def test_float16_computes_in_float32(kind: str) -> None:
    op, arrays = make(kind, "float16", fresh_seed())
    got = run(op, arrays, "x86-64-v3", "loop")
    wanted = evaluate(op, *(a.astype(np.float64) for a in arrays)).astype(np.float16)
    close = np.isclose(
        got.astype(float), wanted.astype(float), rtol=1e-3, atol=1e-4, equal_nan=True
    )
    assert close.all()


DTYPES = ["float32", "float64", "float16", "int64", "int32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("new", DTYPES)
@pytest.mark.parametrize("old", DTYPES)
def test_cast(old: str, new: str) -> None:
    rng = np.random.default_rng(fresh_seed())
    array = rng.uniform(0 if "u" in old + new else -100, 100, SIZE)
    array[:4] = 0
    op = Operator("cast", ("x",), "out", TensorType((SIZE,), new))
    given = array.astype(old)
    np.testing.assert_array_equal(run(op, [given], "x86-64-v3", "loop"), given.astype(new))


@pytest.mark.parametrize(
    "low, high", [(-3.0, 5.0), (-np.inf, 2.0), (1.0, np.inf), (-np.inf, np.inf)]
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_clip_with_open_ends(low: float, high: float, dtype: str) -> None:
    array = np.arange(SIZE).astype(dtype) - (0 if dtype == "uint8" else np.array(96, dtype))
    op = Operator("clip", ("x",), "out", TensorType((SIZE,), dtype), make_attrs(min=low, max=high))
    assert_close(run(op, [array], "x86-64-v3", "loop"), np.clip(array.astype(float), low, high), 0)


@pytest.mark.parametrize("kind", ["divide", "floor_divide", "mod", "floor_mod"])
def test_integer_division_never_traps(kind: str) -> None:
    least = np.iinfo(np.int32).min
    a = np.resize(np.array([least, least, 7, -7, 0], np.int32), SIZE)
    b = np.resize(np.array([-1, 0, 0, 0, 0], np.int32), SIZE)
    op = Operator(kind, ("x0", "x1"), "out", TensorType((SIZE,), "int32"))
    got = run(op, [a, b], "x86-64-v3", "loop")
    assert (got[b == 0] == 0).all()
