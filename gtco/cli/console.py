"""What the commands print with: progress lines, units, consoles that stay readable in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.status import Status

from gtco.cli.live import live
from gtco.tuning.view import View

NEWS_SECONDS = 15.0
PIPE_WIDTH = 160  # a pipe has no width; rich would fold tables at 80


def stdout() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


class Phases:
    """A compile's progress on standard error: a line a phase; and of the one that runs, on a
    terminal a spinner, while it measures a table, elsewhere a line every NEWS_SECONDS.

    Called as ``progress(phase, seconds or None, detail)``: without seconds the phase has begun or
    has news, with seconds it has ended.
    """

    def __init__(self) -> None:
        self._console = Console(
            stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE_WIDTH
        )
        self._status: Status | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> Phases:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, phase: str, seconds: float | None, detail: Any) -> None:
        if seconds is not None:
            self._console.print(f"  {phase:<12} {seconds:7.2f} s  {detail}".rstrip(), markup=False)
            self._shown = time.monotonic()
        elif self._status and time.monotonic() - self._shown > 0.05:
            self._shown = time.monotonic()
            self._status.update(self._shape(phase, detail))
        elif not self._status and detail and time.monotonic() - self._shown > NEWS_SECONDS:
            self._shown = time.monotonic()
            self._console.print(f"  {phase:<12} ...        {detail}", markup=False)

    def _shape(self, phase: str, detail: Any) -> RenderableType:
        if isinstance(detail, View):
            return live(detail)
        return escape(f"{phase} {detail}")


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def size(count: float) -> str:
    """Bytes for people: 1.50 MB is 1,500,000."""
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
