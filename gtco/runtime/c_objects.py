"""The C runtime's objects. They are the same for every model, so a process compiles them once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gtco.machine.isa import X86_64, Isa
from gtco.runtime.cross import flags_for
from gtco.runtime.table import CSRC
from gtco.support.errors import BuildError
from gtco.support.toolchain import Compiling

# The kernels stand behind the first, and kernels_end.c behind what they call (csrc/restart.h).
CPU_SOURCES = (
    "kernels_begin.c memory.c kernels_end.c api.c cover.c cpu_check.c cpu_count.c cpu_features.c "
    "cpu_features_arm.c error.c restart.c tensors.c thread_pool.c variants.c weights.c"
).split()
COMPILE_FLAGS = "-std=gnu11 -O2 -fPIC -fvisibility=hidden -pthread".split()

_made: dict[tuple[str, ...], list[bytes]] = {}  # by compiler, flags and sources
_begun: dict[tuple[str, ...], tuple[Compiling, Path]] = {}


def write_objects(
    sources: Sequence[str], folder: Path, compiler: str, isa: Isa = X86_64
) -> list[str]:
    """Writes the objects to the folder and returns their names. Raises as
    :func:`gtco.support.toolchain.run_compiler` does.
    """
    key = _key(sources, compiler, isa)
    names = [Path(source).with_suffix(".o").name for source in sources]
    if key not in _made and (begun := _begun.pop(key, None)):
        with suppress(BuildError, OSError):  # what went wrong will again, and is said then
            begun[0].finish()
            _made[key] = [(begun[1] / name).read_bytes() for name in names]
    if key not in _made:
        _compile(sources, folder, compiler, isa).finish()
        _made[key] = [(folder / name).read_bytes() for name in names]
    for name, code in zip(names, _made[key], strict=True):
        (folder / name).write_bytes(code)
    return names


@contextmanager
def made_early(
    sources: Sequence[str], folder: Path, compiler: str, isa: Isa = X86_64
) -> Iterator[None]:
    """A context in which the C compiler makes the objects, in a new folder inside ``folder``, while
    the caller does something else. The compiler does not outlive the context.
    """
    key = _key(sources, compiler, isa)
    mine: tuple[Compiling, Path] | None = None
    if key not in _made and key not in _begun:
        place = folder / "runtime"
        with suppress(OSError):
            place.mkdir()
            mine = _begun[key] = _compile(sources, place, compiler, isa), place
    try:
        yield
    finally:
        if mine is not None:
            if _begun.get(key) is mine:
                del _begun[key]
            mine[0].stop()


def _key(sources: Sequence[str], compiler: str, isa: Isa) -> tuple[str, ...]:
    flags = (*COMPILE_FLAGS, *flags_for(compiler, isa))
    return (shutil.which(compiler) or compiler, *flags, str(CSRC), *sources)


def _compile(sources: Sequence[str], folder: Path, compiler: str, isa: Isa) -> Compiling:
    files = [str(CSRC / source) for source in sources]
    flags = [*COMPILE_FLAGS, *flags_for(compiler, isa)]
    return Compiling([compiler, *flags, f"-I{CSRC}", "-c", *files], folder)
