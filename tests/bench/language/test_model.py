"""The language model's pipeline on a toy: a network that must learn ten stages by heart, a training
that is stopped and goes on, a corpus that is made piece by piece, and what was measured before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.harness import readings
from bench.language import language_model
from bench.language.data import corpus, demonstrations, sample, teaching
from bench.language.data.corpus import Corpus, Sentence, corpus_of
from bench.language.data.demonstrations import Demonstration, of_readings
from bench.language.data.machines import MACHINES, Place, places
from bench.language.data.resizing import resized
from bench.language.data.stages import Collected, read
from bench.language.data.stages import write as keep
from bench.language.data.workloads import CPU, GPU, HELD_OUT, Workload, workloads
from bench.language.evaluation import evaluate
from bench.language.training import finetune
from bench.language.training.network import Network
from bench.language.training.train import Course, train
from gtco.machine.target import TARGETS
from gtco.search.language.generation import Author
from gtco.search.language.model import Sizes, load
from gtco.search.language.prompt import machine_words, prompt
from gtco.search.language.sentence import Grammar, write
from gtco.search.language.words import Vocabulary
from gtco.search.records.records import Record, circumstances
from gtco.support.errors import OptionError
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage

PLACE = Place(TARGETS["znver4"])
TEN = [stage.canonical for stage in list(readings.STAGES.values())[:10]]
COURSE = Course(epochs=220, words=900, rate=8e-3, kept=1e9)


@pytest.fixture(scope="module")
def toy() -> tuple[Vocabulary, list[Demonstration], Corpus]:
    """Ten stages, each with a config that was drawn."""
    vocabulary = sample.vocabulary_of({Workload("toy"): TEN})
    shown = [
        Demonstration(stage, PLACE, space_of(stage, PLACE.machine).sample(Random(n)), "toy", {})
        for n, stage in enumerate(TEN)
    ]
    grammar = Grammar(vocabulary)
    return vocabulary, shown, corpus_of(sentence_of(grammar, one) for one in shown)


def sentence_of(grammar: Grammar, shown: Demonstration) -> Sentence:
    said = machine_words(shown.place.machine, shown.place.rates)
    begin = prompt(grammar.vocabulary, shown.stage, said)
    words = (*begin, *write(grammar, shown.space, shown.config))
    return Sentence(shown.stage.key, words, len(begin))


def network(vocabulary: Vocabulary) -> Network:
    return Network(Sizes(len(vocabulary), layers=2, width=32, heads=2), vocabulary)


def test_a_toy_learns_ten_stages_by_heart(toy, tmp_path: Path):
    """After it, the greedy sentence of each stage is the one that was shown, with numpy alone."""
    vocabulary, shown, every = toy
    made = network(vocabulary)
    done, curve = train(made, every, every, COURSE, tmp_path / "toy.state")
    assert done and curve[-1].unseen < 0.05
    model = made.model({})
    for one in shown:
        author = Author(model, one.space)
        assert author.greedy() == one.config
        assert author.score(one.config) > np.log(0.5)
    assert evaluate.errors(model, shown, 3) < 0.2
    assert evaluate.agreement(model, shown).model[0] == 1.0


def test_torch_and_numpy_compute_the_same(toy):
    import torch

    vocabulary, _, every = toy
    made = network(vocabulary)
    words = every.words[3][: every.lengths[3]].tolist()
    model = made.model({})
    with torch.no_grad():
        wanted = made(torch.tensor([words]))[0, -1].numpy()
    np.testing.assert_allclose(model.read(model.empty(), words).scores, wanted, atol=1e-4)


class Killed(Exception):
    pass


def test_a_training_that_is_killed_after_any_step_ends_where_it_would_have(toy, tmp_path: Path):
    vocabulary, _, every = toy
    course = replace(COURSE, epochs=4, kept=0.0)
    whole, file = network(vocabulary), tmp_path / "parts.state"
    train(whole, every, every, course, tmp_path / "whole.state")

    def kill(text: str) -> None:
        raise Killed(text)

    steps = 0
    while True:
        parts = network(vocabulary)
        try:
            done, curve = train(parts, every, every, course, file, say=kill)
        except Killed:
            steps += 1
            continue
        break
    assert done and steps == len(curve) == 4
    for name, array in whole.arrays().items():
        np.testing.assert_allclose(parts.arrays()[name], array, atol=1e-6)


def test_a_damaged_state_or_another_course_is_an_error(toy, tmp_path: Path):
    vocabulary, _, every = toy
    course, file = replace(COURSE, epochs=1), tmp_path / "toy.state"
    train(network(vocabulary), every, every, course, file)
    with pytest.raises(OptionError, match="has another rate"):
        train(network(vocabulary), every, every, replace(course, rate=1.0), file)
    whole = file.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 3):
        file.write_bytes(whole[:cut])
        with pytest.raises(OptionError, match="is damaged"):
            train(network(vocabulary), every, every, course, file)


# sentences ----------------------------------------------------------------------------------------
def test_sampling_goes_on_and_leaves_held_out_stages_alone(tmp_path: Path):
    """Stages are given as if they had been collected; held-out ones get no sentence."""
    held, own, late = Workload(HELD_OUT[0]), Workload("one"), Workload("two")
    keep(Collected(held, tuple((s, 1) for s in TEN[:2])), tmp_path)
    keep(Collected(own, tuple((s, 2) for s in TEN[1:4]), considered=(TEN[0], TEN[4])), tmp_path)
    said: list[str] = []
    first = sample.sampled(tmp_path, (), 0.0, said.append, [held, own, late])
    stages = set(first.stages)
    assert {TEN[n].key for n in (2, 3, 4)} <= stages and not {TEN[0].key, TEN[1].key} & stages
    assert (first.lengths <= 128).all() and len({w.tobytes() for w in first.words}) == len(first)
    keep(Collected(late, tuple((s, 1) for s in TEN[3:6])), tmp_path)
    said.clear()
    more = sample.sampled(tmp_path, (), 0.0, said.append, [held, own, late])
    assert len(said) == 1 and said[0].startswith("two.cpu")  # the first file is not made again
    assert TEN[5].key in set(more.stages) and len(more) > len(first)
    file = tmp_path / "sampled" / f"{own.name}.npz"
    file.write_bytes(file.read_bytes()[:100])  # a damaged file is made again, the same
    again = sample.sampled(tmp_path, (), 0.0, said.append, [held, own, late])
    np.testing.assert_array_equal(again.words, more.words)
    fewer = again.besides({TEN[5].key})  # it turns out to be a held-out model's
    assert TEN[5].key not in set(fewer.stages) and 0 < len(fewer) < len(again)
    corpus.write_vocabulary(Vocabulary.of(["o.new"]), tmp_path)
    with pytest.raises(OptionError, match="another vocabulary"):
        sample.sampled(tmp_path, (), 0.0, said.append, [own])


def test_a_workload_that_is_refused_is_kept_with_its_reason(tmp_path: Path):
    keep(Collected(Workload("one"), failed="ModelError: no"), tmp_path)
    found = read(Workload("one"), tmp_path)
    assert found is not None and found.failed == "ModelError: no" and not found.stages
    (tmp_path / "stages" / f"{Workload('one').name}.json.gz").write_bytes(b"\x1f\x8b damaged")
    assert read(Workload("one"), tmp_path) is None
    with pytest.raises(OptionError, match="run python -m bench language_model sample first"):
        sample.sampled(tmp_path, (), 0.0, print, [Workload("two")])


def test_workloads_and_machines_are_many_and_always_the_same():
    every = list(workloads())
    assert len({w.name for w in every}) > 300
    assert len({w.model for w in every if w.held_out}) >= 12
    assert {w.model for w in every if w.held_out} == set(HELD_OUT)
    for kind in (CPU, GPU):
        assert len(places(kind)) == MACHINES and places(kind) == places(kind)


def test_resized_stages_are_programs_of_other_sizes():
    found = [resized(stage, Random(n)) for n, stage in enumerate(TEN)]
    others = [stage for stage in found if stage is not None]
    assert len(others) == len(TEN) and not {s.key for s in others} & {s.key for s in TEN}
    for stage, other in zip(TEN, others, strict=True):
        assert stage.label == other.label
        assert space_of(other, PLACE.machine).sketches
    convolution = readings.STAGES["convolution 56x56x64 to 64, 3x3 by 1"]
    assert resized(convolution, Random(0)) is None


# what was measured --------------------------------------------------------------------------------
FILES = sorted(readings.FOLDER.glob("*.gz"))


def test_readings_demonstrate_their_fastest_configs():
    shown = of_readings(FILES[0])
    assert len(shown) == 23
    for one in shown:
        assert one.space.check(one.config) is None
        assert one.times[one.config] == min(one.times.values())


def rows(stage: Stage, configs: list[Config], ratios: list[float], known: str) -> list[Record]:
    sketch = space_of(stage, PLACE.machine).sketches[0]
    found = []
    for n, (config, ratio) in enumerate(zip(configs, ratios, strict=True)):
        pick = Pick(sketch, config, 1e-3)
        outcome = "taken" if ratio == min(ratios) else "beaten" if n == 0 else "slower"
        found.append(Record.of(stage, pick, known, outcome, (1e-3 * ratio, ratio, 0.0)))
    return found


def test_records_demonstrate_the_fastest_and_count_what_is_lost():
    """A stage without a program, and one whose configs its space no longer has, teach nothing."""
    stage, known = TEN[0], circumstances(PLACE.machine)
    random, space = Random(0), space_of(TEN[0], PLACE.machine)
    configs = list({space.sample(random): None for _ in range(9)})[:4]
    gone = Config("gemm", (("tile", "7x7"),))
    given = [
        *rows(stage, configs, [1.0, 0.8, 1.2, 1.1], known),
        *rows(TEN[1], configs[:1], [1.0], known),  # no program is given
        *rows(TEN[2], [gone], [1.0], known),
        *rows(stage, configs[:1], [1.0], '{"gpu": "H100"}'),
    ]
    programs = {s.key: s for s in (stage, TEN[2])}
    shown, lost = demonstrations.of_records(given, programs, {}, "text")
    assert [one.config for one in shown] == [configs[1]] and lost == 3
    assert set(shown[0].times) == set(configs)


def test_a_model_is_judged_by_what_was_measured(toy):
    vocabulary, *_ = toy
    shown = of_readings(FILES[-1])[0]
    few = dict(list(shown.times.items())[:12])
    found = evaluate.judge(network(vocabulary).model({}), replace(shown, times=few))
    for system in ("language model", "analytic", "random"):
        values = found.quality[system]
        assert all(0 < v <= 1 for v in values) and sorted(values) == list(values)
        assert values[-1] == pytest.approx(1.0)  # twelve configs, more trials
    both = evaluate.summary([found, found])
    assert both.stages == 2 and both.quality["analytic"] == pytest.approx(found.quality["analytic"])
    assert "language model" in "\n".join(evaluate.lines("toy", both))


def test_chance_is_what_drawing_gives():
    times = [1.0, 1.3, 2.0, 4.0, 5.0]
    for k in (1, 2, 3, 5, 9):
        random = Random(k)
        drawn = [min(random.sample(times, min(k, 5))) for _ in range(20000)]
        mean = float(np.mean([1.0 / t for t in drawn]))
        assert evaluate.expected(times, k) == pytest.approx(mean, abs=0.01)


# the commands -------------------------------------------------------------------------------------
def test_the_steps_follow_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    """From collected stages to a model that is judged, with a network for toys."""
    own, held = Workload("vit"), Workload(HELD_OUT[0])
    keep(Collected(own, tuple((s, 1) for s in TEN[:3])), tmp_path)
    keep(Collected(held, ((TEN[3], 1),)), tmp_path)
    monkeypatch.setattr(language_model, "workloads", lambda: [own, held])
    monkeypatch.setattr(sample, "workloads", lambda: [own, held])
    monkeypatch.setattr(sample, "PLACES", 1)
    monkeypatch.setattr(finetune, "MEASURED", replace(finetune.MEASURED, epochs=1))
    monkeypatch.setattr(teaching, "PLACES", {True: 1, False: 1})
    folder = ["--folder", str(tmp_path)]
    run = language_model.main
    with pytest.raises(OptionError, match="has no vocabulary: run"):
        run(["pretrain", *folder])
    assert run(["sample", *folder]) == 0
    assert run(["rank", *folder]) == 0
    assert run(["pretrain", *folder, "--layers", "1", "--width", "32", "--epochs", "1"]) == 0
    assert run(["finetune", *folder]) == 0  # nothing was measured: it ends with the price's ranks
    assert {"pretrained", "ranked"} == set(load(tmp_path / "base.ranked.npz").about)
    files = ["--readings", str(FILES[-1])]
    assert run(["finetune", *folder, *files, "--seeds", "1"]) == 0
    made = tmp_path / "finetuned.npz"
    assert {"pretrained", "ranked", "measured"} <= set(load(made).about)
    capsys.readouterr()
    few = of_readings(FILES[-1])[:2]
    monkeypatch.setattr(demonstrations, "of_readings", lambda file: few)
    report = tmp_path / "report.json"
    assert run(["evaluate", *folder, *files, "--model", str(made), "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "language model" in said and "are not configs" in said and report.exists()
