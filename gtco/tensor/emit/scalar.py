"""The value of an element-wise operator as a scalar TIR expression. In a vectorized loop it becomes
vector instructions.

:mod:`gtco.tensor.elementwise` has a row for the computation of each operator. float16 and bfloat16
compute in float32; float64 calls libm for each lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.emit import vector_math
from gtco.tensor.emit.arithmetic import intrinsic
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.stage import Operator, Stage

NARROW = ("float16", "bfloat16")
ROUNDED = {"gelu": vector_math.gelu_rounded}


def rounded(stage: Stage) -> frozenset[str]:
    """The tensors inside the stage that are only rounded to 16 bits, and for which there are
    shorter functions that are as good then.
    """
    return frozenset(
        op.output
        for op in stage.operators
        if op.kind in ROUNDED and op.type.dtype == "float32"
        if (readers := stage.consumers(op.output))
        and all(r.kind == "cast" and r.type.dtype in NARROW for r in readers)
    )


def apply(
    em: Emitter,
    op: Operator,
    args: Sequence[Expr],
    dtypes: Sequence[str],
    is_rounded: bool = False,
) -> Expr:
    """The operator's value for these argument values; ``dtypes`` are the arguments'. It
    ``is_rounded`` if it is one of those of :func:`rounded`.

    ``args`` are scalars (lanes of a vectorized loop) or explicit vectors, all with the same lanes.
    """
    if is_rounded and list(dtypes) == ["float32"]:
        return ROUNDED[op.kind](em, _unfolded(args[0]))
    row, out = ELEMENTWISE_OPERATORS[op.kind], op.type.dtype
    first, given = row.conditions, dtypes[row.conditions :]
    dtype = out if row.moves else _computed(_common(given)) if given else "bool"
    wanted = ["bool"] * first + [dtype] * len(given)
    values = [convert(em, _unfolded(x), d, w) for x, d, w in zip(args, dtypes, wanted, strict=True)]
    value = row.emit(em, op, values, dtype)
    return value if row.tests or row.moves else convert(em, value, dtype, out)


def _unfolded(x: Expr) -> Expr:
    """A float constant (a padding's, for example) behind a call that returns it. TVM would fold the
    constant itself: it refuses to divide by 0, and takes 0 * x for 0 whatever x is. LLVM folds the
    call and the following operations by IEEE 754.
    """
    return intrinsic("copysign", x, x) if isinstance(x, tirx.FloatImm) else x


def _common(dtypes: Sequence[str]) -> str:
    return dtypes[0] if len(set(dtypes)) == 1 else str(np.result_type(*dtypes))


def _computed(dtype: str) -> str:
    """The dtype in which arithmetic on this dtype runs. bool counts as 0 and 1."""
    if dtype in NARROW:
        return "float32"
    return "int8" if dtype == "bool" else dtype


def vectorizable(op: Operator, dtypes: Sequence[str]) -> bool:
    """True if the operator may be in a vectorized loop. float64's erf may not: it calls libm, and
    TVM makes a loop of its own for that. Nor may a cast of 64 bits to 8: for AArch64 LLVM 22
    compiles that of three lanes wrong (its pull request 202039).
    """
    if op.kind == "cast":
        return not (dtypes[0] in ("int64", "uint64") and op.type.dtype in ("int8", "uint8"))
    return not (op.kind in ("erf", "gelu") and dtypes[0] == "float64")
