"""How many cores this process may use: the affinity mask, cut to the cgroup's CPU quota; hardware
threads of one core count once, since they share its multiply-add units.

The same rules as in runtime/csrc/cpu_count.c, by which a compiled model chooses its number of
threads; a test holds the two together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # tests give another one, with a /proc and a /sys of their own


def allowed_cores(root: Path = ROOT) -> int:
    """The default number of threads of a compiled model; at least 1."""
    cores = {_core_of(cpu, root) for cpu in os.sched_getaffinity(0)}
    quota = cpu_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that this process's cgroup and those around it grant (v1 or v2); None
    without a limit.
    """
    quotas = map(_folder_quota, cgroups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _core_of(cpu: int, root: Path) -> int:
    """The least CPU of the core that ``cpu`` is on; ``cpu`` itself where sysfs does not say."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of those above it, in every hierarchy that may have the
    ``controller``. In a container the path may be the host's: the walk up finds the container's.
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
