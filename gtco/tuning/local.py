"""Runs candidates on this machine, in a process that may crash or hang, and is then killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.processes import environment, python
from gtco.tuning.runner import Budget, Readings

# Seconds that reading may take beyond what it was given: opening, and ten rounds of stages that
# take ten seconds each.
GRACE = 300.0


class LocalRunner:
    """A :class:`~gtco.tuning.runner.Runner` of this machine. The processes read at least as many
    rounds as decide, whatever the budget's ``rounds`` are: ``LEAST_ROUNDS`` of
    :mod:`gtco.tuning.timing` and :mod:`gtco.tuning.alternating`.
    """

    machines = 1

    def read(self, libraries: Sequence[Path], budget: Budget) -> Readings:
        if len(libraries) == 1:
            said = run(libraries[0], budget.seconds, budget.limit)
            if isinstance(said, str):
                return Readings(failed=said)
            return Readings((np.array(said["seconds"]),), frozenset(said["wrong"]))
        names = [str(budget.seconds), *map(str, libraries)]
        models = printed("alternating", names, budget.limit)
        if isinstance(models, str):
            return Readings(failed=models)
        return Readings(tuple(map(np.array, models)))


def run(library: Path, seconds: float, most: float = inf) -> dict[str, Any] | str:
    """The output of :mod:`gtco.tuning.timing` for a library, or a sentence on how it failed."""
    times = [str(seconds), str(most)]
    said: dict[str, Any] | str = printed("timing", [str(library), *times], seconds + GRACE)
    return said


def printed(module: str, arguments: Sequence[str], timeout: float) -> Any:
    """Runs a module of this package in a process of its own for at most ``timeout`` seconds and
    gives the JSON that it prints, or a sentence on how it failed. The module itself never prints a
    text.
    """
    command = [*python(f"gtco.tuning.{module}"), *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"crashed ({said[-1]})"
    return json.loads(done.stdout)
