"""The innermost loops of kernels, as LLVM's text of x86-64 machine code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gtco.codegen.llvm import compile_functions
from gtco.machine.target import Target

# a label, and the code behind it up to a jump back to it with no label in between
LOOP = re.compile(r"^(\.LBB\w+):[^\n]*\n((?:(?!\.LBB\w+:).*\n)*?\s+j\w+\s+\1\n)", re.MULTILINE)
STORED = re.compile(r"vmov\w+\s+%[yz]mm\d+, -?\d*\(%r[sb]p")


def product_loops(
    functions: Sequence[Any], target: Target, instruction: str = "vfmadd", least: int = 16
) -> list[str]:
    """The loops of these kernels with at least so many of an instruction."""
    text = compile_functions(functions, target).inspect_source("asm")
    return [body for _, body in LOOP.findall(text) if body.count(instruction) >= least]


def keeps_sums(body: str) -> bool:
    """True if a loop stores no vector to the stack."""
    return STORED.search(body) is None
