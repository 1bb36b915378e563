"""The policy that picks what the language model writes, without measuring."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random

import numpy as np
import pytest

from gtco.compiler import compile_to_file, stages_of
from gtco.machine.gpu import gpu_target
from gtco.machine.target import TARGETS
from gtco.search.analytic import AnalyticPolicy
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.language import policy as module
from gtco.search.language.generation import Author
from gtco.search.language.policy import LanguagePolicy
from gtco.search.policy import priced
from gtco.search.recorded import RecordedPolicy
from gtco.support.errors import OptionError
from gtco.support.options import CompileOptions
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config
from tests.search.language.corpora import untrained
from tests.tuning.small import linear, small_model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    """An untrained one in the place of the one that ships."""
    found = untrained()
    monkeypatch.setattr(module, "loaded", lambda file: found)
    return found


@pytest.mark.parametrize(
    "inner", [AnalyticPolicy(TARGETS["znver4"]), GpuPolicy(gpu_target("cuda:a100"))]
)
def test_price_and_likelihood_pick_together_from_the_candidates_of_both(model, inner, monkeypatch):
    policy, stage = LanguagePolicy(inner), linear(197, 192, 768)
    pick = policy.choose(stage)
    assert pick is not None
    assert pick.seconds == inner.price(pick.sketch, pick.config)
    author = Author(model, space_of(stage, inner.target))
    theirs = inner.best(stage, module.CANDIDATES)
    written = author.propose(module.CANDIDATES, Random(stage.key), temperature=module.TEMPERATURE)

    def time(config: Config) -> float:
        found = priced(inner, author.space, config)
        assert found is not None
        return np.log(found.seconds) - author.score(config) / module.SHARPNESS

    assert all(time(pick.config) <= time(config) for config in written)
    assert all(time(pick.config) <= time(other.config) for other in theirs)
    # a model without an opinion leaves the choice to the price, and one with a strong one makes it
    monkeypatch.setattr(module, "SHARPNESS", 1e12)
    weak, first = LanguagePolicy(inner).choose(stage), inner.choose(stage)
    assert weak is not None and first is not None and weak.seconds == first.seconds
    monkeypatch.setattr(module, "SHARPNESS", 1e-12)
    strong = LanguagePolicy(inner).choose(stage)
    assert strong is not None
    candidates = {*written, *(other.config for other in theirs)}
    assert author.score(strong.config) == max(map(author.score, candidates))
    assert policy.predict(stage) == inner.predict(stage)
    assert policy.target is inner.target and copy.copy(policy).target is inner.target
    without = policy.choose(stage, [pick.sketch.name])
    assert without == inner.choose(stage, [pick.sketch.name])
    assert RecordedPolicy(policy).choose(stage) == pick


def test_a_compile_takes_it_and_is_right(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SHARPNESS", 1e-12)  # the model's opinion alone decides
    asked, choose = [], LanguagePolicy.choose

    def spied(self, stage, without=()):
        asked.append(stage.key)
        return choose(self, stage, without)

    monkeypatch.setattr(LanguagePolicy, "choose", spied)
    report = compile_to_file(
        small_model(), tmp_path / "m.so", policy="language-model", verify=True, workers=1
    )
    assert report is not None and (tmp_path / "m.so").exists()
    by_compile = set(asked)
    policy, stages = stages_of(small_model(), policy="language-model")
    picks = [policy.choose(stage) for stage in stages]
    assert {s.key for s in stages} <= by_compile
    assert np.isfinite([p.seconds for p in picks if p]).all()


def test_an_unknown_policy_is_refused():
    with pytest.raises(OptionError, match="unknown policy 'tlm': choose from analytic, language"):
        CompileOptions(policy="tlm")
