"""Targets: the table, JSON, and this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gtco.machine import target as module
from gtco.machine.aarch64 import ARM_NEAREST
from gtco.machine.cores import allowed_cores
from gtco.machine.cpu import TILES
from gtco.machine.isa import AARCH64
from gtco.machine.target import (
    ARM_TARGETS,
    NEAREST,
    OLDER,
    TARGETS,
    V4,
    cache_bytes,
    detect,
    target,
)
from gtco.machine.tiles import Tiles
from gtco.runtime.writing.table import normalize_features
from gtco.support.errors import OptionError


@pytest.mark.parametrize("name", TARGETS)
def test_row(name: str) -> None:
    row = target(name)
    assert row.name == name and target(row) is row
    assert module.Target.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert row.lanes == (16 if "avx512f" in row.features else 8)
    assert row.registers == 2 * row.lanes and {"avx2", "fma"} <= set(row.features)
    assert row.peak == 2 * row.lanes * row.fma_ports * row.frequency
    # the runtime can check each of them, by this name
    assert normalize_features(row.features) == tuple(sorted(set(row.features)))
    capacities = [level.capacity for level in row.memory]
    bandwidths = [level.bandwidth for level in row.memory]
    latencies = [level.latency for level in row.memory]
    assert [level.name for level in row.memory] == ["L1", "L2", "L3", "DRAM"]
    assert capacities == sorted(capacities) and latencies == sorted(latencies)
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert row.level("L2") is row.memory[1]


@pytest.mark.parametrize("name", ARM_TARGETS)
def test_row_of_aarch64(name: str) -> None:
    row = target(name)
    assert row.name == name and row.isa is AARCH64 and not (row.here and AARCH64.uname == "x86_64")
    assert module.Target.from_json(json.loads(json.dumps(row.to_json()))) == row
    assert (row.lanes, row.registers) == (4, 32)
    assert normalize_features(row.features, AARCH64) == tuple(sorted(row.features))
    assert [level.name for level in row.memory] == ["L1", "L2", "L3", "DRAM"]
    capacities = [level.capacity for level in row.memory]
    assert capacities == sorted(capacities)


def cpuinfo(*blocks: dict[str, str]) -> str:
    """/proc/cpuinfo of a machine with these CPUs."""
    found = ({"processor": str(n), **block} for n, block in enumerate(blocks))
    return "\n".join("".join(f"{k}\t: {v}\n" for k, v in block.items()) for block in found)


LITTLE = {"Features": "fp asimd", "CPU implementer": "0x41", "CPU part": "0xd05"}
BIG = {
    "Features": "fp asimd aes asimdhp asimddp",
    "CPU implementer": "0x41",
    "CPU part": "0xd0b",
}


@pytest.mark.parametrize(
    ("blocks", "fastest", "mcpu", "features"),
    [
        ((LITTLE, BIG), 1, "cortex-a76", ("dotprod",)),
        ((LITTLE, LITTLE), 0, "generic", ()),
        (({**BIG, "CPU part": "0xd40", "Features": "asimd asimddp bf16 i8mm"},), 0, "neoverse-v1",
         ("dotprod", "bf16", "i8mm")),
        (({**BIG, "CPU part": "0xfff"},), 0, "generic", ("dotprod",)),
    ],
)  # fmt: skip
def test_machines_of_aarch64(
    blocks: tuple[dict[str, str], ...],
    fastest: int,
    mcpu: str,
    features: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With several kinds of CPUs, the fastest one counts."""
    text = cpuinfo(*blocks)
    monkeypatch.setattr(module, "host", lambda: AARCH64)
    monkeypatch.setattr(module, "fastest_cpu", lambda *_: fastest)
    monkeypatch.setattr(module.Path, "read_text", lambda self, *_: text)
    machine = detect()
    assert (machine.mcpu, machine.features, machine.isa) == (mcpu, features, AARCH64)


# The kernel's names in /proc/cpuinfo, if they differ from LLVM's.
LINUX = {
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
}


def test_unknown_name() -> None:
    with pytest.raises(OptionError, match=r"unknown target 'i486'.*native.*x86-64-v3.*znver4"):
        target("i486")


def test_this_machine() -> None:
    machine = detect()
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].splitlines()[0].split())
    assert {LINUX.get(f, f) for f in machine.features} <= flags
    assert {"avx2", "fma", "bmi2"} <= set(machine.features)
    assert machine == target("native") and machine.name == "native"
    assert machine.cores == allowed_cores() >= 1
    assert [level.name for level in machine.memory] == ["L1", "L2", "L3", "DRAM"]


CPUS = {
    "znver4": ("AuthenticAMD", "25", "avx512"),
    "znver5": ("AuthenticAMD", "26", "avx512"),
    "znver3": ("AuthenticAMD", "25", ""),
    "x86-64-v3": ("GenuineIntel", "6", ""),
    "alderlake": ("GenuineIntel", "6", "avx_vnni"),
    "skylake-avx512": ("GenuineIntel", "6", "avx512"),
    "cascadelake": ("GenuineIntel", "6", "avx512 avx512_vnni"),
    "icelake-server": ("GenuineIntel", "6", "avx512 avx512_vnni gfni"),
    "sapphirerapids": ("GenuineIntel", "6", "avx512 avx512_vnni gfni amx_tile"),
}


@pytest.mark.parametrize("name", CPUS)
def test_other_machines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor, family, extra = CPUS[name]
    wide = "avx512f avx512bw avx512cd avx512dq avx512vl"
    narrow = "pni ssse3 sse4_1 sse4_2 popcnt avx avx2 fma bmi1 bmi2 f16c movbe abm"
    flags = f"{narrow} {extra.replace('avx512 ', wide + ' ')}"
    flags = flags if extra != "avx512" else f"{flags} {wide}"
    info = {"vendor_id": vendor, "cpu family": family, "flags": flags}
    monkeypatch.setattr(module, "_cpuinfo", lambda: info)
    monkeypatch.setattr(module, "tiles", lambda _: Tiles(reason="as if they faulted"))
    machine = detect()
    assert machine.mcpu == TARGETS[name].mcpu
    has = {f for f in TARGETS[name].features if LINUX.get(f, f) in flags.split()} - {*TILES}
    assert set(machine.features) == has >= set(module.V3)
    # A hypervisor may hide features that the CPU's name promises; the code then does not use them.
    info["flags"] = flags.replace("movbe", "").replace("f16c", "").replace("abm", "")
    assert set(detect().features) == has - {"movbe", "f16c", "lzcnt"}


def test_bfloat16_products_are_found_where_tiles_are_hidden(monkeypatch: pytest.MonkeyPatch):
    """A hypervisor may show an Intel server's VDPBF16PS and hide its AMX, or invent the model."""
    shown = "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16 gfni avx2 fma"
    for model in ("143", "167", "207"):
        info = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": model, "flags": shown}
        monkeypatch.setattr(module, "_cpuinfo", lambda info=info: info)
        assert "avx512bf16" in detect().features and detect().mcpu == "sapphirerapids"


def test_a_cpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpuinfo", lambda: {"flags": "sse2 avx"})
    with pytest.raises(OptionError, match=r"no AVX2 and FMA.*--target"):
        detect()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cooperlake", "take --target cascadelake"),
        ("CannonLake", "take --target skylake-avx512"),
        ("raptorlake", "take --target alderlake"),
        ("znver2", "take --target x86-64-v3"),
        ("graniterapids-d", "take --target graniterapids"),
        ("skylake", "take --target haswell"),
        ("nehalem", "lack AVX2 or FMA"),
        ("x86-64-v2", "lack AVX2 or FMA"),
        ("znvr4", "did you mean znver4"),
        ("sapphire-rapids", "did you mean sapphirerapids"),
        ("sm_80", "write --target cuda:sm_80"),
        ("h100", "write --target cuda:h100"),
        ("apple-m1", "take --target apple-m1-linux"),
        ("cortex-a72", "take --target aarch64"),
        ("i486", "unknown target 'i486'. Known: native"),
    ],
)
def test_an_unknown_target_has_a_true_answer(name, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        target(name)


def test_a_nearest_row_asks_for_nothing_that_the_cpu_lacks():
    """By LLVM's own tables of both."""
    import tvm

    features = tvm.get_global_func("target.llvm_get_cpu_features", allow_missing=True)
    llvm = {"sse3", "ssse3", *V4, "avx512bf16", "avx512vnni"}
    names = [(row, name) for row, names in NEAREST.items() for name in names.split()]
    assert len(names) > 15 and not {name for _, name in names} & set(TARGETS)
    for row, name in names:
        built = tvm.target.Target({"kind": "llvm", "mcpu": name, "mtriple": "x86_64-linux-gnu"})
        has = set(features(built))
        assert set(TARGETS[row].features) & llvm <= has, (name, set(TARGETS[row].features) - has)
    for row, names in ARM_NEAREST.items():
        for name in names.split():
            # some are names of products, which LLVM does not know
            built = tvm.target.Target({"kind": "llvm", "mcpu": name, "mtriple": AARCH64.triple})
            if len(has := set(features(built))) > 10:
                assert set(ARM_TARGETS[row].features) <= has, (name, row)
    for name in OLDER:
        built = tvm.target.Target({"kind": "llvm", "mcpu": name, "mtriple": "x86_64-linux-gnu"})
        assert not {"avx2", "fma"} <= set(features(built)), name


# A cache's size in sysfs, in K as Linux gives it, and the size that is used; 0: the table's own.
SIZES = {
    "L1": {"32K": 32 << 10, "48K": 48 << 10, "0K": 0, "1048576K": 0, "1G": 0, "4K": 0},
    "L2": {"2048K": 2 << 20, "0K": 0, "1048576K": 0, "1K": 0},
    "L3": {"266240K": 266240 << 10, "1048576K": 1 << 30, "1G": 1 << 30, "0K": 0, "99999999K": 0},
}


@pytest.mark.parametrize("level", SIZES)
def test_a_size_that_no_cache_has_is_not_believed(level: str, tmp_path: Path) -> None:
    """Hypervisors invent caches, report those of another machine, or leave them out."""
    cpu = min(os.sched_getaffinity(0))
    folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index1"
    assert cache_bytes(level, tmp_path) == 0
    folder.mkdir(parents=True)
    assert cache_bytes(level, tmp_path) == 0
    (folder / "type").write_text("Unified\n")
    (folder / "level").write_text(f"{level[1:]}\n")
    for said, believed in {**SIZES[level], "": 0, "many": 0, "-1K": 0, "K": 0}.items():
        (folder / "size").write_text(f"{said}\n")
        assert cache_bytes(level, tmp_path) == believed, said
    (folder / "size").write_text(f"{min(s for s, n in SIZES[level].items() if n)}\n")
    (folder / "type").write_text("Instruction\n")
    assert cache_bytes(level, tmp_path) == 0
