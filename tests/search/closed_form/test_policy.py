"""The policy that picks products by the closed form, and its file."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from gtco.compiler import compile_to_file, stages_of
from gtco.machine.gpu import gpu_target
from gtco.machine.target import TARGETS
from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.coefficients import SHIPPED, load, text
from gtco.search.closed_form.policy import ClosedFormPolicy, written
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.recorded import RecordedPolicy
from gtco.support.errors import OptionError
from gtco.tensor.sketch import space_of
from tests.tuning.small import linear, small_model


def test_it_picks_products_at_their_price_and_leaves_the_rest() -> None:
    inner = AnalyticPolicy(TARGETS["znver4"])
    policy, stage = ClosedFormPolicy(inner), linear(197, 192, 768)
    pick = policy.choose(stage)
    assert pick is not None and not policy.notes
    assert space_of(stage, inner.target).check(pick.config) is None
    assert pick.seconds == inner.price(pick.sketch, pick.config) == policy.predict(stage)
    assert policy.best(stage, 3)[0] == pick and len(policy.best(stage, 3)) == 3
    assert policy.propose(stage, 1) == [pick.config]
    assert policy.choose(stage, ["gemm"]) == inner.choose(stage, ["gemm"])
    assert copy.copy(policy).target is inner.target
    assert RecordedPolicy(policy).choose(stage) == pick
    assert written(RecordedPolicy(inner), [stage]) == {stage.key: pick.config}
    others = stages_of(small_model(), policy="closed-form")[1]
    light = next(s for s in others if all(op.kind != "matmul" for op in s.operators))
    assert policy.choose(light) == inner.choose(light)
    assert written(inner, [light]) == {}


def test_another_machine_gets_legal_configs_and_a_note() -> None:
    inner = AnalyticPolicy(TARGETS["x86-64-v3"])
    policy, stage = ClosedFormPolicy(inner), linear(50, 64, 96)
    assert "not on x86-64-v3" in policy.notes[0] and "znver4" in policy.notes[0]
    pick = policy.choose(stage)
    assert pick is not None and space_of(stage, inner.target).check(pick.config) is None


def test_a_gpu_is_left_to_its_policy() -> None:
    inner = GpuPolicy(gpu_target("cuda:a100"))
    policy, stage = ClosedFormPolicy(inner), linear(197, 192, 768)
    assert "no coefficients for 'cuda:a100'" in policy.notes[0]
    assert policy.choose(stage) == inner.choose(stage)
    assert written(inner, [stage]) == {}


def test_a_compile_takes_it_and_is_right(tmp_path: Path) -> None:
    report = compile_to_file(
        small_model(), tmp_path / "m.so", policy="closed-form", verify=True, workers=1
    )
    assert report is not None and (tmp_path / "m.so").exists()


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(text(load(SHIPPED)))
    assert file.read_text() == SHIPPED.read_text()
    assert SHIPPED.stat().st_size < 40_000


def test_a_damaged_or_old_file_is_an_error(tmp_path: Path) -> None:
    file, good = tmp_path / "c.json", json.loads(SHIPPED.read_text())
    policy = AnalyticPolicy(TARGETS["znver4"])
    old = {**good, "version": 0}
    other = {**good, "terms": good["terms"][1:]}
    short = json.loads(SHIPPED.read_text())
    kind = next(iter(short["machines"][0]["classes"].values()))
    kind["decisions"][0]["weights"][0].pop()
    words = json.loads(SHIPPED.read_text())
    kind = next(iter(words["machines"][0]["classes"].values()))
    next(d for d in kind["decisions"] if "words" in d)["words"].append("elsewhere")
    file.write_text(json.dumps(old))
    with pytest.raises(OptionError, match=r"has coefficients of version \d+, and") as caught:
        ClosedFormPolicy(policy, file)
    assert "not a file" not in str(caught.value)
    for data in (old, other, short, words, {**good, "machines": []}, [], {}):
        file.write_text(json.dumps(data))
        with pytest.raises(OptionError, match=r"python -m gtco.bench closed_form\s?train"):
            ClosedFormPolicy(policy, file)
    file.write_bytes(SHIPPED.read_bytes()[:500])
    with pytest.raises(OptionError, match="is not a file of coefficients"):
        ClosedFormPolicy(policy, file)
    with pytest.raises(OptionError, match="is not a file of coefficients"):
        ClosedFormPolicy(policy, tmp_path / "absent")
