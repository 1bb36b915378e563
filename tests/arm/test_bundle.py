"""Candidates for a board: made here, timed there. The emulator stands in for the board, so the
readings mean nothing; that there are records, that results agree, and that a compile follows the
records is tested.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gtco.compiler import candidates_to_file, compile_to_file
from gtco.machine.isa import AARCH64
from gtco.runtime.emulated import EmulatedModel
from gtco.runtime.library import read_metadata
from gtco.search.records.records import Records, cpu_known
from gtco.support.errors import ArtifactError, OptionError
from gtco.tuning.offline import measure, timed
from tests.arm.emulation import tools
from tests.fuzz.models import convolution
from tests.quantization.models import block, images

BOARD = {"CPU implementer": "0x41", "CPU part": "0xd0b", "CPU variant": "4", "CPU revision": "1"}


@pytest.mark.skipif(AARCH64.here, reason="this machine needs no emulator")
def test_a_bundle_gives_records_that_a_compile_follows(tmp_path: Path) -> None:
    tools()
    model, path = convolution(), tmp_path / "m.bundle"
    candidates_to_file(model, path, target="cortex-a76", threads=2, per_stage=3)
    metadata = read_metadata(path)
    with pytest.raises(ArtifactError, match="library for aarch64"):
        measure(path, 4)
    known = json.dumps({**json.loads(cpu_known(metadata)), "cpu": BOARD}, sort_keys=True)
    found = timed(EmulatedModel, path, metadata, 8, known)
    assert len(found) == metadata["candidates"]["kernels"] >= 4
    assert all(record.seconds and record.outcome != "wrong" for record in found), found
    # as if the last candidate of each stage had been the best
    last = {record.stage: record for record in found}
    chosen = [replace(record, outcome="taken") for record in last.values()]
    with Records(tmp_path / "board.records", write=True) as records:
        records.add(chosen)
    report = compile_to_file(
        model,
        tmp_path / "m.so",
        target="cortex-a76",
        threads=2,
        records=tmp_path / "board.records",
        cache=False,
    )
    said = [note for note in report.notes if "different stages follow" in note]
    assert len(said) == 1 and "says of a cortex-a76" in said[0] and not said[0].startswith("0 ")
    schedules = {json.dumps(stage["schedule"]) for stage in report.stages}
    assert {record.config for record in chosen} & schedules


def test_candidates_for_this_machine_are_tuned_instead(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="gtco tune"):
        candidates_to_file(convolution(), tmp_path / "m.bundle", target="native")


def test_candidates_of_a_model_that_is_quantized_first(tmp_path: Path) -> None:
    tools()
    model, path = block(), tmp_path / "m.bundle"
    how: dict[str, Any] = {"target": "cortex-a76", "precision": "int8", "shapes": {"N": 1}}
    with pytest.raises(OptionError, match="give data"):
        candidates_to_file(model, path, **how)
    candidates_to_file(model, path, data={"image": images()}, threads=2, per_stage=2, **how)
    compared = read_metadata(path)["candidates"]["compared"]
    assert any(stage["steps"] for stage in compared), compared  # in steps of 8 bits
