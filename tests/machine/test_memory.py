"""How much memory a process may still use, on hierarchies of cgroups that are made up in a
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gtco.machine.memory import memory_left

# The text of /proc/self/cgroup, files by their path, and the bytes that are left.
CASES: dict[str, tuple[str, Mapping[str, str], int | None]] = {
    "nothing is known": ("", {}, None),
    "the machine alone": ("", {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n"}, 5 << 10),
    "v2": (
        "0::/a",
        {"sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/a/memory.current": "300\n"},
        700,
    ),
    "v2 without a limit": (
        "0::/a",
        {"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "300\n"},
        None,
    ),
    "files that can be let go of": (
        "0::/a",
        {
            "sys/fs/cgroup/a/memory.max": "1000\n",
            "sys/fs/cgroup/a/memory.current": "900\n",
            "sys/fs/cgroup/a/memory.stat": "anon 100\ninactive_file 650\nactive_file 100\n",
        },
        750,
    ),
    "the parent leaves less": (
        "0::/a/b",
        {
            "sys/fs/cgroup/a/memory.max": "1000\n",
            "sys/fs/cgroup/a/memory.current": "990\n",
            "sys/fs/cgroup/a/b/memory.max": "500\n",
            "sys/fs/cgroup/a/b/memory.current": "10\n",
        },
        10,
    ),
    "the machine leaves less": (
        "0::/a",
        {
            "proc/meminfo": "MemAvailable: 1 kB\n",
            "sys/fs/cgroup/a/memory.max": "100000\n",
            "sys/fs/cgroup/a/memory.current": "0\n",
        },
        1024,
    ),
    "over its limit": (
        "0::/",
        {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "1300\n"},
        0,
    ),
    "v1": (
        "4:memory:/a\n3:cpu:/b",
        {
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1024\n",
            "sys/fs/cgroup/memory/a/memory.stat": "cache 9\ntotal_inactive_file 24\n",
        },
        4096 - 1000,
    ),
    "v1, in a container whose path is the host's": (
        "4:memory:/docker/4711",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "96\n",
        },
        4000,
    ),
    "damaged": (
        "0::/a",
        {
            "proc/meminfo": "MemAvailable:\n",
            "sys/fs/cgroup/a/memory.max": "much\n",
            "sys/fs/cgroup/a/memory.current": "300\n",
        },
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left(case: str, tmp_path: Path) -> None:
    cgroup, files, left = CASES[case]
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == left


def test_of_this_process() -> None:
    left = memory_left()
    assert left is not None and left > 0
