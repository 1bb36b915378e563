"""Functions of a byte in kernels: a table of their 256 values, and an operator that looks them up.

A kernel makes the table before its loops, by the arithmetic that it replaces, so a value is the
same in either way. A vector of bytes is looked up in a few instructions
(:mod:`gtco.codegen.lookup`).
"""

from __future__ import annotations

from tvm import tirx

from gtco.tensor.emit.arithmetic import cast
from gtco.tensor.emit.emitter import Array, Emitter, Expr, lanes_of
from gtco.tensor.emit.llvm_source import vector_operator

BYTES = 256
FEATURE = "avx512vbmi"  # of the CPUs that look up vectors of bytes
CALLED_AS = "gtco_lookup"  # the beginning of the names of the functions that look up
LOOKUP = f"tirx.{CALLED_AS}"

vector_operator(LOOKUP, "the byte at a place of a table of 256 bytes")


def byte_of(place: Expr, dtype: str) -> Expr:
    """The byte of dtype int8 or uint8 whose value a table has at ``place``, as a float32."""
    if dtype == "int8":  # TVM refuses to cast 128 to it
        half = tirx.IntImm("int32", 128)
        place = tirx.bitwise_xor(tirx.Cast("int32", place), half) - half
    return tirx.Cast("float32", place)


def looked_up(em: Emitter, table: Array, x: Expr, dtype: str) -> Expr:
    """The value of byte ``x`` of ``dtype`` in the table. It stays an operator until all vectors are
    made.
    """
    lanes = lanes_of(x)
    kind = f"{table.dtype}x{lanes}" if lanes > 1 else table.dtype
    em.called.add(CALLED_AS)
    return tirx.call_intrin(kind, LOOKUP, cast(x, dtype, "uint8"), table.buffer[0])
