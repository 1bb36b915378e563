"""The functions that kernels in tiles call (:mod:`gtco.tensor.intrinsics.tiles`), in LLVM IR: one
instruction each or, for a target that emulates the tile unit, a loop that does the same.

The emulation runs on any x86-64 CPU. It is bit for bit what Intel's manual says of TDPBF16PS (SDM
vol. 2): products of even and of odd steps of k are summed apart, by fused multiply-adds from zero,
and then both sums are added to C. The instruction also flushes denormals, as every thread of the
runtime does. TDPBUSD adds products of unsigned bytes of A and signed ones of B, which are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gtco.machine.target import TILES, Target
from gtco.tensor.emit.emitter import CALLED
from gtco.tensor.emit.llvm_source import with_source
from gtco.tensor.intrinsics.tiles import LINE, PREFIX, tile_rows

# Kernels that are compiled together share these functions and the emulated tiles.
LINKAGE = "linkonce_odr hidden"
INSTRUCTIONS = """\
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tdpbusd(i8 immarg, i8 immarg, i8 immarg)
"""
# Parts of both products: the tiles of C, A and B, of which C's rows are computed one by one; a word
# of A in all lanes, and the row of B that it multiplies.
_OPERANDS = f"""\
entry:
  %rows = call i64 @{PREFIX}rows(i64 %c)
  %tc = getelementptr [16 x <16 x i32>], ptr @{PREFIX}data, i64 %c
  %ta = getelementptr [16 x <16 x i32>], ptr @{PREFIX}data, i64 %a
  %tb = getelementptr [16 x <16 x i32>], ptr @{PREFIX}data, i64 %b
  br label %row
"""
_WORDS = """\
  %pa = getelementptr i32, ptr %ra, i64 %k
  %one = load i32, ptr %pa
  %first = insertelement <16 x i32> poison, i32 %one, i64 0
  %x = shufflevector <16 x i32> %first, <16 x i32> poison, <16 x i32> zeroinitializer
  %rb = getelementptr <16 x i32>, ptr %tb, i64 %k
  %y = load <16 x i32>, ptr %rb, align 64
"""
_NEXT_ROW = """\
  %m.next = add i64 %m, 1
  %m.more = icmp ult i64 %m.next, %rows
  br i1 %m.more, label %row, label %done
done:
  ret void
"""
# s3 = total + the four products of the bytes of x, unsigned, and of y, signed
_BYTES = "".join(
    f"""\
  %x{n}.s = lshr <16 x i32> %x, splat (i32 {8 * n})
  %x{n} = and <16 x i32> %x{n}.s, splat (i32 255)
  %y{n}.s = shl <16 x i32> %y, splat (i32 {24 - 8 * n})
  %y{n} = ashr <16 x i32> %y{n}.s, splat (i32 24)
  %p{n} = mul <16 x i32> %x{n}, %y{n}
  %s{n} = add <16 x i32> %{f"s{n - 1}" if n else "total"}, %p{n}
"""
    for n in range(4)
)
# A thread has eight tiles and a pointer to its configuration. The pointer is null before the kernel
# configures the tiles and after it releases them; reading a tile's rows then faults, as the
# instructions do.
EMULATION = f"""\
@{PREFIX}data = {LINKAGE} thread_local global [8 x [16 x <16 x i32>]] zeroinitializer, align 64
@{PREFIX}configuration = {LINKAGE} thread_local global ptr null
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.trap()
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define {LINKAGE} void @{PREFIX}set(ptr %to) noinline {{
  store ptr %to, ptr @{PREFIX}configuration
  call void @llvm.memset.p0.i64(ptr @{PREFIX}data, i8 0, i64 8192, i1 false)
  ret void
}}
define {LINKAGE} i64 @{PREFIX}rows(i64 %t) noinline {{
  %config = load ptr, ptr @{PREFIX}configuration
  %first = getelementptr i8, ptr %config, i64 48
  %place = getelementptr i8, ptr %first, i64 %t
  %short = load volatile i8, ptr %place
  %rows = zext i8 %short to i64
  %none = icmp eq i64 %rows, 0
  br i1 %none, label %fault, label %done
fault:
  call void @llvm.trap()
  unreachable
done:
  ret i64 %rows
}}
define {LINKAGE} void @{PREFIX}zero(i64 %t) noinline {{
  %rows = call i64 @{PREFIX}rows(i64 %t)
  %tile = getelementptr [16 x <16 x i32>], ptr @{PREFIX}data, i64 %t
  call void @llvm.memset.p0.i64(ptr %tile, i8 0, i64 1024, i1 false)
  ret void
}}
define {LINKAGE} void @{PREFIX}move(i64 %t, ptr %memory, i64 %stride, i1 %out) noinline {{
entry:
  %rows = call i64 @{PREFIX}rows(i64 %t)
  %tile = getelementptr [16 x <16 x i32>], ptr @{PREFIX}data, i64 %t
  br i1 %out, label %loop, label %clear
clear:
  call void @llvm.memset.p0.i64(ptr %tile, i8 0, i64 1024, i1 false)
  br label %loop
loop:
  %r = phi i64 [0, %entry], [0, %clear], [%next, %moved]
  %offset = mul i64 %r, %stride
  %outside = getelementptr i8, ptr %memory, i64 %offset
  %inside = getelementptr <16 x i32>, ptr %tile, i64 %r
  br i1 %out, label %store, label %load
store:
  %row = load <16 x i32>, ptr %inside, align 64
  store <16 x i32> %row, ptr %outside, align 1
  br label %moved
load:
  %new = load <16 x i32>, ptr %outside, align 1
  store <16 x i32> %new, ptr %inside, align 64
  br label %moved
moved:
  %next = add i64 %r, 1
  %more = icmp ult i64 %next, %rows
  br i1 %more, label %loop, label %done
done:
  ret void
}}
define {LINKAGE} void @{PREFIX}multiply(i64 %c, i64 %a, i64 %b) noinline {{
{_OPERANDS}row:
  %m = phi i64 [0, %entry], [%m.next, %sum]
  %ra = getelementptr <16 x i32>, ptr %ta, i64 %m
  br label %pair
pair:
  %k = phi i64 [0, %row], [%k.next, %pair]
  %even = phi <16 x float> [zeroinitializer, %row], [%even.next, %pair]
  %odd = phi <16 x float> [zeroinitializer, %row], [%odd.next, %pair]
{_WORDS}  %x.low = shl <16 x i32> %x, splat (i32 16)
  %y.low = shl <16 x i32> %y, splat (i32 16)
  %x.high = and <16 x i32> %x, splat (i32 -65536)
  %y.high = and <16 x i32> %y, splat (i32 -65536)
  %xe = bitcast <16 x i32> %x.low to <16 x float>
  %ye = bitcast <16 x i32> %y.low to <16 x float>
  %xo = bitcast <16 x i32> %x.high to <16 x float>
  %yo = bitcast <16 x i32> %y.high to <16 x float>
  %even.next = call <16 x float> @llvm.fma.v16f32(<16 x float> %xe, <16 x float> %ye,
                                                 <16 x float> %even)
  %odd.next = call <16 x float> @llvm.fma.v16f32(<16 x float> %xo, <16 x float> %yo,
                                                <16 x float> %odd)
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, 16
  br i1 %k.more, label %pair, label %sum
sum:
  %both = fadd <16 x float> %even.next, %odd.next
  %rc = getelementptr <16 x float>, ptr %tc, i64 %m
  %before = load <16 x float>, ptr %rc, align 64
  %after = fadd <16 x float> %before, %both
  store <16 x float> %after, ptr %rc, align 64
{_NEXT_ROW}}}
define {LINKAGE} void @{PREFIX}multiply8(i64 %c, i64 %a, i64 %b) noinline {{
{_OPERANDS}row:
  %m = phi i64 [0, %entry], [%m.next, %sum]
  %ra = getelementptr <16 x i32>, ptr %ta, i64 %m
  %rc = getelementptr <16 x i32>, ptr %tc, i64 %m
  %before = load <16 x i32>, ptr %rc, align 64
  br label %four
four:
  %k = phi i64 [0, %row], [%k.next, %four]
  %total = phi <16 x i32> [%before, %row], [%s3, %four]
{_WORDS}{_BYTES}  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, 16
  br i1 %k.more, label %four, label %sum
sum:
  store <16 x i32> %s3, ptr %rc, align 64
{_NEXT_ROW}}}
"""


def used(function: Any) -> bool:
    """True if the kernel multiplies in tiles."""
    return bool(_called(function))


def _called(function: Any) -> list[str]:
    """The names, without their common beginning, of the functions that a kernel calls."""
    names = map(str, (function.attrs or {}).get(CALLED, ()))
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


def bound(function: Any, target: Target) -> Any:
    """The kernel with the functions that it calls."""
    names = _called(function)
    if not names:
        return function
    source = definitions(names, emulated=TILES[0] in target.emulated)
    return with_source(function, source)


def definitions(names: Iterable[str], emulated: bool) -> str:
    """LLVM IR that defines these functions."""
    define = _emulated if emulated else _instruction
    text = [EMULATION if emulated else INSTRUCTIONS]
    for name in names:
        what, *numbers = name.split("_")
        if what == "configure":
            text.append(_configuration(int(numbers[0])))
        parameters = "ptr %p, i64 %s" if what in ("load", "store") else ""
        text.append(
            f"define {LINKAGE} i32 @{PREFIX}{name}({parameters}) alwaysinline {{\n"
            f"  call void {define(what, numbers)}\n  ret i32 0\n}}\n"
        )
    return "".join(text)


def _instruction(what: str, numbers: list[str]) -> str:
    tiles = ", ".join(f"i8 {n}" for n in numbers)
    return {
        "configure": f"@llvm.x86.ldtilecfg(ptr @{PREFIX}rows_{numbers[0] if numbers else ''})",
        "release": "@llvm.x86.tilerelease()",
        "zero": f"@llvm.x86.tilezero({tiles})",
        "load": f"@llvm.x86.tileloadd64({tiles}, ptr %p, i64 %s)",
        "store": f"@llvm.x86.tilestored64({tiles}, ptr %p, i64 %s)",
        "multiply": f"@llvm.x86.tdpbf16ps({tiles})",
        "multiply8": f"@llvm.x86.tdpbusd({tiles})",
    }[what]


def _emulated(what: str, numbers: list[str]) -> str:
    tiles = ", ".join(f"i64 {n}" for n in numbers)
    return {
        "configure": f"@{PREFIX}set(ptr @{PREFIX}rows_{numbers[0] if numbers else ''})",
        "release": f"@{PREFIX}set(ptr null)",
        "zero": f"@{PREFIX}zero({tiles})",
        "load": f"@{PREFIX}move({tiles}, ptr %p, i64 %s, i1 false)",
        "store": f"@{PREFIX}move({tiles}, ptr %p, i64 %s, i1 true)",
        "multiply": f"@{PREFIX}multiply({tiles})",
        "multiply8": f"@{PREFIX}multiply8({tiles})",
    }[what]


def _configuration(rows: int) -> str:
    """The 64 bytes of a configuration, as a constant: palette 1, the bytes of a row of each tile
    and its rows. A tile without rows has no bytes either.
    """
    of_tiles = tile_rows(rows)
    wide = [b for r in of_tiles for b in ((LINE if r else 0), 0)]
    values = [1, *[0] * 15, *wide, *[0] * 16, *of_tiles, *[0] * 8]
    text = "".join(f"\\{value:02X}" for value in values)
    return f'@{PREFIX}rows_{rows} = {LINKAGE} constant [64 x i8] c"{text}", align 64\n'
