"""The x86-64 CPUs that gtco has constants of."""

from __future__ import annotations

from gtco.machine.cpu import TILES, MemoryLevel, Target

V3 = (
    *("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx", "avx2", "fma", "f16c"),
    *("bmi", "bmi2", "lzcnt", "movbe"),
)
V3_VNNI = (*V3, "avxvnni")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LATER = ("avx512vnni", "avx512vbmi")  # of Intel's Ice Lake and AMD's Zen 4
# Linux spells these differently in /proc/cpuinfo, in more than "." and "_" (sse4_1, avx512_vnni).
LINUX_NAMES = {"sse3": "pni", "bmi": "bmi1", "lzcnt": "abm"}


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
            (*V4, "avx512bf16", *LATER),
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
            (*V4, "avx512bf16", *LATER),
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
            (*V4, *LATER),
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
            (*V4, "avx512bf16", *LATER, *TILES),
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
            (*V4, "avx512bf16", *LATER, *TILES),
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
            (*V4, "avx512bf16", *LATER, *TILES),
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
