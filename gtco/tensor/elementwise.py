"""The element-wise operators, each defined once: its inputs, attributes and dtypes, its meaning in
numpy, its computation in kernels, and its name in Relax.

All else follows from these: rows of ``gtco.tensor.operators``, types (``graph.infer``), lowering
(``graph.lower.operators``), the reference (``gtco.tensor.reference``), values in kernels
(``gtco.tensor.emit.scalar``) and, counted in the emitted code, costs (``gtco.tensor.cost``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor import special_functions
from gtco.tensor.emit import arithmetic, composite, vector_math
from gtco.tensor.emit.arithmetic import (
    absolute,
    cast,
    extreme,
    is_float,
    libm,
    quotient,
    remainder,
    shift,
)
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.emit.vector_math import constant
from gtco.tensor.stage import Operator, TensorType

# (emitter, operator, arguments, their dtype) -> value
Emit = Callable[[Emitter, Operator, Sequence[Expr], str], Expr]
Meaning = Callable[..., np.ndarray]  # (operator, *arrays) -> array

NUMBERS = "fiu"  # kinds of dtype as numpy names them: float, signed, unsigned integer, b for bool


@dataclass(frozen=True)
class ElementwiseOperator:
    """One element-wise operator. Operands broadcast as in numpy.

    - ``dtypes``: the kinds for which it has a meaning (``f``, ``i``, ``u``, ``b``). An operator
      that is computed only for floats takes integers through float32;
    - ``meaning(operator, *arrays)``: its meaning in numpy;
    - ``emit(emitter, operator, arguments, dtype)``: the value for scalars or vectors that have one
      dtype, in that dtype;
    - ``conditions``: so many of its first arguments are bool;
    - ``tests``: True if the result is bool too;
    - ``moves``: True if values pass unchanged, in the output's dtype;
    - ``relax``: the Relax operator of the same meaning and inputs; empty if there is none, or if
      its attributes need a rule.
    """

    name: str
    inputs: int
    dtypes: str
    meaning: Meaning
    emit: Emit
    relax: str = ""
    attrs: tuple[str, ...] = ()
    text: str = ""
    tests: bool = False
    conditions: int = 0
    moves: bool = False


# how a row is written -----------------------------------------------------------------------------
def _numpy(function: Callable[..., np.ndarray]) -> Meaning:
    return lambda op, *arrays: function(*arrays)


def _plain(function: Callable[..., Expr]) -> Emit:
    """The same expression in every dtype."""
    return lambda em, op, x, dtype: function(*x)


def _in(function: Callable[[Emitter, Expr, str], Expr]) -> Emit:
    """A unary function that takes the dtype as an argument."""
    return lambda em, op, x, dtype: function(em, x[0], dtype)


def _of_two(function: Callable[[Emitter, Expr, Expr, str], Expr]) -> Emit:
    return lambda em, op, x, dtype: function(em, x[0], x[1], dtype)


def _floats(function: Callable[[Emitter, Operator, Expr, str], Expr]) -> Emit:
    """A unary function of floats; integers take it through float32."""

    def emit(em: Emitter, op: Operator, x: Sequence[Expr], dtype: str) -> Expr:
        if is_float(dtype):
            return function(em, op, x[0], dtype)
        return cast(function(em, op, cast(x[0], dtype, "float32"), "float32"), "float32", dtype)

    return emit


def _bound(function: Callable[[Emitter, Operator, Expr, str], Expr]) -> Emit:
    """Like :func:`_floats`, for an argument that is used more than once."""
    return _floats(lambda em, op, x, dtype: function(em, op, em.let(x), dtype))


def _vector(
    single: Callable[[Emitter, Expr], Expr], double: Callable[[Emitter, Expr], Expr]
) -> Emit:
    """Vector arithmetic in float32; ``double`` is the function in float64, with a bound
    argument.
    """
    return _floats(
        lambda em, op, x, dtype: single(em, x) if dtype == "float32" else double(em, em.let(x))
    )


def _libm(name: str) -> Emit:
    return _floats(lambda em, op, x, dtype: libm(name, x))


def _rounding(function: Callable[[Expr], Expr]) -> Emit:
    """A rounding function; integers stay unchanged."""
    return lambda em, op, x, dtype: function(x[0]) if is_float(dtype) else x[0]


def _logical(combine: Callable[[Expr, Expr], Expr]) -> Emit:
    return lambda em, op, x, dtype: arithmetic.logical(combine, x[0], x[1])


def _not_equal(a: Expr, b: Expr) -> Expr:
    return tirx.Not(tirx.EQ(a, b))  # TVM's NE is false for NaN


def _half_of(op: Operator, name: str, x: np.ndarray) -> Any:
    """An attribute in x's dtype."""
    return special_functions.of_dtype(x, op[name])


def _unary_rows() -> list[ElementwiseOperator]:
    special, vector = special_functions, vector_math

    def row(
        name: str, dtypes: str, meaning: Callable[..., np.ndarray], emit: Emit, **rest: Any
    ) -> ElementwiseOperator:
        return ElementwiseOperator(name, 1, dtypes, _numpy(meaning), emit, **rest)

    def same(
        name: str, dtypes: str, meaning: Callable[..., np.ndarray], emit: Emit
    ) -> ElementwiseOperator:
        return row(name, dtypes, meaning, emit, relax=name)

    def by_libm(name: str, meaning: Callable[..., np.ndarray]) -> ElementwiseOperator:
        return same(name, "f", meaning, _libm(name))

    return [
        # arithmetic
        same("negative", "fi", np.negative, _in(composite.negative)),
        same("abs", NUMBERS, np.abs, _in(absolute)),
        same("sign", NUMBERS, np.sign, _in(composite.sign)),
        same("floor", "fi", np.floor, _rounding(tirx.floor)),
        same("ceil", "fi", np.ceil, _rounding(tirx.ceil)),
        same("trunc", "fi", np.trunc, _rounding(tirx.trunc)),
        same("round", "fi", np.rint, _rounding(arithmetic.nearest)),
        same("sqrt", "f", np.sqrt, _floats(lambda em, op, x, dtype: tirx.sqrt(x))),
        same(
            "rsqrt",
            "f",
            lambda x: 1 / np.sqrt(x),
            _bound(lambda em, op, x, dtype: constant(x, 1) / tirx.sqrt(x)),
        ),
        same("bitwise_not", "iu", np.invert, _plain(tirx.bitwise_not)),
        # exponentials and activations
        same("exp", "f", np.exp, _vector(vector.exp, lambda em, x: libm("exp", x))),
        same("log", "f", np.log, _vector(vector.log, lambda em, x: libm("log", x))),
        same("erf", "f", special.erf, _vector(vector.erf, lambda em, x: arithmetic.extern_erf(x))),
        same("tanh", "f", np.tanh, _vector(vector.tanh, lambda em, x: libm("tanh", x))),
        same("sigmoid", "f", special.sigmoid, _vector(vector.sigmoid, composite.double_sigmoid)),
        row(
            "silu",
            "f",
            lambda x: x * special.sigmoid(x),
            _vector(vector.silu, composite.double_silu),
            relax="nn.silu",
        ),
        row(
            "gelu", "f", special.gelu, _vector(vector.gelu, composite.double_gelu), relax="nn.gelu"
        ),
        row(
            "gelu_tanh",
            "f",
            special.gelu_tanh,
            _vector(vector.gelu_tanh, composite.double_gelu_tanh),
            relax="nn.gelu_tanh",
        ),
        row("softplus", "f", special.softplus, _vector(vector.softplus, composite.double_softplus)),
        row(
            "mish",
            "f",
            lambda x: x * np.tanh(special.softplus(x)),
            _vector(vector.mish, composite.double_mish),
        ),
        row(
            "relu",
            NUMBERS,
            lambda x: np.maximum(x, 0),
            _plain(lambda x: T.max(constant(x, 0), x)),
            relax="nn.relu",
        ),
        # trigonometry: libm's
        by_libm("sin", np.sin),
        by_libm("cos", np.cos),
        by_libm("tan", np.tan),
        by_libm("asin", np.arcsin),
        by_libm("acos", np.arccos),
        by_libm("atan", np.arctan),
        by_libm("sinh", np.sinh),
        by_libm("cosh", np.cosh),
        same("asinh", "f", np.arcsinh, _bound(composite.asinh)),
        same("acosh", "f", np.arccosh, _bound(composite.acosh)),
        same("atanh", "f", np.arctanh, _bound(composite.atanh)),
        # tests
        row("isnan", "f", np.isnan, _in(composite.isnan), relax="isnan", tests=True),
        row("isinf", "f", np.isinf, _in(composite.isinf), relax="isinf", tests=True),
        row(
            "logical_not",
            "b",
            np.logical_not,
            _plain(tirx.Not),
            relax="logical_not",
            tests=True,
            conditions=1,
        ),
        # with attributes
        ElementwiseOperator(
            "cast",
            1,
            NUMBERS + "b",
            lambda op, x: x.astype(op.type.dtype),
            _plain(lambda x: x),
            relax="astype",
            moves=True,
            text="the output's dtype says to what",
        ),
        ElementwiseOperator(
            "clip",
            1,
            NUMBERS,
            lambda op, x: np.clip(x, op["min"], op["max"]),
            composite.clip,
            attrs=("min", "max"),
            text="either bound may be infinite",
        ),
        ElementwiseOperator(
            "leaky_relu",
            1,
            "f",
            lambda op, x: np.where(x >= 0, x, x * _half_of(op, "alpha", x)),
            _bound(composite.leaky_relu),
            attrs=("alpha",),
        ),
        ElementwiseOperator(
            "elu",
            1,
            "f",
            lambda op, x: np.where(x > 0, x, _half_of(op, "alpha", x) * np.expm1(np.minimum(x, 0))),
            _bound(composite.elu),
            attrs=("alpha",),
            text="x if x > 0 else alpha * (exp(x) - 1)",
        ),
    ]


def _binary_rows() -> list[ElementwiseOperator]:
    def row(
        name: str, dtypes: str, meaning: Callable[..., np.ndarray], emit: Emit, **rest: Any
    ) -> ElementwiseOperator:
        return ElementwiseOperator(name, 2, dtypes, _numpy(meaning), emit, relax=name, **rest)

    def plain(
        name: str, dtypes: str, meaning: Callable[..., np.ndarray], emit: Callable[..., Expr]
    ) -> ElementwiseOperator:
        return row(name, dtypes, meaning, _plain(emit))

    def compared(
        name: str, dtypes: str, meaning: Callable[..., np.ndarray], emit: Callable[..., Expr]
    ) -> ElementwiseOperator:
        return row(name, dtypes, meaning, _plain(emit), tests=True)

    def logical(
        name: str, meaning: Callable[..., np.ndarray], combine: Callable[..., Expr]
    ) -> ElementwiseOperator:
        return row(name, "b", meaning, _logical(combine), tests=True, conditions=2)

    def two(
        name: str, meaning: Callable[..., np.ndarray], emit: Callable[..., Expr]
    ) -> ElementwiseOperator:
        return row(name, NUMBERS, meaning, _of_two(emit))

    def integers(
        name: str, meaning: Callable[..., np.ndarray], emit: Callable[..., Expr]
    ) -> ElementwiseOperator:
        return row(name, "iu", meaning, _of_two(emit))

    return [
        plain("add", NUMBERS, np.add, lambda a, b: a + b),
        plain("subtract", NUMBERS, np.subtract, lambda a, b: a - b),
        plain("multiply", NUMBERS, np.multiply, lambda a, b: a * b),
        two("divide", special_functions.divide, partial(quotient, floor=False)),
        two("floor_divide", np.floor_divide, partial(quotient, floor=True)),
        two("mod", np.fmod, partial(remainder, floor=False)),
        two("floor_mod", np.mod, partial(remainder, floor=True)),
        two("power", np.power, lambda em, a, b, dtype: arithmetic.power(a, b, dtype)),
        two("maximum", np.maximum, partial(extreme, choose=T.max)),
        two("minimum", np.minimum, partial(extreme, choose=T.min)),
        compared("equal", NUMBERS + "b", np.equal, tirx.EQ),
        compared("not_equal", NUMBERS + "b", np.not_equal, _not_equal),
        compared("less", NUMBERS, np.less, tirx.LT),
        compared("less_equal", NUMBERS, np.less_equal, tirx.LE),
        compared("greater", NUMBERS, np.greater, tirx.GT),
        compared("greater_equal", NUMBERS, np.greater_equal, tirx.GE),
        logical("logical_and", np.logical_and, tirx.bitwise_and),
        logical("logical_or", np.logical_or, tirx.bitwise_or),
        logical("logical_xor", np.logical_xor, tirx.bitwise_xor),
        row("bitwise_and", "iu", np.bitwise_and, _plain(tirx.bitwise_and)),
        row("bitwise_or", "iu", np.bitwise_or, _plain(tirx.bitwise_or)),
        row("bitwise_xor", "iu", np.bitwise_xor, _plain(tirx.bitwise_xor)),
        integers("left_shift", np.left_shift, partial(shift, left=True)),
        integers("right_shift", np.right_shift, partial(shift, left=False)),
    ]


def _functions(op: Operator) -> list[tuple[Operator, tuple[float, ...]]]:
    """The functions of a ``byte_function`` in order: operators of float32, each with the constants
    that it takes beside its argument.
    """
    kind = TensorType((), "float32")
    return [
        (Operator(name, ("x",), "y", kind, attrs), rest) for name, attrs, rest in op["functions"]
    ]


def _composed(op: Operator, x: np.ndarray) -> np.ndarray:
    for each, rest in _functions(op):
        constants = [x.dtype.type(c) for c in rest]
        x = ELEMENTWISE_OPERATORS[each.kind].meaning(each, x, *constants)
    return x


def _emitted(em: Emitter, op: Operator, x: Expr, dtype: str) -> Expr:
    for each, rest in _functions(op):
        constants = [constant(x, c) for c in rest]
        x = em.let(ELEMENTWISE_OPERATORS[each.kind].emit(em, each, [x, *constants], dtype))
    return x


_MULTIPLY_PAIR = ElementwiseOperator(
    "multiply_pair",
    3,
    "f",
    _numpy(special_functions.multiply_pair),
    _plain(lambda x, high, low: arithmetic.intrinsic("fma", x, high, x * low)),
    text="x * (high + low): a factor of twice the precision, in two parts; rounded once",
)
_QUANTIZE = ElementwiseOperator(
    "quantize",
    4,
    "f",
    special_functions.quantize,
    composite.quantize,
    attrs=("min", "max"),
    text="clip(round(multiply_pair(x, high, low)) + zero, min, max), in the output's dtype",
)
_DEQUANTIZE = ElementwiseOperator(
    "dequantize",
    3,
    "f",
    _numpy(special_functions.dequantize),
    _plain(lambda x, scale, zero: (x - zero) * scale),
    text="(x - zero) * scale, in the dtype of the scale",
)
_BYTE_FUNCTION = ElementwiseOperator(
    "byte_function",
    6,
    "f",
    lambda op, x, scale, zero, *steps: special_functions.quantize(
        op, _composed(op, special_functions.dequantize(x, scale, zero)), *steps
    ),
    lambda em, op, x, dtype: composite.quantize(
        em, op, (_emitted(em, op, em.let((x[0] - x[2]) * x[1]), dtype), *x[3:]), dtype
    ),
    attrs=("functions", "min", "max"),
    text="quantize(f(dequantize(x, scale, zero)), high, low, zero): a byte of a byte. f is a chain "
    "of operators, each with its attributes and the constants beside its argument. Kernels look it "
    "up in a table of 256 bytes",
)
_WHERE = ElementwiseOperator(
    "where",
    3,
    NUMBERS + "b",
    _numpy(np.where),
    _plain(tirx.Select),
    relax="where",
    text="where(condition, x, y)",
    conditions=1,
    moves=True,
)

ELEMENTWISE_OPERATORS: dict[str, ElementwiseOperator] = {
    row.name: row
    for row in (
        *(*_unary_rows(), *_binary_rows()),
        *(_MULTIPLY_PAIR, _QUANTIZE, _DEQUANTIZE, _BYTE_FUNCTION, _WHERE),
    )
}
UNARY = frozenset(row.name for row in ELEMENTWISE_OPERATORS.values() if row.inputs == 1)
BROADCASTING = frozenset(ELEMENTWISE_OPERATORS) - UNARY  # with two operands or three
