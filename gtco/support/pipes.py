"""Handles standard streams that are not there: a pipe whose reader has left, as ``| head`` does
(the output ends there, and nothing failed), files on a full disk, and streams that were closed
before the process started, as some services do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def until_closed(command: Callable[[], int]) -> int:
    """The result of ``command``, with its output written to the end. 0 if nobody reads any more; 1,
    with the reason on standard error, if it cannot be written.
    """
    _replace_closed_streams()
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


def _drop_output() -> None:
    """Drops what is left in the buffer: Python would complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
