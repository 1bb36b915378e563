"""The number of cores that this process may use: the affinity mask, limited by the cgroup's CPU
quota. Hardware threads of one core count once, because they share its multiply-add units. Cores
that are much slower than the fastest one (the little ones of Arm's big.LITTLE) do not count: a step
waits for its last task, and such a core would take the last one.

The rules are the same as in runtime/csrc/cpu/count.c, by which a compiled model chooses its number
of threads; a test compares both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # tests give another one, with a /proc and a /sys of their own


def allowed_cores(root: Path = ROOT) -> int:
    """The default number of threads of a compiled model, at least 1."""
    cores = {_core_of(cpu, root) for cpu in fast_cpus(os.sched_getaffinity(0), root)}
    quota = cpu_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def fast_cpus(cpus: Collection[int], root: Path = ROOT) -> set[int]:
    """Those of the CPUs that have at least 3/4 of the capacity of the fastest one. All of them, if
    Linux gives no capacities: it does so only where they differ.
    """
    capacities = {cpu: _capacity(cpu, root) for cpu in cpus}
    most = max(capacities.values(), default=0)
    return {cpu for cpu, capacity in capacities.items() if 4 * capacity >= 3 * most}


def fastest_cpu(root: Path = ROOT) -> int:
    """The first of the CPUs with the greatest capacity that this process may use."""
    return min(os.sched_getaffinity(0), key=lambda cpu: (-_capacity(cpu, root), cpu))


def _capacity(cpu: int, root: Path) -> int:
    """The capacity by sysfs: 1024 for the fastest CPU of a machine; 0 if it is not given."""
    try:
        return int((root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity").read_text())
    except (OSError, ValueError):
        return 0


def cpu_quota(root: Path = ROOT) -> float | None:
    """The CPU time that this process's cgroup and its ancestors grant (v1 or v2), in CPUs; None
    without a limit.
    """
    quotas = map(_folder_quota, cgroups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _core_of(cpu: int, root: Path) -> int:
    """The lowest CPU number of the core that ``cpu`` belongs to; ``cpu`` itself if sysfs does not
    say.
    """
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of its ancestors, in every hierarchy that may have
    the ``controller``. In a container the path may be the host's; going up from it finds the
    container's folder.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if controllers == "":
            mounts = ["", "unified"]
        elif controller in controllers.split(","):
            mounts = [controllers, controller]
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for folder in (inside, *inside.parents):
                yield root / "sys/fs/cgroup" / mount / folder


def _folder_quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        granted = float(quota) / float(period)  # "max" is not a number
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return granted if 0 < granted <= 1 << 20 else None
