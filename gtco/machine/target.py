"""Machines as data: levels of memory, parallel units, instruction sets.

A :class:`Target` is a frozen table and can be used without the machine that it describes.
:func:`detect` describes the machine that it runs on. GPUs are in :mod:`gtco.machine.gpu`.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gtco.machine.cores import ROOT, allowed_cores
from gtco.machine.gpu import ARCHITECTURES, GPUS, GpuTarget, gpu_target
from gtco.machine.tiles import tiles
from gtco.support.errors import OptionError


@dataclass(frozen=True)
class MemoryLevel:
    """One level of the memory hierarchy: its capacity in bytes, its sustained bandwidth per core in
    bytes a second, its latency in seconds.
    """

    name: str
    capacity: int
    bandwidth: float
    latency: float
    shared: bool = False


@dataclass(frozen=True)
class Target:
    """A CPU: what code for it may use, and the figures for the analytic policy.

    - ``mcpu``: LLVM's name of the CPU, which tunes the code
    - ``features``: the instruction sets beyond plain x86-64 that the code may use; an artifact
      requires these of the CPU that opens it (:meth:`required`). The names are those of LLVM and
      csrc/cpu_features.def
    - ``lanes``: float32 values in a vector
    - ``registers``: vector registers
    - ``fma_ports``: vector FMAs a cycle
    - ``frequency``: in Hz
    - ``cores``: the number of threads that code for it has, for which work is divided and priced
    - ``memory``: the levels from L1 outward
    - ``emulated``: those of the features whose instructions are replaced by functions that do the
      same. Only tests set it, to run kernels in tiles on machines without a tile unit
    - ``cpu``: what tells its CPU from others (:func:`cpu_identity`), if it is not this machine's
    """

    name: str
    mcpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    fma_ports: float
    frequency: float
    cores: int
    memory: tuple[MemoryLevel, ...]
    emulated: tuple[str, ...] = ()
    cpu: tuple[tuple[str, str], ...] = ()

    kind = "cpu"

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """The features whose instructions the code contains."""
        return tuple(name for name in self.features if name not in self.emulated)

    def required(self, tiles: bool) -> tuple[str, ...]:
        """The features that an artifact requires. A compiler never uses the tile unit by itself, so
        only kernels that multiply in ``tiles`` need it.
        """
        return tuple(n for n in self.instruction_sets if tiles or n not in TILES)

    @property
    def peak(self) -> float:
        """Nominal float32 FLOP/s of one core."""
        return 2 * self.lanes * self.fma_ports * self.frequency

    def level(self, name: str) -> MemoryLevel:
        return next(level for level in self.memory if level.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mcpu": self.mcpu,
            "features": list(self.features),
            "lanes": self.lanes,
            "registers": self.registers,
            "fma_ports": self.fma_ports,
            "frequency": self.frequency,
            "cores": self.cores,
            "memory": [[m.name, m.capacity, m.bandwidth, m.latency, m.shared] for m in self.memory],
            **({"emulated": list(self.emulated)} if self.emulated else {}),
            **({"cpu": dict(self.cpu)} if self.cpu else {}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Target:
        fields = dict(data)
        fields["features"] = tuple(fields["features"])
        fields["emulated"] = tuple(fields.get("emulated", ()))
        fields["cpu"] = tuple(sorted(fields.get("cpu", {}).items()))
        fields["memory"] = tuple(MemoryLevel(*m) for m in fields["memory"])
        return Target(**fields)


Machine = Target | GpuTarget

V3 = (
    *("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c"),
    *("bmi", "bmi2", "lzcnt", "movbe"),
)
V3_VNNI = (*V3, "avxvnni")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
TILES = ("amx-tile", "amx-bf16")  # those of the tile unit
# Linux spells these differently in /proc/cpuinfo, in more than "." and "_" (sse4_1, avx512_vnni).
LINUX_NAMES = {"sse3": "pni", "bmi": "bmi1", "lzcnt": "abm"}


# Bytes that a cache may have; a size outside of this range is taken for an error.
CACHE_BOUNDS = {
    "L1": (8 << 10, 512 << 10),
    "L2": (64 << 10, 64 << 20),
    "L3": (512 << 10, 4 << 30),
}


def _memory(l1: int, l2: int, l3: int, width: int, hz: float) -> tuple[MemoryLevel, ...]:
    return (
        MemoryLevel("L1", l1 << 10, 2 * width * hz, 5 / hz),
        MemoryLevel("L2", l2 << 10, width / 2 * hz, 14 / hz),
        MemoryLevel("L3", l3 << 10, 8 * hz, 50 / hz, shared=True),
        MemoryLevel("DRAM", 1 << 40, 8e9, 90e-9, shared=True),
    )


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("x86-64-v3", "x86-64-v3", V3, 8, 16, 2, 3.0e9, 2, _memory(32, 256, 8192, 32, 3.0e9)),
        Target(
            "x86-64-v4", "x86-64-v4", V4, 16, 32, 2, 3.0e9, 2, _memory(32, 1024, 16384, 64, 3.0e9)
        ),
        Target(
            "alderlake",
            "alderlake",
            V3_VNNI,
            8,
            16,
            2,
            3.6e9,
            2,
            _memory(48, 1280, 24576, 32, 3.6e9),
        ),
        Target("znver3", "znver3", V3, 8, 16, 2, 3.6e9, 2, _memory(32, 512, 32768, 32, 3.6e9)),
        Target(
            "znver4",
            "znver4",
            (*V4, "avx512bf16", "avx512vnni"),
            16,
            32,
            1,
            3.7e9,
            2,
            _memory(32, 1024, 32768, 64, 3.7e9),
        ),
        Target(
            "znver5",
            "znver5",
            (*V4, "avx512bf16", "avx512vnni"),
            16,
            32,
            2,
            4.1e9,
            2,
            _memory(48, 1024, 32768, 64, 4.1e9),
        ),
        Target(
            "skylake-avx512",
            "skylake-avx512",
            V4,
            16,
            32,
            2,
            2.6e9,
            2,
            _memory(32, 1024, 16384, 64, 2.6e9),
        ),
        Target(
            "cascadelake",
            "cascadelake",
            (*V4, "avx512vnni"),
            16,
            32,
            2,
            2.6e9,
            2,
            _memory(32, 1024, 16384, 64, 2.6e9),
        ),
        Target(
            "icelake-server",
            "icelake-server",
            (*V4, "avx512vnni"),
            16,
            32,
            2,
            2.9e9,
            2,
            _memory(48, 1280, 24576, 64, 2.9e9),
        ),
        Target(
            "sapphirerapids",
            "sapphirerapids",
            (*V4, "avx512bf16", "avx512vnni", *TILES),
            16,
            32,
            2,
            2.9e9,
            2,
            _memory(48, 2048, 32768, 64, 2.9e9),
        ),
        Target(
            "emeraldrapids",
            "emeraldrapids",
            (*V4, "avx512bf16", "avx512vnni", *TILES),
            16,
            32,
            2,
            2.9e9,
            2,
            _memory(48, 2048, 262144, 64, 2.9e9),
        ),
        Target(
            "graniterapids",
            "graniterapids",
            (*V4, "avx512bf16", "avx512vnni", *TILES),
            16,
            32,
            2,
            3.7e9,
            2,
            _memory(48, 2048, 491520, 64, 3.7e9),
        ),
        Target("haswell", "haswell", V3, 8, 16, 2, 3.0e9, 2, _memory(32, 256, 8192, 32, 3.0e9)),
    )
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
    if name not in TARGETS:
        known = ", ".join(("native", *TARGETS))
        raise OptionError(
            f"unknown target '{name}'{_hint(name.lower())}. Known: {known}; for GPUs cuda: and one "
            f"or several of {', '.join(ARCHITECTURES)}, or {', '.join(GPUS)}"
        )
    return TARGETS[name]


# The nearest row whose code a CPU runs, for CPUs (by LLVM's names) that have no row of their own.
NEAREST = {
    "haswell": "core-avx2 broadwell skylake",
    "alderlake": "raptorlake meteorlake arrowlake lunarlake gracemont sierraforest grandridge "
    "clearwaterforest",
    "skylake-avx512": "skx cannonlake",
    "cascadelake": "cooperlake",
    "icelake-server": "icelake-client tigerlake rocketlake",
    "graniterapids": "graniterapids-d diamondrapids",
    "x86-64-v3": "znver1 znver2 bdver4",
}
OLDER = (
    "x86-64 x86-64-v2 nocona core2 penryn nehalem westmere sandybridge ivybridge bonnell "
    "silvermont goldmont goldmont-plus tremont k8 amdfam10 barcelona btver1 btver2 bdver1 bdver2 "
    "bdver3"
).split()


def _hint(name: str) -> str:
    """What to use instead of an unknown target."""
    for nearest, names in NEAREST.items():
        if name in names.split():
            return f": gtco has no table of this CPU; take --target {nearest}, whose code it runs"
    if name in OLDER:
        return ": CPUs of that kind lack AVX2 or FMA, the least that gtco generates code for"
    if name in ARCHITECTURES or f"cuda:{name}" in GPUS:
        return f": for a GPU write --target cuda:{name}"
    close = difflib.get_close_matches(name, ["native", *TARGETS], n=2, cutoff=0.6)
    return f": did you mean {' or '.join(close)}" if close else ""


def cpu_target(name: str | Machine = "native") -> Target:
    """As :func:`target`, but a GPU raises :class:`OptionError`."""
    machine = target(name)
    if isinstance(machine, GpuTarget):
        raise OptionError(f"the target '{machine.name}' is a GPU, and this is for CPUs alone")
    return machine


def detect() -> Target:
    """This machine: the nearest row of the table, with this machine's caches, cores and features.
    Needs Linux's /proc and /sys.
    """
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
    features = tuple(
        f
        for f in base.features
        if LINUX_NAMES.get(f, re.sub("[.-]", "", f)) in spelt and f not in absent
    )
    memory = tuple(
        replace(level, capacity=cache_bytes(level.name) or level.capacity) for level in base.memory
    )
    return replace(base, name="native", features=features, cores=allowed_cores(), memory=memory)


def cpu_name() -> str:
    return _cpuinfo().get("model name", "unknown CPU")


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, as Linux spells it in /proc/cpuinfo."""
    return frozenset(_cpuinfo().get("flags", "").split())


def cpu_identity() -> dict[str, str]:
    """Values that distinguish this CPU from others with its name. Hypervisors often shorten the
    name.
    """
    wanted = ("vendor_id", "model name", "cpu family", "model", "stepping")
    info = _cpuinfo()
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
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if not key.strip():
            break
        info[key.strip()] = value.strip()
    return info


def cache_bytes(name: str, root: Path = ROOT) -> int:
    """The size that sysfs gives for this cache of a CPU that this process may use. 0 if sysfs says
    nothing or an impossible size: hypervisors invent sizes, or leave them out.
    """
    cpu = min(os.sched_getaffinity(0))
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
