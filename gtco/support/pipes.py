"""Handles a pipe whose reader has left, as ``| head`` does: the output ends there, and nothing
failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def until_closed(command: Callable[[], int]) -> int:
    """The result of ``command``, with its output written to the end; 0 if nobody reads any more."""
    try:
        try:
            return command()
        finally:  # also where it ends by SystemExit, as --help does
            sys.stdout.flush()
    except BrokenPipeError:
        # drops the rest of the buffer: Python would complain about it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
