"""What rounding to bfloat16 is lowered to, once vectors are made: the CPU's instruction for it
(VCVTNEPS2BF16 of AVX512-BF16, BFCVTN of AArch64), or integer arithmetic where it has none.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from gtco.machine.isa import ISAS
from gtco.tensor.emit.bfloat16 import ROUND, rounded_by_integers
from gtco.tensor.emit.emitter import lanes_of
from gtco.tensor.emit.llvm_source import with_source

VECTORS = (2, 4, 8, 16, 32)  # lanes
NARROW = "avx512vl"  # without it, AVX-512's instructions take vectors of 512 bits alone


def _name(lanes: int) -> str:
    return f"gtco_round_{lanes}"


def _source() -> str:
    """Functions in LLVM IR, since TVM knows no bfloat16 that LLVM's backend does: one for each
    number of lanes, for vectors to vectors of its bits.
    """
    text = ""
    for lanes in VECTORS:
        bits, half, wide = (f"<{lanes} x {kind}>" for kind in ("i16", "bfloat", "float"))
        text += (
            f"define internal {bits} @{_name(lanes)}({wide} %x) alwaysinline {{\n"
            f"  %half = fptrunc {wide} %x to {half}\n"
            f"  %bits = bitcast {half} %half to {bits}\n"
            f"  ret {bits} %bits\n}}\n"
        )
    return text


SOURCE = _source()


def with_instruction(function: Any) -> Any:
    """The kernel with the functions that a lowered rounding calls."""
    return with_source(function, SOURCE)


def has_instruction(description: Any) -> bool:
    """True if code for a target of this description by TVM rounds by the instruction."""
    features = {str(name) for name in description.attrs["mattr"]}
    known = {f"+{isa.rounding}" for isa in ISAS.values()}
    return not known.isdisjoint(features) and f"-{NARROW}" not in features


def _lower(call: Any) -> Any:
    (x,) = call.args
    lanes = lanes_of(x)
    if lanes in VECTORS and has_instruction(tvm.target.Target.current()):
        return tirx.call_pure_extern(str(call.ty), _name(lanes), x)
    return rounded_by_integers(x)


tvm.get_global_func("tirx.RegisterOpLowerIntrinsic")(ROUND, _lower, "llvm", 10)
