"""Which instruction sets an object file needs. objdump disassembles it, and gas assembles it again,
with the order to refuse every instruction outside a list. Both are part of binutils, without which
gcc does not link.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

# gas uses LLVM's names, except for these.
GAS_NAMES = {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
}
LINE = re.compile(r"^ +[0-9a-f]+:\t(.+)$", re.MULTILINE)
PADDING = re.compile(r"(data16 |cs )*(nop[wl]?|xchg +%ax,%ax)\b")
BRANCH = re.compile(r"^((?:notrack )?(?:j\w+|call)\s+)[0-9a-f]+$")


def instructions(code: bytes) -> set[str]:
    """The different instructions of an ELF object, in AT&T's notation, without the targets of
    branches.
    """
    text = _said("objdump -d -w --no-show-raw-insn", code)
    found = {re.sub(r"\s*(#|<).*", "", line).strip() for line in LINE.findall(text)}
    return {BRANCH.sub(r"\1.", line) for line in found if not PADDING.match(line)}


def undefined(code: bytes) -> set[str]:
    """The names that an ELF object takes from elsewhere."""
    return {*_said("nm --undefined-only -j", code).split()}


def _said(command: str, code: bytes) -> str:
    """What a command of binutils prints of an ELF object."""
    with tempfile.TemporaryDirectory(prefix="gtco-test-") as folder:
        path = Path(folder) / "code.o"
        path.write_bytes(code)
        run = [*command.split(), str(path)]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def outside(lines: Iterable[str], features: Iterable[str]) -> list[str]:
    """Those of the instructions that a CPU with plain x86-64 and these ``features`` (LLVM's names)
    may lack, with gas's reason.
    """
    ordered = sorted(lines)
    march = "+".join(["generic64", *(GAS_NAMES.get(f, f) for f in features)])
    result = subprocess.run(
        ["as", "--64", f"-march={march}", "-o", "/dev/null", "-"],
        input="".join(f"{line}\n" for line in ordered),
        capture_output=True,
        text=True,
        check=False,
    )
    errors = re.findall(r":(\d+): Error: (.*)", result.stderr)
    assert errors or result.returncode == 0, result.stderr
    return [f"{ordered[int(number) - 1]}: {reason}" for number, reason in errors]
