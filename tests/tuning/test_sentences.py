"""Candidates that a language model writes: what is proposed, and what tuning makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gtco.cli import main
from gtco.codegen.generate import generate
from gtco.codegen.workers import Workers
from gtco.driver.cache.key import weights_digest
from gtco.machine.target import TARGETS, detect
from gtco.search.analytic import AnalyticPolicy
from gtco.search.language.policy import log_time
from gtco.search.policy import priced
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Records, circumstances
from gtco.support.errors import OptionError
from gtco.support.options import Tune
from gtco.tensor.sketch import space_of
from gtco.tuning import sentences
from gtco.tuning.learned import LearnedProposals
from gtco.tuning.proposals import AnalyticProposals
from gtco.tuning.result import StageResult
from gtco.tuning.sentences import ROUNDS, SEVERAL, SentenceProposals, Writer, rates_of
from gtco.tuning.tune import tune
from tests.search.language.corpora import untrained
from tests.tuning.small import integers, linear, small_model

V4 = TARGETS["x86-64-v4"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    """An untrained one in the place of the one that ships."""
    found = untrained()
    monkeypatch.setattr(sentences, "loaded", lambda file: found)
    return found


def result_of(policy, stage) -> StageResult:
    pick = policy.choose(stage)
    return StageResult(stage, (1,), pick, pick)


def test_sentences_come_first_and_later_beside_the_search(model):
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear(197, 192, 768))
    proposals = SentenceProposals(Writer(policy), AnalyticProposals(policy))
    space = space_of(result.stage, V4)
    seen = set()
    for n in range(ROUNDS + 2):
        picks = proposals.propose(result, 8)
        configs = [pick.config for pick in picks]
        assert len(set(configs)) == len(configs) <= 8 and not set(configs) & result.tested
        assert all(space.check(config) is None for config in configs)
        assert all(p.seconds == policy.price(p.sketch, p.config) for p in picks)
        wanted = 8 if n < ROUNDS else 4
        written = set(proposals.writer.configs(result, SEVERAL * wanted, result.tested))
        by_search = set(configs) - written
        assert bool(by_search) == (n >= ROUNDS)
        seen |= set(configs)
        result.tested.update(configs)
        result.rounds += 1
    assert len(seen) >= 20 and not proposals.failures


def test_of_many_sentences_the_likely_and_cheap_ones_are_measured(model):
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear(197, 192, 768))
    writer = Writer(policy)
    picks = SentenceProposals(writer, AnalyticProposals(policy)).propose(result, 8)
    author = writer.author(result.stage)
    configs = writer.configs(result, SEVERAL * 8, result.tested)
    space = space_of(result.stage, V4)
    times = {c: log_time(author, p) for c in configs if (p := priced(policy, space, c))}
    assert [pick.config for pick in picks] == sorted(times, key=times.__getitem__)[:8]
    assert len(times) > 8


def test_the_seed_decides(model):
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear(197, 192, 768))
    one, again, other = (
        SentenceProposals(Writer(policy, seed), AnalyticProposals(policy)).propose(result, 8)
        for seed in (0, 0, 1)
    )
    assert [p.config for p in one] == [p.config for p in again] != [p.config for p in other]


def test_the_population_of_the_search_starts_from_sentences(model):
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear(197, 192, 768))
    writer = Writer(policy)
    proposals = LearnedProposals(policy, {result.stage.key: result}, writer=writer)
    space = space_of(result.stage, V4)
    written = writer.configs(result, 8)
    assert set(written) <= set(proposals._seeds(space, result))


def test_what_has_no_sentence_is_left_to_the_search(model, monkeypatch: pytest.MonkeyPatch):
    policy = AnalyticPolicy(V4)
    result = result_of(policy, linear())
    proposals = SentenceProposals(Writer(policy), AnalyticProposals(policy))

    def refuse(*_):
        raise OptionError("a number of 9 digits has no place in a sentence")

    monkeypatch.setattr(proposals.writer, "configs", refuse)
    picks = proposals.propose(result, 8)
    assert picks == AnalyticProposals(policy).propose(result, 8)
    assert any("no sentence for stage matmul" in failure for failure in proposals.failures)


def test_the_table_of_rates_is_that_of_the_policy():
    policy = AnalyticPolicy(V4)
    assert rates_of(policy) is rates_of(RecordedPolicy(policy)) is policy.rates


def test_a_model_that_cannot_be_read_is_said_before_anything_is_measured(tmp_path: Path):
    (tmp_path / "a.npz").write_bytes(b"PK damaged")
    with pytest.raises(OptionError, match="not a language model that this gtco reads"):
        Writer(AnalyticPolicy(V4), file=tmp_path / "a.npz")
    with pytest.raises(OptionError, match="there is no language model"):
        Writer(AnalyticPolicy(V4), file=tmp_path / "none.npz")


def test_a_policy_is_one_of_two():
    with pytest.raises(OptionError, match="unknown policy 'tlm': choose from analytic, language"):
        Tune(policy="tlm")


def test_tuning_measures_what_was_written(model, tmp_path: Path):
    """Every candidate of the records was tried, and the pick that stands is in the space."""
    policy = AnalyticPolicy(detect())
    stages = [linear(), integers()]
    with Workers(1) as workers, Records(tmp_path / "a.records") as records:
        made = generate(stages, policy.choose, policy.target, workers)
        effort = Tune(trials=8, seconds=60.0, learned=False, policy="language-model")
        results = tune([made], policy, workers, threads=1, effort=effort, records=records)
        known = {row.parsed for row in records.under(circumstances(policy.target))}
    assert results and sum(r.measured for r in results) > 0
    for result in results:
        writer = Writer(policy)
        result.rounds = 0
        first = writer.configs(result, SEVERAL * 3, {result.first.config})
        assert known & set(first)
        assert space_of(result.stage, policy.target).check(result.last.config) is None


def test_the_cache_tells_models_under_one_name_apart(tmp_path: Path):
    file = tmp_path / "a.npz"
    effort = Tune(policy="language-model", weights=str(file))
    none = weights_digest(None)
    assert weights_digest(Tune()) == weights_digest(effort) == none  # it does not exist yet
    file.write_bytes(b"one")
    one = weights_digest(effort)
    file.write_bytes(b"two")
    assert len({none, one, weights_digest(effort)}) == 3
    with pytest.raises(OptionError, match="are of a language model"):
        Tune(weights=str(file))


def test_the_command_takes_the_policy(model, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    onnx = pytest.importorskip("onnx")
    onnx.save(small_model(), tmp_path / "m.onnx")
    arguments = ["tune", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.so"), "--verify"]
    arguments += ["--records", str(tmp_path / "r"), "--trials", "4", "--policy", "language-model"]
    assert main([*arguments, "--threads", "1", "--workers", "1"]) == 0
    assert (tmp_path / "m.so").exists()
    capsys.readouterr()
    with Records(tmp_path / "r") as records:
        assert records.all() and records.stages()
