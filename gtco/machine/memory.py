"""The memory that this process may still take, limited by its cgroup, by the ancestors of the
cgroup and by the machine.
"""

from __future__ import annotations

from pathlib import Path

from gtco.machine.cores import ROOT, cgroups

# Files in a cgroup's folder, version 2 and version 1: its limit, the memory that it holds, and the
# line of memory.stat with the files in that memory, which the kernel can drop at once.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes; None if neither the cgroups nor the kernel say."""
    folders = map(_folder_left, cgroups(root, "memory"))
    found = [left for left in folders if left is not None]
    if (available := _stat(root / "proc/meminfo", "MemAvailable:")) is not None:
        found.append(available << 10)
    return min(found, default=None)


def _folder_left(folder: Path) -> int | None:
    """The bytes that this cgroup still allows; None if it has no limit."""
    for limit, held, files in FILES:
        try:
            most, used = int((folder / limit).read_text()), int((folder / held).read_text())
        except (OSError, ValueError):  # "max" is not a number
            continue
        return max(most - used + (_stat(folder / "memory.stat", files) or 0), 0)
    return None


def _stat(path: Path, name: str) -> int | None:
    """The number after a name in a file of lines."""
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    return None
