"""The instruction sets that gtco generates code for, as values. Targets, emission, code generation,
linking and the runtime ask these values what differs from one instruction set to the other.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """One instruction set, such as x86-64 or AArch64.

    - ``name``: in messages, in metadata and in records
    - ``uname``: what ``uname -m`` says on a machine that has it
    - ``elf``: its number in an ELF file's header (e_machine)
    - ``triple``: LLVM's target triple; "" leaves LLVM its own, that of x86-64
    - ``baseline``: what every CPU with it has, by LLVM's names
    - ``tuning``: a pattern of the names that LLVM lists beside instruction sets: how a CPU likes
      its code
    - ``vectors``: the vector instructions by the number of float32 in a vector
    - ``rounding``: the feature that rounds float32 to bfloat16 in one instruction
    - ``c_flags``: the flags of the C compiler for code that runs before the CPU is checked
    - ``compilers``: cross compilers for it, the best first
    - ``package``: Debian's packages with the first of them
    - ``emulator``: the program of qemu-user that runs its programs on another machine
    - ``libraries``: where Debian puts its C library on another machine
    - ``example``: a target that many of its machines can run
    """

    name: str
    uname: str
    elf: int
    triple: str
    baseline: frozenset[str]
    tuning: str
    vectors: tuple[tuple[int, str], ...]
    rounding: str
    c_flags: tuple[str, ...]
    compilers: tuple[str, ...]
    package: str
    emulator: str
    libraries: str
    example: str

    @property
    def here(self) -> bool:
        """True if this machine has the instruction set, so that it runs what is compiled."""
        return platform.machine() == self.uname

    def instruction_sets(self, names: Iterable[str]) -> frozenset[str]:
        """What remains of LLVM's list of a CPU's features beyond the baseline. A name that neither
        the baseline nor ``tuning`` knows counts as an instruction set.
        """
        return frozenset(
            n for n in names if n not in self.baseline and not re.fullmatch(self.tuning, n)
        )

    def vector_name(self, lanes: int) -> str:
        """The vector instructions whose vectors have so many float32."""
        return dict(self.vectors)[lanes]


X86_64 = Isa(
    name="x86-64",
    uname="x86_64",
    elf=62,
    triple="",
    baseline=frozenset("64bit 64bit-mode cmov cx8 fxsr mmx nopl sse sse2 x87".split()),
    tuning="(allow|false-deps|fast|faster|no-bypass-delay|prefer|slow|tuning)-.*"
    "|branchfusion|ermsb|fsrm|idivq-to-divl|macrofusion|sbb-dep-breaking|vzeroupper",
    vectors=((8, "AVX2"), (16, "AVX-512")),
    rounding="avx512bf16",
    c_flags=("-march=x86-64", "-mtune=generic"),
    compilers=("x86_64-linux-gnu-gcc",),
    package="gcc-x86-64-linux-gnu",
    emulator="qemu-x86_64",
    libraries="/usr/x86_64-linux-gnu",
    example="x86-64-v3",
)

# ``neon`` and ``fp-armv8`` are parts of what Linux demands of AArch64. The pattern has LLVM's names
# of CPUs beside those of habits; the features of supervisors (``el3``) generate no instructions.
AARCH64 = Isa(
    name="aarch64",
    uname="aarch64",
    elf=183,
    triple="aarch64-linux-gnu",
    baseline=frozenset("fp-armv8 neon v8a".split()),
    tuning="(addr|arith|avoid|alternate|cmp|disable|enable|fuse|max|no|predictable|store|use)-.*"
    "|(aggressive-fma|alu-lsl-fast|uaops|CONTEXTIDREL2|ete|trbe|el3|el2vmsa)"
    "|(zcm|zcz)-.*|a76|neoverse[nv]\\d|apple-a\\d+",
    vectors=((4, "NEON"),),
    rounding="bf16",
    c_flags=("-march=armv8-a", "-mno-outline-atomics"),
    compilers=("aarch64-linux-gnu-gcc",),
    package="gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    emulator="qemu-aarch64",
    libraries="/usr/aarch64-linux-gnu",
    example="aarch64",
)

ISAS = {isa.name: isa for isa in (X86_64, AARCH64)}
# Vectors of so many float32 are NEON's, whose multiply-add takes one element of a vector as one of
# its operands.
NEON_LANES = 4


def host() -> Isa | None:
    """The instruction set of this machine; None if gtco generates no code for it."""
    return next((isa for isa in ISAS.values() if isa.here), None)
