"""Instructions that multiply vectors of small numbers, as LLVM functions: TVM emits none of them.
A kernel imports the source of the row that it uses.
"""

from __future__ import annotations

# TVM's LLVM code generator takes no bfloat16 vectors, so pairs are passed as int32. Groups of four
# bytes are too, because those of A are broadcast as one number.
DOT, DOT_BYTES = "gtco_dpbf16ps", "gtco_dpbusd"
# Those of AArch64. Kernels that are compiled together share a function of one name.
BFDOT, BFMMLA, SDOT, SMMLA = "gtco_bfdot", "gtco_bfmmla", "gtco_sdot", "gtco_smmla"


def _dot_bytes(lanes: int) -> str:
    """The function of VPDPBUSD for vectors of so many int32. LLVM gives a 256-bit one the encoding
    that the target has.
    """
    words, quads, bits = f"<{lanes} x i32>", f"<{4 * lanes} x i8>", 32 * lanes
    return f"""\
declare {words} @llvm.x86.avx512.vpdpbusd.{bits}({words}, {quads}, {quads})
define internal {words} @{DOT_BYTES}({words} %c, {words} %a, {words} %b) alwaysinline {{
  %x = bitcast {words} %a to {quads}
  %y = bitcast {words} %b to {quads}
  %sum = call {words} @llvm.x86.avx512.vpdpbusd.{bits}({words} %c, {quads} %x, {quads} %y)
  ret {words} %sum
}}
"""


def _neon(function: str, intrinsic: str, sums: str, values: str) -> str:
    """A function of an instruction of AArch64 that multiplies vectors of small numbers."""
    return f"""\
declare {sums} @llvm.aarch64.neon.{intrinsic}({sums}, {values}, {values})
define internal {sums} @{function}({sums} %c, <4 x i32> %a, <4 x i32> %b) alwaysinline {{
  %x = bitcast <4 x i32> %a to {values}
  %y = bitcast <4 x i32> %b to {values}
  %sum = call {sums} @llvm.aarch64.neon.{intrinsic}({sums} %c, {values} %x, {values} %y)
  ret {sums} %sum
}}
"""


SOURCES = {
    "bfdot": _neon(BFDOT, "bfdot.v4f32.v8bf16", "<4 x float>", "<8 x bfloat>"),
    "bfmmla": _neon(BFMMLA, "bfmmla", "<4 x float>", "<8 x bfloat>"),
    "sdot": _neon(SDOT, "sdot.v4i32.v16i8", "<4 x i32>", "<16 x i8>"),
    "smmla": _neon(SMMLA, "smmla.v4i32.v16i8", "<4 x i32>", "<16 x i8>"),
    "vnni": _dot_bytes(16),
    "vnni256": _dot_bytes(8),
    "bf16": f"""\
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define internal <16 x float> @{DOT}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %sum = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x,
                                                            <32 x bfloat> %y)
  ret <16 x float> %sum
}}
""",
}
