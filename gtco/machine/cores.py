"""The number of cores that this process may use: the affinity mask, limited by the cgroup's CPU
quota. Hardware threads of one core count once, because they share its multiply-add units.

The rules are the same as in runtime/csrc/cpu_count.c, by which a compiled model chooses its number
of threads; a test compares both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # tests give another one, with a /proc and a /sys of their own


def allowed_cores(root: Path = ROOT) -> int:
    """The default number of threads of a compiled model, at least 1."""
    cores = {_core_of(cpu, root) for cpu in os.sched_getaffinity(0)}
    quota = cpu_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


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
    except OSError:
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
        granted = float(quota) / float(period)  # "max" is no number
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return granted if 0 < granted <= 1 << 20 else None
