"""Kernels as functions of this process, to be timed or tested."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from gtco.codegen import tiles
from gtco.codegen.llvm import object_code
from gtco.machine.target import TILES, Target
from gtco.machine.tiles import allowed
from gtco.support.environment import c_compiler
from gtco.support.errors import BuildError
from gtco.support.toolchain import linker_of, run_compiler


@cache
def _open_libm() -> None:
    """Opens libm for all libraries of this process."""
    with suppress(OSError):  # musl has it in libc
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)


def load(functions: Sequence[Any], target: Target) -> ctypes.CDLL:
    """The kernels compiled, linked and opened: attributes by their symbols. No file stays.

    Raises :class:`BuildError` where the C compiler is missing or fails, or a file cannot be
    written, or if the system refuses the tiles in which a kernel multiplies.
    """
    if not target.here:
        raise BuildError(
            f"kernels for {target.isa.name} cannot be run on this machine; only where they are to "
            "run can they be timed"
        )
    if TILES[0] not in target.emulated and any(map(tiles.used, functions)) and not allowed():
        raise BuildError("the system refuses the tiles (AMX) in which kernels multiply")
    with tempfile.TemporaryDirectory(prefix="gtco-kernels-") as name:
        folder = Path(name)
        try:
            _open_libm()
            (folder / "kernels.o").write_bytes(object_code(functions, target))
            return _linked_and_opened(folder, c_compiler())
        except OSError as error:
            raise BuildError(f"cannot link kernels in {folder}: {error}") from error


def _linked_and_opened(folder: Path, compiler: str) -> ctypes.CDLL:
    """Links the object in ``folder``. The linker alone is quick. What some kernels call is in the
    compiler's own library, so where the result cannot be opened, the compiler links.
    """
    if linker := linker_of(compiler):
        command = [linker, "-shared", "-o", "kernels.so", "kernels.o"]
        with suppress(BuildError, OSError):
            run_compiler(command, folder)
            return ctypes.CDLL(str(folder / "kernels.so"))
    # Without the libraries of a program, linking takes half the time. This process has libc and
    # libm, and kernels find what they call there.
    command = [compiler, "-shared", "-nostdlib", "-o", "linked.so", "kernels.o", "-lgcc"]
    run_compiler(command, folder)
    return ctypes.CDLL(str(folder / "linked.so"))
