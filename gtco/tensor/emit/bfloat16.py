"""bfloat16 in kernels: a value is its 16 bits, a ``uint16``, and arithmetic runs in float32.

TVM and LLVM have a type of that name. But TVM computes with it by rewriting whole kernels, and its
LLVM code generator crashes on it. A bfloat16 is the upper half of a float32, so both conversions
are a few integer instructions, also in vectors. Instructions that multiply bfloat16 read the bits
directly.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tvm import tirx

from gtco.tensor.emit.arithmetic import cast, is_nan
from gtco.tensor.emit.emitter import Emitter, Expr, lanes_of
from gtco.tensor.emit.llvm_source import vector_operator
from gtco.tensor.emit.vector_math import bits, constant, from_bits

BFLOAT16 = "bfloat16"
ROUND = "tirx.gtco_round_bfloat16"  # an operator: float32 to the bits of the nearest bfloat16
QUIET = 0x0040  # the first bit of the fraction: a NaN that is cut must not become infinity

vector_operator(ROUND, "float32 to the bits of the nearest bfloat16")


def widened(x: Expr) -> Expr:
    """The float32 of a bfloat16's bits. It is exact, also for infinities and NaN."""
    return from_bits(tirx.shift_left(cast(x, "uint16", "uint32"), constant(x, 16, "uint32")))


def rounded(em: Emitter, x: Expr) -> Expr:
    """The bits of the bfloat16 nearest to a float32, ties to even. Beyond the largest bfloat16 it
    is infinity (IEEE 754), and NaN stays NaN. It stays an operator of its own until all vectors are
    made (:mod:`gtco.codegen.round_bfloat16`).
    """
    if em.bfloat16_rounding:
        return tirx.call_pure_extern("uint16", em.bfloat16_rounding, x)
    lanes = lanes_of(x)
    return tirx.call_intrin(f"uint16x{lanes}" if lanes > 1 else "uint16", ROUND, em.let(x))


def rounded_by_integers(x: Expr) -> Expr:
    """The result of :func:`rounded`, for machines without an instruction for it."""
    word = bits(x)
    one, sixteen = constant(word, 1), constant(word, 16)
    odd = tirx.bitwise_and(tirx.shift_right(word, sixteen), one)
    nearest = tirx.shift_right(word + (odd + constant(word, 0x7FFF)), sixteen)
    nan = tirx.bitwise_or(tirx.shift_right(word, sixteen), constant(word, QUIET))
    return cast(tirx.Select(is_nan(x), nan, nearest), "uint32", "uint16")


def rounded_weight(x: Expr) -> Expr:
    """The bits of the bfloat16 nearest to a weight of a softmax, from 0 to 1; of two equally near,
    the larger. A NaN may become a number, because the sum that divides the weight is NaN too. It
    takes three instructions that do not use the multipliers; vcvtneps2bf16 on a Zen 4 does.
    """
    word = bits(x)
    nearest = tirx.shift_right(word + constant(word, 0x8000), constant(word, 16))
    return cast(nearest, "uint32", "uint16")


def pair(low: Expr, high: Expr) -> Expr:
    """The bits of two bfloat16, with the first in the lower half of an int32."""
    upper = tirx.shift_left(tirx.Cast("int32", high), tirx.const(16, "int32"))
    return tirx.bitwise_or(tirx.Cast("int32", low), upper)


def convert(em: Emitter, x: Expr, old: str, new: str) -> Expr:
    """``x`` as another dtype, if one of them is bfloat16. The conversion goes through float32."""
    if old == new:
        return x
    if old == BFLOAT16:
        return cast(widened(x), "float32", new)
    if new == BFLOAT16:
        return rounded(em, cast(x, old, "float32"))
    return cast(x, old, new)


def literal(value: float, dtype: str) -> Expr:
    """A scalar constant in the form in which kernels hold values of ``dtype``."""
    if dtype != BFLOAT16:
        return tirx.const(value, dtype)
    return tirx.const(int(np.asarray(value, ml_dtypes.bfloat16).view(np.uint16)), "uint16")
