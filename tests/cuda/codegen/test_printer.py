"""The printer of CUDA text. Every element-wise operator in every dtype: its printed kernel runs on
the emulator and is compared with numpy. Also what must not be printed.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import tirx

from gtco.machine.gpu import gpu_target
from gtco.tensor.analysis.chains import epilogue
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.lambdas import address, addressable, store, value
from gtco.tensor.cuda.printer import Printer
from gtco.tensor.cuda.spelling import PrintError
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.sketch.elementwise.cuda import match
from gtco.tensor.space import Config
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.batch import emulate_all
from tests.kernels import fresh_seed
from tests.tensor.test_scalar import CONDITIONS, FLOATS, INTEGERS, SIZE, check, make

SINGLE = Config("elementwise", (("neighbours", 1), ("threads", 128)))
GPU = gpu_target("cuda:sm_80")
# Rounding float32 to 16 bits: half a unit of the last place, and the smallest float16.
ROUNDED = {"float16": (2**-11 * 1.01, 2**-24), "bfloat16": (2**-8 * 1.01, 1e-38)}


def run(pairs: list[tuple[Operator, list[np.ndarray]]]) -> list[np.ndarray]:
    """Each operator as its own stage on its arrays."""
    cases = []
    for op, arrays in pairs:
        types = {
            x: TensorType(a.shape, str(a.dtype)) for x, a in zip(op.inputs, arrays, strict=True)
        }
        sketch = match(make_stage([op], types, ()), GPU)
        assert sketch is not None
        cases.append((sketch, SINGLE, arrays))
    return emulate_all(cases)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats(dtype: str) -> None:
    pairs = [make(kind, dtype, fresh_seed()) for kind in dict.fromkeys(FLOATS + CONDITIONS)]
    for (op, arrays), got in zip(pairs, run(pairs), strict=True):
        check(op, arrays, got, 2e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats_compute_in_float32(dtype: str) -> None:
    """The result is that of float32 on the rounded arguments, rounded once."""
    pairs = []
    for kind in dict.fromkeys(FLOATS + CONDITIONS):
        op, arrays = make(kind, "float32", fresh_seed())
        narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        given = [a.astype(narrow) if a.dtype == np.float32 else a for a in arrays]
        out = dtype if op.type.dtype == "float32" else op.type.dtype
        pairs.append((Operator(kind, op.inputs, op.output, TensorType((SIZE,), out), op.attrs),
                      given))  # fmt: skip
    wide = [
        (
            Operator(op.kind, op.inputs, op.output,
                     TensorType((SIZE,), "float32" if op.type.dtype == dtype else op.type.dtype),
                     op.attrs),
            [a if a.dtype == bool else a.astype(np.float32) for a in arrays],
        )
        for op, arrays in pairs
    ]  # fmt: skip
    for (op, _), got, exact in zip(pairs, run(pairs), run(wide), strict=True):
        if got.dtype == bool:
            np.testing.assert_array_equal(got, exact)
            continue
        with np.errstate(over="ignore"):
            wanted = exact.astype(got.dtype)
        np.testing.assert_array_equal(got.astype(float), wanted.astype(float), err_msg=op.kind)


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"]
)
def test_integers(dtype: str) -> None:
    kinds = [k for k in INTEGERS if np.dtype(dtype).kind in ELEMENTWISE_OPERATORS[k].dtypes]
    pairs = [make(kind, dtype, fresh_seed()) for kind in kinds]
    for (op, arrays), got in zip(pairs, run(pairs), strict=True):
        check(op, arrays, got, 0)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16"])
def test_narrow_integers_keep_their_width(dtype: str) -> None:
    """C++ computes in int. Bits that TIR cuts off must be cut off before a comparison or a
    division.
    """
    info = np.iinfo(dtype)
    a = np.resize(np.array([info.max, info.min, info.max, 3], dtype), SIZE)
    b = np.resize(np.array([1, 1, info.max, 250 % (info.max + 1)], dtype), SIZE)
    type_ = TensorType((SIZE,), dtype)
    for first, numpy in (("add", np.add), ("multiply", np.multiply), ("subtract", np.subtract)):
        operators = [
            Operator(first, ("a", "b"), "t", type_),
            Operator("greater", ("t", "b"), "y", TensorType((SIZE,), "bool")),
        ]
        sketch = match(make_stage(operators, {"a": type_, "b": type_}, ()), GPU)
        (got,) = emulate_all([(sketch, SINGLE, [a, b])])
        np.testing.assert_array_equal(got, numpy(a, b) > b)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16"])
def test_a_value_of_any_bits_is_bound(dtype: str) -> None:
    """The end of its range is a number that its dtype lacks: bits of a bfloat16 could not be
    printed.
    """
    printer, given, bound = Printer(), tirx.Var("x", dtype), tirx.Var("y", dtype)
    printer.name(given, "x")
    assert printer.lines(tirx.Bind(bound, given)) == [f"const {dtype}_t y = x;"]


def test_bool() -> None:
    pairs = [make(kind, "bool", fresh_seed()) for kind in CONDITIONS]
    for (op, arrays), got in zip(pairs, run(pairs), strict=True):
        check(op, arrays, got, 0)


DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 uint32 bool".split()


def test_casts() -> None:
    """Between all dtypes, rounded as numpy rounds."""
    rng = np.random.default_rng(fresh_seed())
    pairs = []
    for old in DTYPES:
        for new in DTYPES:
            array = rng.uniform(0 if "u" in old + new else -100, 100, SIZE)
            array[:4] = 0
            array[4:8] = 1 + 2**-11 + 2**-40  # float64 to float16: between two, and a little more
            op = Operator("cast", ("x",), "out", TensorType((SIZE,), new))
            pairs.append((op, [array.astype(np.dtype(old))]))
    for (op, (given,)), got in zip(pairs, run(pairs), strict=True):
        np.testing.assert_array_equal(got, given.astype(np.dtype(op.type.dtype)), err_msg=str(op))


@pytest.mark.parametrize("kind", ["divide", "floor_divide", "mod", "floor_mod"])
def test_integer_division_never_traps(kind: str) -> None:
    least = np.iinfo(np.int32).min
    a = np.resize(np.array([least, least, 7, -7, 0], np.int32), SIZE)
    b = np.resize(np.array([-1, 0, 0, 0, 0], np.int32), SIZE)
    (got,) = run([(Operator(kind, ("x0", "x1"), "out", TensorType((SIZE,), "int32")), [a, b])])
    assert (got[b == 0] == 0).all()


# what is not printed ------------------------------------------------------------------------------
def test_unknown_nodes_raise() -> None:
    x, i = tirx.Var("x", "float32"), tirx.Var("i", "int32")
    printer = Printer(names={x: "x", i: "i"})
    for node, about in (
        (tirx.Broadcast(x, 4), "Broadcast"),
        (tirx.call_pure_extern("float32", "strange", x), "strange"),
        (tirx.call_extern("float32", "strange", x), "call_extern"),
        (tirx.Var("free", "float32"), "nowhere defined"),
    ):
        with pytest.raises(PrintError, match=about):
            printer.expression(node)


def test_division_of_what_may_be_negative_is_floored() -> None:
    i = tirx.Var("i", "int32")
    printer = Printer(names={i: "i"})
    assert printer.expression(tirx.floordiv(i, 8)) == "gtco::floor_div(i, 8)"
    printer.scope.bind(i, 100)
    assert printer.expression(tirx.floordiv(i, 8)) == "i / 8"


def test_parentheses() -> None:
    a, b, c = (tirx.Var(n, "float32") for n in "abc")
    printer = Printer(names={a: "a", b: "b", c: "c"})
    for node, text in (
        ((a + b) * c, "(a + b) * c"),
        (a - (b - c), "a - (b - c)"),
        (a - b - c, "a - b - c"),
        (a / (b * c), "a / (b * c)"),
        (a * b / c, "a * b / c"),
        (tirx.Select(a < b, a, tirx.Select(b < c, b, c)), "a < b ? a : b < c ? b : c"),
        (tirx.Select(a < b, b, c) + a, "(a < b ? b : c) + a"),
        (tirx.all(tirx.any(a < b, b < c), c < a), "(a < b || b < c) && c < a"),
    ):
        assert printer.expression(node) == text


# lambdas ------------------------------------------------------------------------------------------
HALF = TensorType((6, 8), "float16")


def chain() -> Stage:
    turned = TensorType((8, 6), "float16")
    return make_stage(
        [
            Operator("relu", ("a",), "t", HALF),
            Operator("permute", ("t",), "u", turned, make_attrs(axes=(1, 0))),
            Operator("add", ("u", "b"), "v", turned),
        ],
        {"a": HALF, "b": TensorType((8, 1), "float16")},
        (),
    )


def test_value_reads_through_the_prologue() -> None:
    stage = chain()
    text = value(arguments(stage), stage, "u", "read", [("k", 8), ("m", 6)], lambda p: p)
    assert text.startswith("auto read = [=](int k, int m) -> float {")
    assert "in0[m * 8 + k]" in text and "gtco::max(0.0f, " in text


def test_value_takes_what_the_kernel_knows() -> None:
    stage = chain()
    known = {"t": "made"}
    text = value(arguments(stage), stage, "v", "read", [("i", 8), ("j", 6)], lambda p: p, known)
    assert text.startswith("auto read = [=](int i, int j, float made) -> float {")
    assert "in0" not in text


def test_address_is_of_movement_alone() -> None:
    stage = chain()
    args = arguments(stage)
    text = address(args, stage, "a", "at", [("i", 6), ("j", 8)], lambda p: p)
    assert text == "auto at = [=](int i, int j) -> const half* { return in0 + i * 8 + j; };"
    assert addressable(stage, "a") and not addressable(stage, "u")
    with pytest.raises(PrintError, match="computed"):
        address(args, stage, "u", "at", [("i", 8), ("j", 6)], lambda p: p)


def test_store_goes_through_the_epilogue() -> None:
    stage = chain()
    tail = epilogue(stage, "t")
    assert tail is not None
    text = store(arguments(stage), stage, tail, "store", [("m", 6), ("n", 8)], lambda p: p)
    assert text.startswith("auto store = [=](int m, int n, float value) {")
    assert "out[n * 6 + m] = " in text and "in1[n]" in text
