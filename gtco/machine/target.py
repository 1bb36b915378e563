"""Machines as data: levels of memory, parallel units, instruction sets.

A :class:`Target` is a frozen table and can be used without the machine that it describes.
:func:`detect` describes the machine that it runs on. GPUs are in :mod:`gtco.machine.gpu`.
"""

from __future__ import annotations

import difflib
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gtco.machine.aarch64 import ARM_NEAREST, ARM_TARGETS, PARTS
from gtco.machine.aarch64 import LINUX_NAMES as ARM_LINUX_NAMES
from gtco.machine.cores import ROOT, allowed_cores, fastest_cpu
from gtco.machine.cpu import CACHE_LINE, TILES, MemoryLevel, Target
from gtco.machine.gpu import ARCHITECTURES, GPUS, GpuTarget, gpu_target
from gtco.machine.isa import AARCH64, host
from gtco.machine.tiles import tiles
from gtco.machine.x86 import LINUX_NAMES, NEAREST, OLDER, TARGETS, V3, V4
from gtco.support.errors import OptionError

__all__ = [
    "ARM_TARGETS",
    "CACHE_LINE",
    "CPUS",
    "NEAREST",
    "OLDER",
    "TARGETS",
    "TILES",
    "V3",
    "V4",
    "Machine",
    "MemoryLevel",
    "Target",
    "cache_bytes",
    "cpu_flags",
    "cpu_identity",
    "cpu_name",
    "cpu_target",
    "detect",
    "target",
]

Machine = Target | GpuTarget
CPUS: Mapping[str, Target] = ChainMap(ARM_TARGETS, TARGETS)

# Bytes that a cache may have; a size outside of this range is taken for an error.
CACHE_BOUNDS = {
    "L1": (8 << 10, 512 << 10),
    "L2": (64 << 10, 64 << 20),
    "L3": (512 << 10, 4 << 30),
}


def target(name: str | Machine = "native") -> Machine:
    """The target with that name. ``native`` is this machine, ``cuda:...`` a GPU
    (:func:`gtco.machine.gpu.gpu_target`). Raises :class:`OptionError` for an unknown name.
    """
    if isinstance(name, Target | GpuTarget):
        return name
    if name == "native":
        return detect()
    if name.partition(":")[0].lower() == "cuda":
        return gpu_target(name)
    if name not in CPUS:
        known = ", ".join(("native", *CPUS))
        raise OptionError(
            f"unknown target '{name}'{_hint(name.lower())} Known: {known}; for GPUs cuda: and one "
            f"or several of {', '.join(ARCHITECTURES)}, or {', '.join(GPUS)}"
        )
    return CPUS[name]


def _hint(name: str) -> str:
    """The end of a sentence: what to use instead of an unknown target."""
    for nearest, names in (*NEAREST.items(), *ARM_NEAREST.items()):
        if name in names.split():
            return f": gtco has no table of this CPU; take --target {nearest}, whose code it runs."
    if name in OLDER:
        return ": CPUs of that kind lack AVX2 or FMA, the least that gtco generates code for."
    if name in ARCHITECTURES or f"cuda:{name}" in GPUS:
        return f": for a GPU write --target cuda:{name}."
    close = difflib.get_close_matches(name, ["native", *CPUS], n=2, cutoff=0.6)
    return f": did you mean {' or '.join(close)}?" if close else "."


def cpu_target(name: str | Machine = "native") -> Target:
    """As :func:`target`, but a GPU raises :class:`OptionError`."""
    machine = target(name)
    if isinstance(machine, GpuTarget):
        raise OptionError(f"the target '{machine.name}' is a GPU, and this is for CPUs alone")
    return machine


def detect() -> Target:
    """This machine: the nearest row of the table, with this machine's caches, cores and features.
    Needs Linux's /proc and /sys. Raises :class:`OptionError` for a CPU that gtco has no code for.
    """
    base, features = _detect_arm() if host() is AARCH64 else _detect_x86()
    memory = tuple(
        replace(level, capacity=cache_bytes(level.name) or level.capacity) for level in base.memory
    )
    return replace(base, name="native", features=features, cores=allowed_cores(), memory=memory)


def _detect_x86() -> tuple[Target, tuple[str, ...]]:
    """The row of this machine, and those of its features that the machine has."""
    info = _cpuinfo()
    flags = set(info.get("flags", "").split())
    if not flags.issuperset({"avx2", "fma"}):
        raise OptionError(
            "this CPU has no AVX2 and FMA, the least gtco generates code for; "
            "name the target to compile for another machine: --target x86-64-v4"
        )
    base = TARGETS[_nearest(info, flags)]
    spelt = {flag.replace("_", "") for flag in flags}
    # CPUID may show a tile unit that does not work, so a process tries it.
    absent = {*TILES} - {*tiles(flags).kinds}
    return base, tuple(
        f
        for f in base.features
        if LINUX_NAMES.get(f, re.sub("[.-]", "", f)) in spelt and f not in absent
    )


def _detect_arm() -> tuple[Target, tuple[str, ...]]:
    """As :func:`_detect_x86`. A CPU without a row is an ``aarch64`` with the features that it has
    of those that gtco uses.
    """
    info = _cpuinfo()
    flags = set(info.get("Features", "").split())
    part = info.get("CPU implementer", ""), info.get("CPU part", "")
    base = ARM_TARGETS[PARTS.get(part, AARCH64.example)]
    every = {f for row in ARM_TARGETS.values() for f in row.features}
    wanted = base.features if part in PARTS else tuple(sorted(every))
    return base, tuple(f for f in wanted if ARM_LINUX_NAMES.get(f, f) in flags)


def cpu_name() -> str:
    info = _cpuinfo()
    if "CPU part" in info:  # AArch64's numbers have no names in Linux
        part = info.get("CPU implementer", ""), info["CPU part"]
        return PARTS.get(part, f"AArch64 CPU, implementer {part[0]}, part {part[1]}")
    return info.get("model name", "unknown CPU")


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, as Linux spells it in /proc/cpuinfo."""
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features", "")).split())


def cpu_identity() -> dict[str, str]:
    """Values that distinguish this CPU from others with its name. Hypervisors often shorten the
    name.
    """
    wanted = ["vendor_id", "model name", "cpu family", "model", "stepping"]
    info = _cpuinfo()
    if "CPU part" in info:
        wanted = ["CPU implementer", "CPU part", "CPU variant", "CPU revision"]
    return {key: info.get(key, "") for key in wanted}


def _nearest(info: dict[str, str], flags: set[str]) -> str:
    avx512 = flags.issuperset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
    if info.get("vendor_id") == "AuthenticAMD":
        family = int(info.get("cpu family", "0"))
        if avx512:
            return "znver5" if family >= 26 else "znver4"
        return "znver3" if family >= 23 else "x86-64-v3"
    if avx512:
        # Hypervisors hide AMX more often than the instructions that came with it.
        if "amx_tile" in flags or "avx512_bf16" in flags:
            return "sapphirerapids"
        if "avx512_vnni" not in flags:
            return "skylake-avx512"
        return "icelake-server" if "gfni" in flags else "cascadelake"
    return "alderlake" if "avx_vnni" in flags else "x86-64-v3"


def _cpuinfo() -> dict[str, str]:
    """What Linux says of a CPU: of the first one, or of the fastest one where CPUs differ (they are
    of different kinds in Arm's big.LITTLE).
    """
    wanted = str(fastest_cpu()) if host() is AARCH64 else None
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if not key.strip():
            if wanted in (None, info.get("processor")):
                break
            info = {}
            continue
        info[key.strip()] = value.strip()
    return info


def cache_bytes(name: str, root: Path = ROOT) -> int:
    """The size that sysfs gives for this cache of a CPU that this process may use. 0 if sysfs says
    nothing or an impossible size: hypervisors invent sizes, or leave them out.
    """
    cpu = fastest_cpu(root)
    for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
        try:
            kind, level, size = ((index / n).read_text().strip() for n in ("type", "level", "size"))
            if kind == "Instruction" or f"L{level}" != name:
                continue
            nbytes = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1:]]
        except (OSError, ValueError, LookupError):
            continue
        least, most = CACHE_BOUNDS[name]
        return nbytes if least <= nbytes <= most else 0
    return 0
