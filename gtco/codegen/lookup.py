"""What looking up a byte in a table of 256 is lowered to, once vectors are made: VPERMI2B of
AVX512-VBMI, which finds 64 bytes among 128, twice. On other machines, and for unusual numbers of
lanes, each lane is loaded by itself.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from gtco.tensor.emit.emitter import CALLED, lanes_of
from gtco.tensor.emit.llvm_source import with_source
from gtco.tensor.emit.lookup import CALLED_AS, FEATURE, LOOKUP

VECTORS = (2, 4, 8, 16, 32, 64)  # lanes
_FIND = "llvm.x86.avx512.vpermi2var.qi.512"


def _name(lanes: int) -> str:
    return f"{CALLED_AS}_{lanes}"


def _lanes(lanes: int, to: int) -> str:
    """A mask of LLVM's that makes a vector of ``to`` lanes of one of ``lanes``."""
    return ", ".join(f"i32 {i}" if i < lanes else "i32 poison" for i in range(to))


def _source() -> str:
    """Functions in LLVM IR: one for each number of lanes, for a vector of places and the table."""
    text = f"declare <64 x i8> @{_FIND}(<64 x i8>, <64 x i8>, <64 x i8>)\n"
    for lanes in VECTORS:
        text += f"define internal <{lanes} x i8> @{_name(lanes)}(<{lanes} x i8> %x, ptr %table) "
        text += "alwaysinline {\n"
        text += f"  %all = shufflevector <{lanes} x i8> %x, <{lanes} x i8> poison, "
        text += f"<64 x i32> <{_lanes(lanes, 64)}>\n"
        for part in range(4):
            text += f"  %p{part} = getelementptr i8, ptr %table, i64 {64 * part}\n"
            text += f"  %t{part} = load <64 x i8>, ptr %p{part}, align 1\n"
        for part, (one, other) in enumerate(((0, 1), (2, 3))):
            text += f"  %half{part} = call <64 x i8> @{_FIND}(<64 x i8> %t{one}, <64 x i8> %all, "
            text += f"<64 x i8> %t{other})\n"
        text += "  %far = icmp slt <64 x i8> %all, zeroinitializer\n"
        text += "  %found = select <64 x i1> %far, <64 x i8> %half1, <64 x i8> %half0\n"
        text += "  %y = shufflevector <64 x i8> %found, <64 x i8> poison, "
        text += f"<{lanes} x i32> <{_lanes(lanes, lanes)}>\n"
        text += f"  ret <{lanes} x i8> %y\n}}\n"
    return text


SOURCE = _source()


def has_instruction(description: Any) -> bool:
    """True if code for a target of this description by TVM has the instruction."""
    return f"+{FEATURE}" in {str(name) for name in description.attrs["mattr"]}


def bound(function: Any) -> Any:
    """The kernel with the functions that a lowered lookup calls."""
    if CALLED_AS not in map(str, (function.attrs or {}).get(CALLED, ())):
        return function
    return with_source(function, SOURCE)


def _lower(call: Any) -> Any:
    x, first = call.args
    first = first.value if isinstance(first, tirx.Broadcast) else first
    lanes = lanes_of(x)
    if lanes in VECTORS and has_instruction(tvm.target.Target.current()):
        return tirx.call_pure_extern(str(call.ty), _name(lanes), x, tirx.address_of(first))
    return first.source[tirx.Cast(f"int32x{lanes}" if lanes > 1 else "int32", x)]


tvm.get_global_func("tirx.RegisterOpLowerIntrinsic")(LOOKUP, _lower, "llvm", 10)
