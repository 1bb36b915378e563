"""The barrier between two stages, timed by the C runtime's own pool."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gtco.errors import BuildError
from gtco.search.barrier import barrier_seconds


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_seconds_beyond_the_tasks(threads: int) -> None:
    """However busy the machine: more threads than cores is slow, and never a hang."""
    seconds = barrier_seconds(threads, 2)
    assert math.isfinite(seconds) and seconds >= 0


def test_no_threads() -> None:
    with pytest.raises(OSError, match="with 0 threads"):
        barrier_seconds(0, 2)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    with pytest.raises(BuildError, match="compiler"):
        barrier_seconds(2, 2)
