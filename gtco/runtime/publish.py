"""The files of a compiled model, and how they get their final names.

The files are ``NAME.so``, ``NAME.h`` and, if the weights do not fit in the library,
``NAME.so.weights-HEX``. HEX is the first 16 hexadecimal digits of the weights' identity, which the
library knows (csrc/weights.c). So each library has a weights file with a name of its own. The new
weights file lies beside the old one until the library itself is renamed, in one step; an
interruption at any moment leaves a library whose weights are there. Old weights files are removed
afterwards.

A loss of power does no more harm than a kill: every file is on the disk before it is renamed, and
the weights and the header are renamed, on the disk, before the library is.

All files are made in a staging folder beside the target. The folder is locked while its process
lives, so the next compile to the same target recognises and removes what a killed one left behind.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gtco.runtime.elf import read_contents
from gtco.support.errors import BuildError
from gtco.support.options import check_place
from gtco.support.pipes import standard_stream

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
LARGE, PIECE = 4 << 20, 16 << 20  # bytes of a file, and of its pieces: whole pages of 2 MB
LOCKED_SECONDS = 60.0  # that a compile waits for others who publish in its folder
_STAGING = "gtco"  # how the name of a staging folder ends


def weights_name(library: str, identity: bytes) -> str:
    """The name of a library's weights file. ``identity``: 32 bytes, from the library's note."""
    return f"{library}.weights-{identity[:8].hex()}"


def weights_beside(library: Path) -> list[Path]:
    """The weights files of this library and of earlier libraries with its name."""
    pattern = re.compile(re.escape(library.name) + r"\.weights(-[0-9a-f]{16})?")
    near = library.parent.glob(glob.escape(library.name) + ".weights*")
    return [path for path in near if pattern.fullmatch(path.name)]


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` for the files that :func:`publish` moves to their final place.
    It is always removed at the end.

    Raises :class:`BuildError` if the folder cannot be made.
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


class TemporaryFolder:
    """A new folder for temporary files, ``path``, inside a folder called ``gtco-NAME-....gtco``.
    :meth:`remove` removes both. If the process ends without it, as by SIGTERM, the next folder of
    the same name does.

    Raises :class:`BuildError` if the folder cannot be made.
    """

    def __init__(self, name: str) -> None:
        try:
            self._outer, lock = _make_folder(Path(tempfile.gettempdir()), f"gtco-{name}-")
            self._lock: int | None = lock
            self.path = self._outer / "files"  # publishing takes the lock of the folder it goes to
            self.path.mkdir()
        except OSError as error:
            raise BuildError(
                f"there is no place for temporary files ({error}): set TMPDIR to a folder that can "
                "be written"
            ) from error

    def remove(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self._outer, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """A :class:`TemporaryFolder` that is removed at the end of the block."""
    with kept(name) as folder:
        yield folder.path
        folder.remove()


@contextmanager
def kept(name: str) -> Iterator[TemporaryFolder]:
    """A :class:`TemporaryFolder` that is removed only if the block fails; otherwise a model that
    the block opened owns it.
    """
    folder = TemporaryFolder(name)
    try:
        yield folder
    except BaseException:
        folder.remove()
        raise


def publish(folder: Path, target: Path) -> None:
    """Moves the files in ``folder``, which already have the names they get beside ``target``, to
    their final place.

    The library comes last, so whoever sees it finds the other files, even after a loss of power.
    Raises :class:`BuildError`; the older library and its header are then unchanged.
    """
    weights = [path.name for path in weights_beside(folder / target.name)]
    header = target.with_suffix(".h").name
    names = [*weights, *([header] if (folder / header).exists() else []), target.name]
    added = [name for name in names[:-1] if not target.with_name(name).exists()]
    older_header = folder / "older"  # no file of a library ends so
    try:
        for name in names:
            _in_large_pages(folder / name)
        with _one_at_a_time(target.parent):
            try:
                for name in names:
                    _flush(folder / name)
                if header in names and header not in added:
                    shutil.copy2(target.with_name(header), older_header)
                for name in names:
                    if name == target.name:
                        _flush_folder(target.parent)
                    os.replace(folder / name, target.with_name(name))
            except BaseException:
                if (folder / target.name).exists():  # the library has not got its place
                    if older_header.exists():
                        with suppress(OSError):
                            os.replace(older_header, target.with_name(header))
                    for name in added:
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


def copy_published(library: Path, target: Path) -> None:
    """Copies a library, its header and its weights file, as far as it has them, to other names.

    Raises :class:`BuildError`; what was there before is then unchanged.
    """
    with staging(target) as folder:
        try:
            shutil.copy(library, folder / target.name)
            identity = read_contents(folder / target.name).id
            for source, copy in (
                (library.with_suffix(".h").name, target.with_suffix(".h").name),
                (weights_name(library.name, identity), weights_name(target.name, identity)),
            ):
                if library.with_name(source).exists():
                    shutil.copy(library.with_name(source), folder / copy)
        except OSError as error:
            raise write_error(target, error) from error
        publish(folder, target)


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file beside its place, and renames it when it is whole: what was there before stays
    until then. A pipe, a device or a standard stream (``/dev/stdout``) is written to. Raises
    :class:`~gtco.support.errors.OptionError` and :class:`BuildError`.
    """
    check_place(path)
    try:
        if (stream := standard_stream(path)) is not None:
            stream.write(content)
            stream.flush()
            return path
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return path
        with staging(target := path.resolve()) as folder:  # a link stays, and its file is replaced
            made = folder / target.name
            made.write_bytes(content)
            _flush(made)
            os.replace(made, target)
    except OSError as error:
        raise write_error(path, error, len(content)) from error
    return path


def _in_large_pages(path: Path) -> None:
    """Writes a large file again, in large pieces; the file stays as it is if that fails, as where
    there is no room for two.

    Linux keeps a file in memory in pages as large as its writes, and maps those of 2 MB in one
    piece, if the file system can do that (ext4 since Linux 6.16, XFS). Then reading weights costs
    fewer misses of the TLB: ViT-B in bf16 takes 0.89 of the time on a Granite Rapids. A linker
    writes in small pieces.
    """
    if path.stat().st_size < LARGE:
        return
    copy = path.with_name("copy")  # no file of a library is called so
    try:
        with path.open("rb") as reader, copy.open("wb") as writer:
            while piece := reader.read(PIECE):
                writer.write(piece)
        shutil.copymode(path, copy)
        os.replace(copy, path)
    except OSError:
        copy.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Waits until the file's contents are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk, if its file system supports this."""
    try:
        _flush(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def write_error(target: Path, error: OSError, needed: int | None = None) -> BuildError:
    """The error for a failure to write ``target``. ``needed``: the number of bytes to write."""
    what = f"cannot write {target}: {error.strerror or error}"
    if error.errno == errno.EFBIG:
        return BuildError(
            f"{what}. The file system or a limit of this process (ulimit -f) allows no file of its "
            "size: raise the limit or choose another place"
        )
    if error.errno not in DISK_FULL:
        return BuildError(f"{what}. Choose a place that can be written")
    free = f"{_megabytes(shutil.disk_usage(target.parent).free)} are free"
    size = (
        f"Writing it takes about {_megabytes(needed)} in {target.parent}, where {free}"
        if needed is not None
        else f"In {target.parent} {free}"
    )
    return BuildError(f"{what}. {size}; make room or choose another place")


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.{0 if nbytes >= 1e7 else 2}f} MB"


def _make_folder(place: Path, prefix: str) -> tuple[Path, int]:
    """A new folder in ``place``, and the descriptor that holds its lock. Removes folders with the
    same prefix whose process has ended.
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
    """Removes folders with this prefix whose process ended without removing them."""
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
    """Lets one compile to a target publish at a time: another one would take its weights for old
    ones. Raises :class:`BuildError` if somebody holds the folder's lock for long, as ``flock .
    gtco compile`` does.
    """
    begun = time.monotonic()
    while True:
        try:
            lock = _lock(folder, wait=False)
            break
        except BlockingIOError:
            if time.monotonic() - begun > LOCKED_SECONDS:
                raise BuildError(
                    f"another process has held the lock (flock) of the folder {folder} for "
                    f"{LOCKED_SECONDS:.0f} s: end it, or write to another folder"
                ) from None
            time.sleep(0.01)
        except OSError:
            lock = _lock(folder, wait=True)
            break
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, wait: bool) -> int:
    """The descriptor of a folder, locked until it is closed or the process ends. If the file system
    has no locks, the folder stays unlocked with ``wait``, and ``OSError`` is raised without it.
    """
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
