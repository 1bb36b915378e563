"""What a kernel has beyond TVM's own operators: functions in LLVM IR that it brings with it, and
operators that stay until all vectors are made and are then lowered to such functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx
from tvm.tirx.script.builder import ir as T

PRAGMA = "pragma_import_llvm"
PURE = 1  # TVM's CallEffectKind


def with_source(function: Any, source: str, body: Any = None) -> Any:
    """The kernel with the functions that LLVM IR defines, and with another body if one is given."""
    whole = function.body if body is None else body
    return function.with_body(tirx.AttrStmt(tirx.const(0, "int32"), PRAGMA, source, whole))


@contextmanager
def source(text: str) -> Iterator[None]:
    """Code that is emitted in this context may call the functions that the LLVM IR defines."""
    with T.attr(tirx.const(0, "int32"), PRAGMA, text):
        yield


def vector_operator(name: str, what: str) -> None:
    """Makes an operator without effects known to TVM, which may be called with vectors."""
    tvm.get_global_func("ir.RegisterOp")(name, what)
    tvm.ir.register_op_attr(name, "TVectorizable", True)
    tvm.ir.register_op_attr(name, "TCallEffectKind", PURE)
