"""The tile unit: a child process decides, not CPUID."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gtco.machine.target import cpu_flags
from gtco.machine.tiles import CHILD, CODE, FLAGS, REQUEST, allowed, probe, tiles

UNASKED = CHILD.replace(f"if ctypes.CDLL(None).syscall{REQUEST}:", "if False:")


def test_this_machine() -> None:
    found = tiles(cpu_flags())
    assert bool(found.kinds) != bool(found.reason)
    if "amx_tile" not in cpu_flags():
        assert not found.kinds and "shows no AMX" in found.reason
    elif found.kinds:
        assert found.kinds[0] == "amx-tile" and len(found.kinds) <= len(FLAGS)


def test_a_unit_that_is_only_shown_is_not_believed() -> None:
    """CPUID that a hypervisor invents: the child is refused, or it faults."""
    found = tiles("avx2 amx_tile amx_bf16 amx_int8".split())
    if allowed():
        assert found.kinds == ("amx-tile", "amx-bf16", "amx-int8")
    else:
        assert not found.kinds and "the kernel refuses it" in found.reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("31c0 c3", ""),  # returns
        ("0f0b", "instructions fault"),  # ud2
        ("c6042500000000 00", "ended with status -11"),  # writes to address 0
    ],
)
def test_what_a_child_that_may_use_tiles_answers(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gtco.machine.tiles.CHILD", UNASKED)
    reason = probe(bytes.fromhex(code.replace(" ", "")))
    assert said in reason and bool(said) == bool(reason)


def test_tile_instructions_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without tiles faults at the first of them: the child dies, this process lives."""
    if allowed():
        assert probe(CODE) == tiles(cpu_flags()).reason
        return
    monkeypatch.setattr("gtco.machine.tiles.CHILD", UNASKED)
    assert "instructions fault" in probe(CODE)


def test_the_code_is_what_the_comment_says(tmp_path: Path) -> None:
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    (tmp_path / "code").write_bytes(CODE)
    command = [objdump, "-D", "-b", "binary", "-m", "i386:x86-64", str(tmp_path / "code")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split("\t")[2].split()[0] for line in shown.splitlines() if line.count("\t") == 2]
    assert lines == ["ldtilecfg", "tilezero", "tilerelease", "xor", "ret"]
