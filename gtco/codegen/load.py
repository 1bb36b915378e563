"""Kernels as functions of this process, to be timed or tested."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtco.codegen import tiles
from gtco.codegen.llvm import object_code
from gtco.machine.target import TILES, Target
from gtco.machine.tiles import allowed
from gtco.support.errors import BuildError
from gtco.support.options import c_compiler
from gtco.support.toolchain import run_compiler


def load(functions: Sequence[Any], target: Target) -> ctypes.CDLL:
    """The kernels compiled, linked and opened: attributes by their symbols. No file stays.

    Raises :class:`BuildError` where the C compiler is missing or fails, or a file cannot be
    written, or if the system refuses the tiles in which a kernel multiplies.
    """
    if TILES[0] not in target.emulated and any(map(tiles.used, functions)) and not allowed():
        raise BuildError("the system refuses the tiles (AMX) in which kernels multiply")
    with tempfile.TemporaryDirectory(prefix="gtco-kernels-") as name:
        folder = Path(name)
        command = [c_compiler(), "-shared", "-o", "kernels.so", "kernels.o", "-lm"]
        try:
            (folder / "kernels.o").write_bytes(object_code(functions, target))
            run_compiler(command, folder)
            return ctypes.CDLL(str(folder / "kernels.so"))
        except OSError as error:
            raise BuildError(f"cannot link kernels in {folder}: {error}") from error
