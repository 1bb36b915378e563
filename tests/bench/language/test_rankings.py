"""Rankings that a language model learns from, and the listwise learning itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from bench.harness import readings
from bench.language.data import rankings, sample
from bench.language.data.demonstrations import policy_of
from bench.language.data.machines import Place
from bench.language.data.rankings import KEPT, Rankings, rankings_of, taught
from bench.language.data.workloads import Workload
from bench.language.evaluation.ablate import VARIANTS, ablate, silent
from bench.language.training import finetune, listwise
from bench.language.training.network import Network
from bench.language.training.train import Course, train
from gtco.machine.target import TARGETS
from gtco.search.language.generation import Author
from gtco.search.language.model import Sizes
from gtco.search.language.prompt import prompt
from gtco.search.language.sentence import Grammar
from gtco.search.language.sentence import read as understood
from gtco.search.language.words import Vocabulary
from gtco.search.policy import priced
from gtco.support.errors import OptionError
from gtco.tensor.sketch import space_of

PLACE = Place(TARGETS["znver4"])
SOME = [stage.canonical for stage in list(readings.STAGES.values())[:19:9]]  # one is a convolution
COURSE = Course(epochs=100, words=1200, rate=8e-3, kept=1e9)


@pytest.fixture(scope="module")
def toy() -> tuple[Vocabulary, Rankings]:
    vocabulary = sample.vocabulary_of({Workload("toy"): SOME})
    policy, grammar = policy_of(PLACE), Grammar(vocabulary)
    found = [taught(grammar, stage, PLACE, policy, Random(0)) for stage in SOME]
    return vocabulary, rankings_of([one for one in found if one is not None])


def network(vocabulary: Vocabulary) -> Network:
    return Network(Sizes(len(vocabulary), layers=2, width=32, heads=2), vocabulary, seed=3)


def test_a_ranking_has_the_price_of_each_of_its_sentences(toy):
    vocabulary, every = toy
    assert len(every) == len(SOME) and (np.diff(every.starts) == KEPT).all()
    policy, grammar = policy_of(PLACE), Grammar(vocabulary)
    for n, stage in enumerate(SOME):
        space, own = space_of(stage, PLACE.machine), range(every.starts[n], every.starts[n + 1])
        found = []
        for row in own:
            words = every.words[row][every.words[row] >= 0].tolist()
            pick = priced(policy, space, understood(grammar, space, words))
            assert pick is not None
            found.append(pick.seconds)
            assert all(w in every.sets[s] for w, s in zip(words, every.legal[row], strict=False))
        wanted = np.exp(every.slower[own.start : own.stop])
        np.testing.assert_allclose(np.array(found) / min(found), wanted, rtol=1e-5)


def test_the_likelihood_is_what_an_author_ranks_by(toy):
    """Read with one prompt for all sentences of a ranking, and prompts of several lengths."""
    vocabulary, every = toy
    made = network(vocabulary)
    batch = listwise.batch_of(every, np.arange(len(every)), None)
    with torch.no_grad():
        total, _ = listwise.likelihoods(made, every, batch)
    model, grammar = made.model({}), Grammar(vocabulary)
    for n, stage in enumerate(SOME):
        space = space_of(stage, PLACE.machine)
        author = Author(model, space)
        for k in (0, 7, KEPT - 1):
            words = every.words[every.starts[n] + k]
            config = understood(grammar, space, words[words >= 0].tolist())
            assert author.score(config) == pytest.approx(float(total[n, k]), abs=2e-3)


def test_a_toy_learns_an_order_by_heart(toy, tmp_path: Path):
    """After it, each ranking's likeliest sentence is the fastest, and likelihood follows time."""
    vocabulary, every = toy
    made = network(vocabulary)
    done, curve = train(made, every, every, COURSE, tmp_path / "toy.state")
    assert done and len(curve) == 1
    batch = listwise.batch_of(every, np.arange(len(every)), None)
    with torch.no_grad():
        total, illegal = listwise.likelihoods(made, every, batch)
    for row, slower in zip(total.numpy(), batch.slower.numpy(), strict=True):
        assert slower[row.argmax()] < 0.02
        near = slower < listwise.SLOPE
        assert np.corrcoef(row[near], -slower[near])[0, 1] > 0.6
    assert illegal < 0.5


def test_files_of_rankings_come_back_and_damage_is_noticed(toy, tmp_path: Path):
    vocabulary, every = toy
    file = tmp_path / "ranked" / "one.npz"
    for n in range(2):
        part = every.part(np.arange(n, len(every), 2))
        rankings.write_file(part, vocabulary, file.with_name(f"{n}.npz"))
    again = rankings.read_all(file.parent, vocabulary)
    assert sorted(again.stages) == sorted(every.stages)
    for n, stage in enumerate(again.stages):
        m = list(every.stages).index(stage)
        for row, other in zip(
            range(again.starts[n], again.starts[n + 1]),
            range(every.starts[m], every.starts[m + 1]),
            strict=True,
        ):
            assert (again.words[row] == every.words[other]).all()
            count = (again.words[row] >= 0).sum()
            ours = [again.sets[x] for x in again.legal[row][:count]]
            assert ours == [every.sets[x] for x in every.legal[other][:count]]
            assert again.slower[row] == every.slower[other]
    whole = file.with_name("0.npz").read_bytes()
    for cut in (0, 40, len(whole) // 2):
        file.write_bytes(whole[:cut])
        assert rankings.read_file(file, vocabulary) is None
    with pytest.raises(OptionError, match="another vocabulary"):
        rankings.read_file(file.with_name("1.npz"), Vocabulary.of(["o.new"]))
    assert len(again.besides({SOME[0].key})) == len(every) - 1


def test_batches_have_each_ranking_once(toy):
    _, every = toy
    many = rankings.joined([every] * 5)
    for most in (1, 3000, 100_000):
        found = list(many.batches(most, np.random.default_rng(0)))
        assert sorted(np.concatenate(found)) == list(range(len(many)))
        assert (max(map(len, found)) == 1) == (most == 1)


def test_what_was_measured_is_learned_beside_the_price(toy):
    _, every = toy
    with pytest.raises(OptionError, match="no measured stage is left"):
        finetune.beside([], every)
    best = finetune.best_only(every)
    assert len(best) == len(every) and list(best.stages) == list(every.stages)
    begin = int(best.prompts[1])
    own = slice(every.starts[1], every.starts[2])
    words = every.words[own][every.slower[own].argmin()]
    assert best.words[1][begin:][: len(words)].tolist() == words.tolist()


def test_a_stage_without_a_choice_has_no_ranking(toy):
    vocabulary, _ = toy
    place = replace(PLACE, machine=TARGETS["znver4"])
    space = space_of(SOME[0], place.machine)
    times = {space.sample(Random(n)): 1.0 + n for n in range(3)}
    grammar = Grammar(vocabulary)
    assert rankings.ranking_of(grammar, SOME[0], space, place, times) is None


def test_variants_of_the_training_are_judged_alike(toy):
    vocabulary, every = toy
    base = network(vocabulary).model({})
    said: list[str] = []
    some = {name: VARIANTS[name] for name in list(VARIANTS)[:4]}
    found = ablate(base, every, {"toy": every}, 0.2, said.append, variants=some)
    assert list(found) == list(some) and len(said) == len(some)
    for outcome in found.values():
        assert outcome.steps > 0
        assert set(outcome.quality) == {"unseen stages by their price", "toy"}
        assert all(0 < value <= 1 for value in outcome.quality.values())


def test_a_prompt_may_say_nothing_of_the_machine(toy):
    vocabulary, every = toy
    less = silent(every, vocabulary)
    for n, stage in enumerate(SOME):
        own = less.prompts[n][less.prompts[n] >= 0].tolist()
        assert own == prompt(vocabulary, stage, [])
    assert (less.words == every.words).all()
