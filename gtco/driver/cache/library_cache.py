"""Compiled libraries that are kept. Each has a folder, whose name is its key
(:mod:`gtco.driver.cache.key`), with its files and ``entry.json``: their digests, the report and its
digest.

A folder gets its name in one step, when it is complete, so several processes may use the cache at
once. Whatever is missing or damaged counts as not there. The folder's time says when the library
was used last; the oldest ones are removed when the cache has more bytes than it may.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gtco.runtime.publish import staging
from gtco.support.errors import BuildError

ENTRY = "entry.json"
CHUNK = 1 << 22
_KEY = re.compile("[0-9a-f]{32}")  # as gtco.driver.cache.key makes them


@dataclass(frozen=True)
class LibraryCache:
    """The libraries in ``folder``, which take at most ``limit`` bytes."""

    folder: Path
    limit: int

    def fetch(self, key: str, place: Path) -> dict[str, Any] | None:
        """Copies the files of the library into the folder ``place`` and returns what ``entry.json``
        says. None if the cache does not have it, or if it is damaged; then nothing is in ``place``.
        """
        entry = self.folder / key
        copied: list[Path] = []
        try:
            known: dict[str, Any] = json.loads((entry / ENTRY).read_text())
            _ = known["made"]
            if _digest(known["report"]) != known["digest"]:
                raise ValueError(ENTRY)
            for name, digest in known["files"].items():
                if Path(name).name != name:
                    raise ValueError(name)
                copied.append(place / name)
                if _copy(entry / name, place / name) != digest:
                    raise ValueError(name)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            for path in copied:
                path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(entry)
        return known

    def keep(self, key: str, library: Path, report: dict[str, Any]) -> str:
        """Keeps the library and the files beside it under the key. Gives what went wrong, or ""."""
        files = sorted(path for path in library.parent.iterdir() if path.is_file())
        needed = sum(path.stat().st_size for path in files)
        if needed > self.limit:
            return ""
        try:
            with staging(self.folder / "library") as made:
                digests = {path.name: _copy(path, made / path.name) for path in files}
                known = {
                    "made": datetime.now(UTC).isoformat(timespec="seconds"),
                    "files": digests,
                    "report": report,
                    "digest": _digest(report),
                }
                (made / ENTRY).write_text(json.dumps(known))
                final = self.folder / key
                _place(made, final)
            self._remove_oldest(self.limit, key)
        except (OSError, BuildError) as error:
            why = error.__cause__ or error  # the system's reason alone, if staging failed
            return (
                f"the library is not kept in the cache {self.folder}: "
                f"{getattr(why, 'strerror', None) or why}. Make room there or set GTCO_CACHE to a "
                "folder that can be written"
            )
        return ""

    def sizes(self) -> dict[Path, int]:
        """Bytes of each library that is kept, by its folder. Raises OSError if the cache's folder
        cannot be read.
        """
        found = {}
        for path in self._entries():
            with suppress(OSError):  # another process removes it
                if (path / ENTRY).is_file():
                    found[path] = sum(file.stat().st_size for file in path.iterdir())
        return found

    def _entries(self) -> list[Path]:
        """The folders that are named by a key. The others are not the cache's: its folder may be
        one that was there before.
        """
        return [path for path in self.folder.iterdir() if _KEY.fullmatch(path.name)]

    def _remove_oldest(self, limit: int, newest: str) -> None:
        """Removes libraries until the rest has at most ``limit`` bytes. Those of another user stay,
        and what a killed process has begun to remove goes.
        """
        for path in self._entries():
            with suppress(OSError):
                if path.is_dir() and not (path / ENTRY).exists():
                    shutil.rmtree(path, ignore_errors=True)
        entries = []
        for path, size in self.sizes().items():
            with suppress(OSError):
                entries.append((path.name == newest, path.stat().st_mtime_ns, size, path))
        total = sum(size for _, _, size, _ in entries)
        for is_newest, _, size, path in sorted(entries):
            if total <= limit or is_newest:
                break
            try:
                (path / ENTRY).unlink(missing_ok=True)  # from here on it is not there
            except OSError:  # another user's
                continue
            shutil.rmtree(path, ignore_errors=True)
            total -= size

    @contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """A context that one process is in at a time for each key, so that a library which several
        processes want is compiled once. The lock ends with its process. Where the file system has
        no locks, they do not wait for each other.
        """
        path = self.folder / f"{key}.lock"
        lock = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while lock is None:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_at(lock, path):  # who had it before has removed the file
                    os.close(lock)
                    lock = None
        except OSError:
            pass
        try:
            yield
        finally:
            if lock is not None:
                if _is_at(lock, path):
                    with suppress(OSError):
                        path.unlink()
                os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if the open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _place(folder: Path, final: Path) -> None:
    """Gives the files of a staging folder their final folder in one step. What has the name already
    (it is damaged, or another process was quicker) goes into the staging folder, which is removed
    afterwards.
    """
    files, inner, old = list(folder.iterdir()), folder / "complete", folder / "old"
    inner.mkdir()
    for path in files:
        path.rename(inner / path.name)
    with suppress(FileNotFoundError):
        final.rename(old)
    try:
        inner.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # again somebody was quicker
            raise


def _digest(report: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(report).encode()).hexdigest()


def _copy(source: Path, target: Path) -> str:
    """Copies a file and returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(CHUNK):
            digest.update(chunk)
            writer.write(chunk)
    shutil.copymode(source, target)
    return digest.hexdigest()
