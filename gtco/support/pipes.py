"""Handles standard streams that are not there: a pipe whose reader has left, as ``| head`` does
(the output ends there, and nothing failed), files on a full disk, and streams that were closed
before the process started, as some services do. Standard error has progress and reasons alone, so
the work goes on without it, and its exit code is what it would have been.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

_STREAMS = {"/dev/stdout": "stdout", "/dev/fd/1": "stdout", "/proc/self/fd/1": "stdout"}
_STREAMS |= {path.replace("1", "2").replace("out", "err"): "stderr" for path in _STREAMS}


def until_closed(command: Callable[[], int]) -> int:
    """The result of ``command``, with its output written to the end. 0 if nobody reads any more; 1,
    with the reason on standard error, if it cannot be written.
    """
    _replace_closed_streams()
    _forgive_standard_error()
    try:
        try:
            return command()
        finally:  # also where it ends by SystemExit, as --help does
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None or "--debug" in sys.argv:
            raise  # an error with a name is of a file that the command opens
        _drop_output()
        print(f"error: the output cannot be written: {error}", file=sys.stderr)
        return 1


def standard_stream(path: Path) -> BinaryIO | None:
    """The stream that a path such as ``/dev/stdout`` names, which may be a file, a pipe or a
    device; None for other paths. It has written all that the process printed before.
    """
    name = _STREAMS.get(str(path))
    if name is None:
        return None
    stream = getattr(sys, name)
    stream.flush()
    return cast(BinaryIO, stream.buffer)


def _drop_output() -> None:
    """Drops what is left in the buffer: Python would complain about it at its end."""
    _to_nowhere(sys.stdout.fileno())


def _to_nowhere(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


class _Forgiving(io.FileIO):
    """A file that takes nothing any more once a write has failed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            _to_nowhere(self.fileno())
            return len(memoryview(data).cast("B"))


def _forgive_standard_error() -> None:
    """Standard error drops what cannot be written. A test's own stream stays."""
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        raw = _Forgiving(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(raw), sys.stderr.encoding, sys.stderr.errors, line_buffering=True
        )


def _replace_closed_streams() -> None:
    """Opens the null device as each standard stream that is closed. Otherwise the next file that is
    opened gets its number, and what a child process prints would go into that file. Python has None
    as such a stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
