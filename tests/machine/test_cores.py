"""How many cores a process may use: the C runtime and Python give the same count, on this machine
and on hierarchies of cgroups that are made up in a folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from gtco.machine import cores
from gtco.machine.cores import allowed_cores, cpu_quota, fast_cpus
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler

PROGRAM = """
#include <limits.h>
#include <stdio.h>
#include "cpu/count.h"
int main(int count, char** roots) {
  printf("%d\\n", gtco_allowed_cores());
  for (int i = 1; i < count; ++i) {
    int quota = gtco_cgroup_quota(roots[i]);
    printf("%d\\n", quota == INT_MAX ? 0 : quota);
  }
  return 0;
}
"""

FAST = """
#define _GNU_SOURCE
#include <stdio.h>
#include "cpu/count.h"
int main(int count, char** roots) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu = 0; cpu < 4; ++cpu) CPU_SET(cpu, &set);
  printf("%d", count == 2 ? gtco_keep_fast_cpus(roots[1], CPU_SETSIZE, &set) : -1);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) printf(" %d", cpu);
  return 0;
}
"""

# The text of /proc/self/cgroup, the files under /sys/fs/cgroup, and the CPUs that they grant.
CASES: dict[str, tuple[str, Mapping[str, str], float | None]] = {
    "none at all": ("", {}, None),
    "v2 without a limit": ("0::/a", {"a/cpu.max": "max 100000\n"}, None),
    "v2, two CPUs": ("0::/a", {"a/cpu.max": "200000 100000\n"}, 2),
    "v2, one and a half": ("0::/a", {"a/cpu.max": "150000 100000\n"}, 1.5),
    "v2, a tenth": ("0::/a", {"a/cpu.max": "10000 100000\n"}, 0.1),
    "v2, the parent grants less": (
        "0::/a/b/c",
        {
            "a/cpu.max": "100000 50000\n",
            "a/b/cpu.max": "max 100000\n",
            "a/b/c/cpu.max": "400000 100000\n",
        },
        2,
    ),
    "v2, the child grants less": (
        "0::/a/b",
        {"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "300000 100000\n"},
        3,
    ),
    "v2, in a container whose path is the host's": (
        "0::/system.slice/docker-4711.scope",
        {"cpu.max": "250000 100000\n"},
        2.5,
    ),
    "v2, outside the namespace's root": ("0::/../../b", {"cpu.max": "50000 100000\n"}, 0.5),
    "v2 at the root": ("0::/", {"cpu.max": "100000 100000\n"}, 1),
    "v2 beside v1": ("0::/a", {"unified/a/cpu.max": "400000 100000\n"}, 4),
    "v1 without a limit": (
        "4:cpu,cpuacct:/a",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "v1, nested": (
        "7:memory:/a/b\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a/b",
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": "350000\n",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
        },
        3.5,
    ),
    "v1, linked as cpu": (
        "2:cpuacct,cpu:/",
        {"cpu/cpu.cfs_quota_us": "120000\n", "cpu/cpu.cfs_period_us": "60000\n"},
        2,
    ),
    "v1, another controller's": (
        "3:cpuset:/a\n5:cpuacct:/a",
        {
            "cpuset/a/cpu.cfs_quota_us": "100000\n",
            "cpuset/a/cpu.cfs_period_us": "100000\n",
            "cpuacct/a/cpu.cfs_quota_us": "100000\n",
            "cpuacct/a/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "v1 and v2": (
        "4:cpu:/a\n0::/b",
        {
            "cpu/a/cpu.cfs_quota_us": "300000\n",
            "cpu/a/cpu.cfs_period_us": "100000\n",
            "b/cpu.max": "200000 100000\n",
        },
        2,
    ),
    "nonsense": (
        "no colon\n1:cpu\n0::/a\n9:cpu:/b",
        {
            "a/cpu.max": "lots 100000\n",
            "cpu.max": "100000 0\n",
            "cpu/b/cpu.cfs_quota_us": "\n",
            "cpu/b/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "a quota without end": ("0::/", {"cpu.max": "1e30 1\n"}, None),
    "a quota of nothing": ("0::/", {"cpu.max": "0 100000\n"}, None),
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The name of each case → a folder with its /proc and /sys."""
    folder = tmp_path_factory.mktemp("roots")
    result = {}
    for number, (name, (proc, files, _)) in enumerate(CASES.items()):
        root = result[name] = folder / str(number)
        for path, text in {
            "proc/self/cgroup": proc + "\n" if proc else "",
            **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    return result


@pytest.fixture(scope="module")
def counted(roots: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The counts of the C runtime: this machine's cores, then the quota of each case (0: none)."""
    folder = tmp_path_factory.mktemp("count")
    (folder / "main.c").write_text(PROGRAM)
    sources = [str(folder / "main.c"), str(CSRC / "cpu/count.c")]
    flags = ["-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", f"-I{CSRC}"]
    subprocess.run([c_compiler(), *flags, *sources, "-o", str(folder / "main")], check=True)
    command = [str(folder / "main"), *map(str, roots.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


CAPACITIES: list[tuple[dict[int, str], set[int]]] = [
    ({}, {0, 1, 2, 3}),
    ({0: "446", 1: "446", 2: "1024", 3: "1024"}, {2, 3}),
    ({0: "1024", 1: "900", 2: "325", 3: "768"}, {0, 1, 3}),
    ({n: "1024" for n in range(4)}, {0, 1, 2, 3}),
    ({0: "x", 1: "1024"}, {1}),
]


@pytest.mark.parametrize(("capacities", "wanted"), CAPACITIES)
def test_only_fast_cores_count(
    capacities: Mapping[int, str], wanted: set[int], tmp_path: Path
) -> None:
    """The C runtime and Python leave the same little cores out."""
    for cpu, text in capacities.items():
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        place.mkdir(parents=True)
        (place / "cpu_capacity").write_text(text)
    assert fast_cpus(range(4), tmp_path) == wanted
    (tmp_path / "main.c").write_text(FAST)
    sources = [str(tmp_path / "main.c"), str(CSRC / "cpu/count.c")]
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([c_compiler(), *flags, *sources, "-o", str(tmp_path / "main")], check=True)
    done = subprocess.run([tmp_path / "main", tmp_path], capture_output=True, text=True, check=True)
    left, *cpus = map(int, done.stdout.split())
    assert set(cpus) == wanted and left == (len(wanted) if len(wanted) < 4 else 0)


@pytest.mark.parametrize("name", CASES)
def test_quota(name: str, roots: dict[str, Path], counted: list[int]) -> None:
    wanted = CASES[name][2]
    assert cpu_quota(roots[name]) == wanted
    rounded_up = 0 if wanted is None else -int(-wanted // 1)
    assert counted[1 + list(CASES).index(name)] == rounded_up


def test_this_machine(counted: list[int]) -> None:
    assert counted[0] == allowed_cores()


def test_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 6: "6-7", 7: "6-7"}.items():
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{siblings}\n")
    for mask, wanted in (({0, 4, 1, 5, 6, 7}, 3), ({4}, 1), ({5, 1, 99}, 2)):
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _, mask=mask: mask)
        assert allowed_cores(tmp_path) == wanted
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1, 6})
    for quota, wanted in (("200000", 2), ("100001", 2), ("10", 1), ("max", 3)):
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota} 100000\n")
        assert allowed_cores(tmp_path) == wanted
