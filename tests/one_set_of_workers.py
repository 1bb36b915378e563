"""Workers that outlive a compile. Each start of a worker imports TVM, which takes seconds of CPU,
more than the kernels of a small model take.

The processes and jobs are real, like those of a compile (``tests/codegen/test_workers.py`` tests
those). A test that starts ``gtco`` as a process, or gives :class:`Workers` a command, has its own
workers.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any

from gtco.codegen.workers import Workers

# Variables that tests or their libraries set, and that no worker looks at. It finds gtco by
# sys.path, so the current folder is of no matter either.
UNNOTICED = ("PYTEST_", "KMP_", "TORCH", "GTCO_CACHE", "XDG_", "COLUMNS", "NO_COLOR", "RAY_")

_kept: dict[int, tuple[dict[str, str], Workers]] = {}


class OneSetOfWorkers(Workers):
    """If only ``count`` is given, these are the same processes again, as long as they can be
    used.
    """

    def __new__(cls, count: int, **given: Any) -> Any:
        if given:
            return Workers(count, **given)
        setting = surroundings()
        kept = _kept.get(count)
        if kept is None or kept[0] != setting:
            if kept is not None:
                kept[1].__exit__()
            kept = _kept[count] = (setting, Workers(count))
        return _Lent(kept[1])


class _Lent:
    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def __enter__(self) -> Workers:
        return self.workers

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if any(w.job for w in self.workers.workers):
            self.workers.__exit__()  # there are answers on their way that nobody reads


def surroundings() -> dict[str, str]:
    """What workers get from this process when they start, and may notice."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith(UNNOTICED)}
    return {**mine, "sys.path": os.pathsep.join(sys.path)}


def end() -> None:
    """Ends all processes."""
    for _, workers in _kept.values():
        workers.__exit__()
    _kept.clear()
