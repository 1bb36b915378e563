"""The share of this process's CPUs that others have: other processes, and on a virtual machine also
its other tenants ("steal"). By the counters of Linux in /proc/stat, which have steps of 10 ms.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gtco.machine.cores import ROOT

# Columns of a CPU's line in /proc/stat: user nice system idle iowait irq softirq steal. What guests
# of this machine use is counted in the first two as well.
IDLE, COLUMNS = (3, 4), 8


class Others:
    """Measures from its making on."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._cpus = os.sched_getaffinity(0)
        self._begin, self._own, self._busy = time.monotonic(), _own(), self._busy_seconds()

    def share(self) -> float:
        """From 0 to 1. 0 if Linux does not say, or if no time has passed."""
        seconds = (time.monotonic() - self._begin) * len(self._cpus)
        others = self._busy_seconds() - self._busy - (_own() - self._own)
        return min(max(others / seconds, 0.0), 1.0) if seconds > 0 else 0.0

    def _busy_seconds(self) -> float:
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
            ticks = 0
            for line in lines:
                name, *columns = line.split()
                if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self._cpus:
                    ticks += sum(int(x) for i, x in enumerate(columns[:COLUMNS]) if i not in IDLE)
        except (OSError, ValueError):
            return 0.0
        return ticks / os.sysconf("SC_CLK_TCK")


def share_of_others(seconds: float) -> float:
    """The share during the next ``seconds``, in which this process waits."""
    others = Others()
    time.sleep(seconds)
    return others.share()


def _own() -> float:
    """Seconds that this process and its children that have ended were on a CPU."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
