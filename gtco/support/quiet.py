"""What libraries print is kept from the user, and what other threads print meanwhile is not."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from gtco.support.alone import alone


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what this thread prints, its warnings and its log records; errors still raise."""
    with alone(), warnings.catch_warnings(), _printing("stdout"), _printing("stderr"), _logging():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def quiet_code(*marks: str) -> Iterator[None]:
    """Keeps lines with one of these ``marks`` from standard error, also those of code in C. Other
    lines come when the block ends.
    """
    with alone(), open(os.memfd_create("stderr"), "w+b") as instead:
        sys.stderr.flush()
        kept = os.dup(2)
        try:
            os.dup2(instead.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            instead.seek(0)
            for line in instead:
                if not any(mark.encode() in line for mark in marks):
                    os.write(kept, line)
            os.close(kept)


class _Except:
    """A stream, without what one thread writes."""

    def __init__(self, stream: Any) -> None:
        self.stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> Any:
        if threading.get_ident() == self._thread or self.stream is None:
            return len(text)
        return self.stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def _printing(name: str) -> Iterator[None]:
    without = _Except(getattr(sys, name))
    setattr(sys, name, without)
    try:
        yield
    finally:
        if getattr(sys, name) is without:  # else somebody else has put another there
            setattr(sys, name, without.stream)


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Torch logs the traceback of an error that it then raises."""
    mine = threading.get_ident()

    def others(record: logging.LogRecord) -> bool:
        return record.thread != mine or record.levelno > logging.ERROR

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {h for one in loggers if isinstance(one, logging.Logger) for h in one.handlers}
    handlers |= {logging.lastResort} if logging.lastResort else set()
    for handler in handlers:
        handler.addFilter(others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(others)
