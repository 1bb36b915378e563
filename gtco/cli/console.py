"""What the commands print with: lines, tables, progress, units. On a terminal, tables fit its
width; a pipe or a file gets whole lines and no repainting.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

from gtco.cli.live import live
from gtco.cli.tables import Table, shortened
from gtco.tuning.view import View

NEWS_SECONDS = 15.0


def width(stream: TextIO | None = None) -> int | None:
    """The columns of the terminal behind ``stream`` (by default standard output); None if it is not
    a terminal.
    """
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints one line. Characters that the stream's encoding lacks are replaced."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=stream)


def show(table: Table) -> None:
    for line in table.lines(width()):
        say(line)


class Painted:
    """Lines at the bottom of a terminal that are painted over: the view of the work under way."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._height = stream, 0

    def paint(self, lines: Sequence[str]) -> None:
        columns = shutil.get_terminal_size().columns
        self.erase()
        for line in lines:  # a line that the terminal wraps would count as two
            say(shortened(line, columns - 1), self._stream)
        self._height = len(lines)
        self._stream.flush()

    def erase(self) -> None:
        if self._height:
            self._stream.write(f"\x1b[{self._height}F\x1b[J")
            self._stream.flush()
        self._height = 0


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows the work under way on a terminal, and does nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    painted = Painted(sys.stderr)
    try:
        yield lambda text: painted.paint([text])
    finally:
        painted.erase()


class Phases:
    """A compile's progress on standard error: a line for each phase that has ended. The phase under
    way is shown on a terminal (as a table while it measures), elsewhere by a line every
    NEWS_SECONDS.

    Called as ``progress(phase, seconds or None, detail)``: without seconds, the phase has begun or
    has news; with seconds, it has ended.
    """

    def __init__(self) -> None:
        self._painted = Painted(sys.stderr) if sys.stderr.isatty() else None
        self._shown = time.monotonic()

    def __enter__(self) -> Phases:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._painted:
            self._painted.erase()

    def __call__(self, phase: str, seconds: float | None, detail: Any) -> None:
        if seconds is not None:
            if self._painted:
                self._painted.erase()
            say(f"  {phase:<12} {seconds:7.2f} s  {detail}".rstrip(), sys.stderr)
            self._shown = time.monotonic()
        elif self._painted and time.monotonic() - self._shown > 0.05:
            self._shown = time.monotonic()
            columns = width(sys.stderr)
            lines = (
                live(detail).lines(columns - 1 if columns else None)
                if isinstance(detail, View)
                else [f"  {phase:<12} {detail}".rstrip()]
            )
            self._painted.paint(lines)
        elif not self._painted and detail and time.monotonic() - self._shown > NEWS_SECONDS:
            self._shown = time.monotonic()
            say(f"  {phase:<12} ...        {detail}", sys.stderr)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def size(count: float) -> str:
    """A number of bytes in a readable unit: 1.50 MB is 1,500,000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def text(value: Any, separator: str = " ") -> str:
    """Lists and dictionaries on one line: ``64x192 192x768``, ``tile_m=6 tile_n=64``."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={text(item, ',')}" for key, item in value.items())
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, int) for item in value):
            return "x".join(map(str, value))
        return separator.join(text(item) for item in value)
    return str(value)
