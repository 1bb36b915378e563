"""The runtime's declarations of the NVIDIA driver's interface against NVIDIA's own ``cuda.h``. A
build of a library needs none of their headers, and the fake driver would share our mistakes.
"""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest

from gtco import runtime

RUNTIME = Path(runtime.__file__).parent / "csrc"
DECLARED = RUNTIME / "cuda/driver.h"
CONSTANTS = re.findall(r"^  (CU\w+) = \d+,$", DECLARED.read_text(), re.MULTILINE)


def compiles(folder: Path) -> str:
    """The compiler's message about ``folder``'s cuda/driver.h; empty if the header is right."""
    [header] = [f for f in files("nvidia-cuda-runtime") or () if f.name == "cuda.h"]
    include = Path(str(header.locate())).parent
    every = f"-DGTCO_CONSTANTS(C)={' '.join(f'C({name})' for name in CONSTANTS)}"
    source = Path(__file__).with_name("driver_header.cpp")
    command = ["g++", "-std=c++17", "-fsyntax-only", every, f"-I{include}", f"-I{folder}"]
    done = subprocess.run(
        [*command, f"-I{RUNTIME}", str(source)], capture_output=True, text=True, check=False
    )
    return done.stderr


def test_declarations_are_nvidias() -> None:
    assert len(CONSTANTS) > 20
    assert compiles(RUNTIME) == ""


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("cuEventElapsedTime, (float* milli", "cuEventElapsedTime, (double* milli", "ElapsedTime"),
        ("cuMemAlloc_v2", "cuMemAlloc", "cuMemAlloc"),
        ("(CUdeviceptr pointer)", "(CUdeviceptr * pointer)", "cuMemFree_v2"),
        ("CUmodule module, const char* name", "CUfunction module, const char* name", "GetFunction"),
        ("cuInit, (unsigned flags)", "cuInit, (unsigned flags, int device)", "cuInit"),
        ("unsigned grid[3], block[3];", "unsigned grid[3], block[2];", "size"),
        ("COUNT = 16,", "COUNT = 17,", "MULTIPROCESSOR_COUNT"),
    ],
)
def test_a_wrong_declaration_is_seen(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = DECLARED.read_text()
    assert text.count(old) == 1
    changed = tmp_path / DECLARED.relative_to(RUNTIME)
    changed.parent.mkdir()
    changed.write_text(text.replace(old, new))
    assert re.search(rf"error: static assertion failed: \w*{said}", compiles(tmp_path))
