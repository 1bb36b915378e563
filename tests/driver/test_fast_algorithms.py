"""Models with the kernels that multiply less than the definition does, and without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import gtco
from gtco.driver.linking.metadata import versions
from gtco.machine.target import target
from gtco.search.records.records import circumstances, cpu_known
from gtco.support.options import CompileKeywords, Tune
from tests.few_nodes import by_onnxruntime, model, typed
from tests.kernels import fresh_seed

RNG = np.random.default_rng(fresh_seed())
INPUTS = {
    "image": RNG.standard_normal((1, 64, 32, 32), dtype=np.float32),
    "tokens": RNG.standard_normal((1, 1024, 1024), dtype=np.float32),
}
WEIGHTS = {
    "filters": RNG.standard_normal((64, 64, 3, 3), dtype=np.float32) / 24,
    "matrix": RNG.standard_normal((1024, 512), dtype=np.float32) / 16,
}
NODES = model(
    [
        helper.make_node("Conv", ["image", "filters"], ["features"], pads=[1, 1, 1, 1]),
        helper.make_node("MatMul", ["tokens", "matrix"], ["y"]),
    ],
    INPUTS,
    WEIGHTS,
    ["features", "y"],
)
WANTED = by_onnxruntime(NODES, INPUTS)
PROTO = typed(NODES, WANTED)
FAST = {"winograd", "strassen"}


def sketches(report: gtco.CompileReport) -> set[str]:
    return {stage["schedule"]["sketch"] for stage in report.stages}


def test_a_compile_without_fast_algorithms(tmp_path: Path) -> None:
    options: CompileKeywords = {"target": "znver4", "threads": 2, "cache": False}
    fast = gtco.compile_to_file(PROTO, tmp_path / "fast.so", **options)
    plain = gtco.compile_to_file(PROTO, tmp_path / "m.so", fast_algorithms=False, **options)
    assert sketches(fast) >= FAST and not sketches(plain) & FAST
    exact = sum(array.nbytes for array in WEIGHTS.values())
    assert exact <= plain.weights_bytes < 1.1 * exact and fast.weights_bytes > 1.7 * exact


@pytest.mark.parametrize("fast", [True, False])
def test_both_are_right(fast: bool) -> None:
    compiled = gtco.compile_model(PROTO, fast_algorithms=fast, cache=False)
    for got, wanted in zip(compiled(*INPUTS.values()), WANTED, strict=True):
        assert np.abs(got - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_what_was_measured_with_them_is_not_followed_without(tmp_path: Path) -> None:
    records = tmp_path / "some.records"
    effort, kinds = Tune(trials=2, seconds=5.0, learned=False), []
    for allowed in (True, False, True):
        found = gtco.compile_model(
            PROTO, tune=effort, records=records, fast_algorithms=allowed, cache=False
        )
        assert not [note for note in found.report.notes if "not followed" in note]
        kinds.append(sketches(found.report) & FAST)
    assert kinds[0] and kinds[2] and not kinds[1]


def test_what_was_measured_elsewhere_without_them_is_followed_without() -> None:
    """A bundle of candidates says so, and a compile looks for records that say so."""
    for allowed in (True, False):
        machine = replace(target("znver4"), fast_algorithms=allowed)
        measured = {**json.loads(cpu_known(versions(machine))), "cpu": "another"}
        wanted = {**json.loads(circumstances(machine)), "cpu": "another"}
        assert measured == wanted
