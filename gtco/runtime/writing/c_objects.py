"""The C runtime's objects. They are the same for every model, so they are compiled once and kept:
in this process, and as a file in the cache's folder, which the next processes read.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gtco.machine.isa import X86_64, Isa
from gtco.runtime.writing.cross import flags_for
from gtco.runtime.writing.table import CSRC
from gtco.support.cache_file import write_cache_file
from gtco.support.environment import cache_folder
from gtco.support.errors import BuildError
from gtco.support.toolchain import Compiling

# The kernels stand behind the first, and kernels_end.c behind what they call (csrc/restart.h).
CPU_SOURCES = (
    "kernels_begin.c memory.c kernels_end.c api.c cover.c cpu/check.c cpu/count.c cpu/features.c "
    "cpu/features_arm.c error.c metadata.c restart.c sizes.c tensors.c thread_pool.c variants.c "
    "weights.c"
).split()
COMPILE_FLAGS = "-std=gnu11 -O2 -fPIC -fvisibility=hidden -pthread".split()

_made: dict[tuple[str, ...], Mapping[str, bytes]] = {}  # objects, by compiler, flags and sources
_begun: dict[tuple[str, ...], tuple[Compiling, Path]] = {}


def write_objects(
    sources: Sequence[str], folder: Path, compiler: str, isa: Isa = X86_64
) -> list[str]:
    """Writes the objects to the folder and returns their names. Raises as
    :func:`gtco.support.toolchain.run_compiler` does.
    """
    key = _key(sources, compiler, isa)
    names = _names(sources)
    if not _is_made(key, sources) and (begun := _begun.pop(key, None)):
        with suppress(BuildError, OSError):  # what went wrong will again, and is said then
            begun[0].finish()
            _keep(key, {name: (begun[1] / name).read_bytes() for name in names})
    if key not in _made:
        _compile(sources, folder, compiler, isa).finish()
        _keep(key, {name: (folder / name).read_bytes() for name in names})
    for name, code in _made[key].items():
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
    if not _is_made(key, sources) and key not in _begun:
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


def _is_made(key: tuple[str, ...], sources: Sequence[str]) -> bool:
    """Whether the objects are in ``_made``, into which those of another process are read. A file
    that is damaged counts as not there.
    """
    if key not in _made:
        damaged = (zipfile.BadZipFile, EOFError, ValueError, LookupError, RuntimeError)
        with suppress(OSError, *damaged), zipfile.ZipFile(_file(key)) as kept:
            _made[key] = {name: kept.read(name) for name in _names(sources)}
    return key in _made


def _names(sources: Sequence[str]) -> list[str]:
    return [Path(source).with_suffix(".o").name for source in sources]


def _keep(key: tuple[str, ...], objects: Mapping[str, bytes]) -> None:
    """Also for other processes; where the file cannot be written, they compile the objects too."""
    _made[key] = objects
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, code in objects.items():
            file.writestr(name, code)
    with suppress(OSError):
        write_cache_file(_file(key), packed.getvalue())


def _file(key: tuple[str, ...]) -> Path:
    """The path is of everything that the objects depend on: another compiler at the same place and
    another text of a source have another. Raises OSError if there is no such compiler.
    """
    compiler = os.stat(key[0])
    digest = hashlib.sha256(repr((key, compiler.st_size, compiler.st_mtime_ns)).encode())
    for source in sorted(path for path in CSRC.rglob("*") if path.is_file()):
        digest.update(source.read_bytes())
    return cache_folder() / f"runtime-{digest.hexdigest()[:24]}.zip"


def _compile(sources: Sequence[str], folder: Path, compiler: str, isa: Isa) -> Compiling:
    files = [str(CSRC / source) for source in sources]
    flags = [*COMPILE_FLAGS, *flags_for(compiler, isa)]
    return Compiling([compiler, *flags, f"-I{CSRC}", "-c", *files], folder)
