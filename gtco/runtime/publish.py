"""The files of a compiled model, and how they come under their final names.

``NAME.so``; ``NAME.h``; and, where the weights do not fit in the library,
``NAME.so.weights-HEX``, with the first 16 hexadecimal digits of the weights' identity, which the
library knows (csrc/weights.c). So each library has a weights file of its own name: the new one
lies beside the old one until the library itself is renamed, in one step, and whatever interrupts
that leaves a library whose weights are there. Stale ones go afterwards.

So that a loss of power is no worse than a kill, every file is on the disk before it is renamed, and
the renames of the weights and the header before the library's.

Everything is made in a staging folder beside the target. It is locked while its process lives, so
the next compile to the same target knows, and removes, what a killed one left behind.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gtco.support.errors import BuildError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STAGING = "gtco"  # how the name of a staging folder ends


def weights_name(library: str, identity: bytes) -> str:
    """The name of a library's weights file; ``identity``: 32 bytes, in the library's note."""
    return f"{library}.weights-{identity[:8].hex()}"


def weights_beside(library: Path) -> list[Path]:
    """The weights files of this library, of earlier ones under its name too."""
    pattern = re.compile(re.escape(library.name) + r"\.weights(-[0-9a-f]{16})?")
    near = library.parent.glob(glob.escape(library.name) + ".weights*")
    return [path for path in near if pattern.fullmatch(path.name)]


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` for the files that :func:`publish` gives their final place;
    removed at the end, whatever happens.

    Raises :class:`BuildError` where it cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _make_folder(target.parent, f".{target.name}.")
    except OSError as error:
        raise write_error(target, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """A new folder for temporary files, in one called ``gtco-NAME-....gtco``; that is removed at
    the end, and where the end is a kill, by the next one that is made under this name.

    Raises :class:`BuildError` where it cannot be made.
    """
    try:
        folder, lock = _make_folder(Path(tempfile.gettempdir()), f"gtco-{name}-")
    except OSError as error:
        raise BuildError(
            f"there is no place for temporary files ({error}): set TMPDIR to a folder that can be "
            "written"
        ) from error
    try:
        inside = folder / "files"  # the lock is of the folder itself, and publishing takes one too
        inside.mkdir()
        yield inside
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def publish(folder: Path, target: Path) -> None:
    """Gives the files in ``folder``, which are named as beside ``target``, their final place.

    The library comes last, so whoever sees it finds the others, after a loss of power too. Raises
    :class:`BuildError`, and then the older library is as it was.
    """
    weights = [path.name for path in weights_beside(folder / target.name)]
    header = target.with_suffix(".h").name
    names = [*weights, *([header] if (folder / header).exists() else []), target.name]
    added = [name for name in weights if not target.with_name(name).exists()]
    try:
        with _one_at_a_time(target.parent):
            try:
                for name in names:
                    _flush(folder / name)
                for name in names:
                    if name == target.name:
                        _flush_folder(target.parent)
                    os.replace(folder / name, target.with_name(name))
            except BaseException:
                for name in added:
                    if not (folder / target.name).exists():
                        break  # the library has its place
                    with suppress(OSError):
                        target.with_name(name).unlink()
                raise
            with suppress(OSError):  # the library has its place, and older weights may still go
                _flush_folder(target.parent)
            for path in weights_beside(target):
                if path.name not in weights:
                    with suppress(OSError):
                        path.unlink()
    except OSError as error:
        raise write_error(target, error) from error


def _flush(path: Path) -> None:
    """Waits until the file's contents are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk, where its file system can tell."""
    try:
        _flush(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_error(target: Path, error: OSError, needed: int | None = None) -> BuildError:
    """What a failure to write ``target`` means; ``needed``: the bytes that it takes."""
    what = f"cannot write {target}: {error.strerror or error}"
    if error.errno not in DISK_FULL:
        return BuildError(f"{what}. Choose a place that can be written")
    free = f"{shutil.disk_usage(target.parent).free / 1e6:.0f} MB are free"
    size = (
        f"Writing it takes about {needed / 1e6:.0f} MB in {target.parent}, where {free}"
        if needed is not None
        else f"In {target.parent} {free}"
    )
    return BuildError(f"{what}. {size}; make room or choose another place")


def _make_folder(place: Path, prefix: str) -> tuple[Path, int]:
    """A new folder in ``place``, and the descriptor that holds its lock; those with the same prefix
    whose process has ended are removed.
    """
    _remove_leftovers(place, prefix)
    while True:
        made = tempfile.mkdtemp(f".{_STAGING}", prefix, place)
        with suppress(FileNotFoundError):
            lock = _lock(Path(made), wait=True)
            if Path(made).exists():
                return Path(made), lock
            os.close(lock)
        # another process took it for a leftover before it was locked


def _remove_leftovers(place: Path, prefix: str) -> None:
    """Folders of this prefix whose process has ended without removing them."""
    pattern = re.compile(rf"{re.escape(prefix)}[a-z0-9_]{{8}}\.{_STAGING}")
    for path in place.iterdir():
        if not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        with suppress(OSError):  # locked: another compile is at work; or not ours
            lock = _lock(path, wait=False)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Two compiles to one target must not take each other's weights for stale ones."""
    lock = _lock(folder, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, wait: bool) -> int:
    """The descriptor of a folder, locked until it is closed or the process ends. Where the file
    system has no locks: unlocked with ``wait``, ``OSError`` without."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if not wait:
            os.close(descriptor)
            raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
