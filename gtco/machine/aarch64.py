"""The AArch64 CPUs that gtco has constants of.

The constants come from vendors' documents; none was measured by gtco. Arm's guides give for FMLA of
128-bit vectors a latency of 4 cycles and the number of pipelines that execute it. (For the Neoverse
cores both were read in LLVM's scheduling models, AArch64SchedNeoverse*.td, which are made from the
guides.)

================  ==================================================================================
cortex-a76        Arm Cortex-A76 Software Optimization Guide: 2 pipelines. Caches and clock: the
                  BCM2712 of a Raspberry Pi 5, with 64 KiB, 512 KiB, 2 MiB, 2.4 GHz
neoverse-n1       Arm Neoverse N1 Software Optimization Guide: 2 pipelines. Caches and clock: the
                  Graviton 2, with 64 KiB, 1 MiB, 32 MiB, 2.5 GHz
neoverse-v1       Arm Neoverse V1 Software Optimization Guide: 4 pipelines. Caches and clock: the
                  Graviton 3, with 64 KiB, 1 MiB, 32 MiB, 2.6 GHz
neoverse-v2       Arm Neoverse V2 Software Optimization Guide (PJDOC-466751330-593177): 4 pipelines.
                  Caches and clock: NVIDIA's Grace, with 64 KiB, 1 MiB, 114 MiB, 3.1 GHz
apple-m1-linux    Apple Silicon CPU Optimization Guide, of the performance cores: 4 pipelines. An L1
                  of 128 KiB, 12 MiB of L2 for four cores, a system cache of 8 MiB, 3.2 GHz
aarch64           any AArch64 CPU; the pipelines and the clock are the Cortex-A76's
================  ==================================================================================

A core loads two vectors of 16 bytes from L1 each cycle (all of these load two at least). The other
bandwidths, and the latencies of the caches behind L1, are estimates, as for x86-64.
"""

from __future__ import annotations

from gtco.machine.cpu import MemoryLevel, Target
from gtco.machine.isa import AARCH64, NEON_LANES

REGISTERS = 32  # registers of 128 bits
CORES = 4  # work is divided for so many where the machine is not known


def _memory(
    l1: int, l2: int, l3: int, hz: float, cycles: tuple[int, int, int]
) -> tuple[MemoryLevel, ...]:
    """Sizes in KiB; ``cycles`` are the latencies of the three caches."""
    return (
        MemoryLevel("L1", l1 << 10, 32 * hz, cycles[0] / hz),
        MemoryLevel("L2", l2 << 10, 16 * hz, cycles[1] / hz),
        MemoryLevel("L3", l3 << 10, 8 * hz, cycles[2] / hz, shared=True),
        MemoryLevel("DRAM", 1 << 40, 8e9, 110e-9, shared=True),
    )


def _row(
    name: str,
    mcpu: str,
    features: str,
    ports: int,
    hz: float,
    memory: tuple[MemoryLevel, ...],
) -> Target:
    return Target(
        name,
        mcpu,
        tuple(features.split()),
        NEON_LANES,
        REGISTERS,
        ports,
        hz,
        CORES,
        memory,
        isa=AARCH64,
    )


DOT, MATRIX = "dotprod", "dotprod bf16 i8mm"
ARM_TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        _row("aarch64", "generic", "", 2, 2.4e9, _memory(32, 512, 2048, 2.4e9, (4, 11, 40))),
        _row(
            "cortex-a76", "cortex-a76", DOT, 2, 2.4e9, _memory(64, 512, 2048, 2.4e9, (4, 9, 40))
        ),
        _row(
            "neoverse-n1",
            "neoverse-n1",
            DOT,
            2,
            2.5e9,
            _memory(64, 1024, 32768, 2.5e9, (4, 11, 60)),
        ),
        _row(
            "neoverse-v1",
            "neoverse-v1",
            MATRIX,
            4,
            2.6e9,
            _memory(64, 1024, 32768, 2.6e9, (4, 11, 60)),
        ),
        _row(
            "neoverse-v2",
            "neoverse-v2",
            MATRIX,
            4,
            3.1e9,
            _memory(64, 1024, 116736, 3.1e9, (4, 11, 60)),
        ),
        _row(
            "apple-m1-linux",
            "apple-m1",
            DOT,
            4,
            3.2e9,
            # L2 is shared by the four cores; each is given a quarter of it
            _memory(128, 3072, 8192, 3.2e9, (4, 18, 60)),
        ),
    )
}

# Linux's names in /proc/cpuinfo of the features above, where they differ from LLVM's.
LINUX_NAMES = {"dotprod": "asimddp"}
# The row of a CPU by (implementer, part) of /proc/cpuinfo. Rows of older or smaller kin run on
# newer CPUs: what a CPU lacks is taken away by its features.
PARTS = {
    ("0x41", "0xd0b"): "cortex-a76",
    ("0x41", "0xd0d"): "cortex-a76",  # Cortex-A77
    ("0x41", "0xd41"): "cortex-a76",  # Cortex-A78
    ("0x41", "0xd44"): "cortex-a76",  # Cortex-X1
    ("0x41", "0xd0c"): "neoverse-n1",
    ("0x41", "0xd40"): "neoverse-v1",
    ("0x41", "0xd49"): "neoverse-v1",  # Neoverse N2
    ("0x41", "0xd4f"): "neoverse-v2",
    ("0x41", "0xd84"): "neoverse-v2",  # Neoverse V3
    ("0x61", "0x022"): "apple-m1-linux",  # M1, efficiency cores
    ("0x61", "0x023"): "apple-m1-linux",  # M1, performance cores
    ("0x61", "0x024"): "apple-m1-linux",  # M1 Pro
    ("0x61", "0x025"): "apple-m1-linux",
    ("0x61", "0x028"): "apple-m1-linux",  # M1 Max
    ("0x61", "0x029"): "apple-m1-linux",
}
# LLVM's names of CPUs without a row, by the row whose code they run.
ARM_NEAREST = {
    "cortex-a76": "cortex-a77 cortex-a78 cortex-a55 cortex-a75 cortex-a510 cortex-x1",
    "neoverse-n1": "ampere1 graviton2 neoverse-e1",
    "neoverse-v1": "neoverse-n2 graviton3 neoverse-512tvb cortex-x2 cortex-x3",
    "neoverse-v2": "neoverse-v3 neoverse-n3 graviton4 grace",
    "apple-m1-linux": "apple-m1 apple-m2 apple-m3 apple-m4 apple-a14",
    "aarch64": "armv8-a cortex-a53 cortex-a57 cortex-a72 cortex-a73 arm64 raspberry-pi-4",
}
