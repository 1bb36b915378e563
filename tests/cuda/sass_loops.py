"""Parts of a kernel's machine code, by instruction: its longest loop, and its beginning."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter

from gtco.codegen.sass import tool

LABEL = re.compile(r"^(\.L\S+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)(.*)")
WAIT = "ACQBULK"  # griddepcontrol.wait
# instructions that read or write global memory
GLOBAL = ("LDG", "LDGSTS", "LD", "STG", "ST", "ATOMG", "ATOM", "REDG", "RED", "CCTL")
BRANCH = re.compile(r"\((\.L\S+?)\)")


def listing(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("nvdisasm"), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def ahead_of_wait(cubin: bytes) -> Counter[str]:
    """How often each instruction that touches global memory stands ahead of the wait for the kernel
    before.
    """
    lines = map(INSTRUCTION.match, listing(cubin).splitlines())
    names = [found.group(1) for found in lines if found]
    assert WAIT in names, "the kernel waits for no other one"
    return Counter(name for name in names[: names.index(WAIT)] if name in GLOBAL)


def longest_loop(cubin: bytes) -> Counter[str]:
    """How often each instruction ("HMMA") stands between a label and the last branch back to it,
    of the label for which these are the most. Parts that a branch passes over count too.
    """
    labels: dict[str, int] = {}
    names: list[str] = []
    longest: list[str] = []
    for line in listing(cubin).splitlines():
        if found := LABEL.match(line):
            labels[found.group(1)] = len(names)
        elif found := INSTRUCTION.match(line):
            names.append(found.group(1))
            back = BRANCH.search(found.group(2)) if names[-1] == "BRA" else None
            if back and back.group(1) in labels:
                longest = max(longest, names[labels[back.group(1)] :], key=len)
    assert longest, "the kernel has no loop"
    return Counter(longest)
