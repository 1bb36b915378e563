"""Element-wise operators as scalar TIR expressions; in a vectorized loop each becomes vector instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit import Emitter, Expr
from gtco.tensor.stage import Operator

BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "maximum": T.max,
    "minimum": T.min,
}
UNARY: dict[str, Callable[[Emitter, Expr], Expr]] = {
    "relu": lambda em, x: T.max(x, tirx.const(0, "float32")),
}


def apply(em: Emitter, op: Operator, args: Sequence[Expr], dtypes: Sequence[str]) -> Expr:
    """The operator's value for these argument values; ``dtypes`` are the arguments'."""
    if op.kind in BINARY:
        return BINARY[op.kind](args[0], args[1])
    return UNARY[op.kind](em, args[0])
