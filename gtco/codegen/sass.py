"""Reads the machine code of kernels without a GPU: registers, memory and instructions.

It uses cuobjdump and nvdisasm, which pip has (``nvidia-cuda-cuobjdump``, ``nvidia-cuda-nvdisasm``);
those of a CUDA toolkit work too.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gtco.support.errors import BuildError

PACKAGES = {
    "cuobjdump": "nvidia-cuda-cuobjdump",
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "ptxas": "nvidia-cuda-nvcc",
    "compute-sanitizer": "nvidia-cuda-sanitizer-api",
}
_USED = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_KERNEL = re.compile(r"^\.text\.(\S+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class MachineCode:
    """One kernel of an image.

    ``registers`` of a thread; ``stack`` and ``local`` bytes of a thread beside them, in memory;
    ``shared`` static shared memory of a block in bytes, with the KiB of it that a Hopper's system
    keeps; ``instructions``: how often each stands in the code, by its whole name
    ("HMMA.16816.F32").
    """

    registers: int
    stack: int
    local: int
    shared: int
    instructions: Mapping[str, int]

    def count(self, *stems: str) -> int:
        """Instructions whose name begins with one of these: ("HMMA", "HGMMA") of Tensor Cores."""
        return sum(n for name, n in self.instructions.items() if name.split(".")[0] in stems)

    @property
    def tensor_core(self) -> int:
        """Products of Tensor Cores: HMMA of a warp, HGMMA of four."""
        return self.count("HMMA", "HGMMA")

    @property
    def spilled(self) -> int:
        """Loads and stores of a thread's own memory: what registers were too few for, and arrays
        with an index that is not known.
        """
        return self.count("STL", "LDL")


def machine_code(cubin: bytes) -> dict[str, MachineCode]:
    """The kernels of an image by symbol. Raises :class:`BuildError` where a tool is missing, and
    where it cannot read the image.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = _run("cuobjdump", "-res-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    instructions: dict[str, Counter[str]] = {}
    of: Counter[str] = Counter()
    for line in listing.splitlines():
        if found := _KERNEL.match(line):
            of = instructions.setdefault(found.group(1), Counter())
        elif found := _INSTRUCTION.match(line):
            of[found.group(1)] += 1
    codes = {}
    for symbol, *numbers in _USED.findall(used):
        registers, stack, shared, local = map(int, numbers)
        codes[symbol] = MachineCode(registers, stack, local, shared, dict(instructions[symbol]))
    return codes


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{name} cannot read the image: {done.stderr.strip()[:300]}")
    return done.stdout


def tool(name: str) -> str:
    """The path of a tool of CUDA 13's packages, or of one on the path."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        if (path := Path(folder, "cu13", "bin", name)).is_file():
            return str(path)
    if on_path := shutil.which(name):
        return on_path
    raise BuildError(f"this needs {name} of CUDA: pip install {PACKAGES[name]}")
