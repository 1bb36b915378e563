"""The C compiler for an instruction set, and the emulator that runs its libraries elsewhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gtco.machine.isa import Isa
from gtco.support.environment import c_compiler, named_compiler
from gtco.support.errors import BuildError
from gtco.support.toolchain import compiles_for


def compiler_for(isa: Isa) -> str:
    """Path of a C compiler that makes code of ``isa``: that of ``CC`` if it does, or the host's, or
    a cross compiler on PATH. Raises :class:`BuildError` that names the package to install.
    """
    if isa.here:
        return c_compiler()
    given = named_compiler()
    path = c_compiler() if given else ""
    if path and _makes(path, isa):
        return path
    for name in (*isa.compilers, "clang"):
        found = shutil.which(name)
        if found and _makes(found, isa):
            return found
    said = f"{given!r} compiles for {compiles_for(path)}" if path else "no cross compiler is found"
    raise BuildError(
        f"{said}, and gtco links a library for {isa.name} with a C compiler for it. Install one "
        f"(Debian, Ubuntu: apt install {isa.package}; Fedora: dnf install "
        f"{isa.package.split()[0]} and a sysroot), or set CC to its path"
    )


def _makes(compiler: str, isa: Isa) -> bool:
    """True if the compiler makes code of ``isa``: as it is, or clang with that target, if a C
    library for it is there.
    """
    if compiles_for(compiler).startswith(isa.uname):
        return True
    return _is_clang(compiler) and Path(isa.libraries).is_dir()


def _is_clang(compiler: str) -> bool:
    return "clang" in Path(compiler).name


def flags_for(compiler: str, isa: Isa) -> tuple[str, ...]:
    """The flags with which the compiler makes code that every CPU with ``isa`` runs."""
    if _is_clang(compiler) and not isa.here:
        return (f"--target={isa.triple}", *isa.c_flags)
    return isa.c_flags


def emulator_of(isa: Isa) -> str | None:
    """Path of the program that runs programs of ``isa`` here; None without one, or without the C
    library that they need.
    """
    path = shutil.which(isa.emulator)
    return path if path and os.path.isdir(isa.libraries) else None
