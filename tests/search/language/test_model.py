"""The model's arithmetic, its file, and the sentences that it writes, whatever its weights are."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from math import log
from pathlib import Path
from random import Random

import numpy as np
import pytest

from gtco.machine.target import TARGETS
from gtco.search.language import model as module
from gtco.search.language.generation import Author
from gtco.search.language.model import VERSION, Sizes, load, save
from gtco.search.language.sentence import Grammar, write
from gtco.search.language.words import Vocabulary
from gtco.support.errors import OptionError
from gtco.tensor.space import Config, Decision, Space
from tests.search.language.corpora import spaces, untrained, vocabulary


def test_a_kept_prefix_gives_the_scores_of_the_whole():
    model = untrained()
    words = Random(0).choices(range(len(vocabulary())), k=40)
    whole = model.read(model.empty(), words)
    for cut in (1, 7, 39):
        prefix = model.read(model.empty(), words[:cut])
        for n in range(cut, 40, 3):
            prefix = model.read(prefix, words[n : n + 3])
        np.testing.assert_allclose(prefix.scores, whole.scores, rtol=1e-4, atol=1e-4)
    assert whole.length == 40


def test_later_words_do_not_change_what_was_said_before():
    model = untrained()
    words = Random(1).choices(range(len(vocabulary())), k=30)
    one, other = (model.read(model.empty(), [*words, last]) for last in (3, 4))
    np.testing.assert_allclose(one.keys[:, :30], other.keys[:, :30], rtol=1e-5, atol=1e-6)
    assert not np.allclose(one.scores, other.scores)


def test_a_sentence_may_be_longer_than_those_that_were_trained():
    model = untrained()
    found = model.read(model.empty(), [5] * (model.sizes.places + 3))
    assert np.isfinite(found.scores).all()


# sentences ----------------------------------------------------------------------------------------
def test_every_sentence_is_a_config_of_its_space():
    for n, space in enumerate(spaces(34)):
        author = Author(untrained(seed=n), space)
        found = author.propose(6, Random(n), temperature=1.5)
        assert found and len(set(found)) == len(found)
        assert all(space.check(config) is None for config in found)


def test_the_seed_decides_what_is_proposed_and_nothing_is_proposed_again():
    space = max(spaces(17), key=lambda s: len(list(islice(s.configs(), 200))))
    model = untrained()
    first = Author(model, space).propose(8, Random(5))
    assert Author(model, space).propose(8, Random(5)) == first
    assert Author(model, space).propose(8, Random(6)) != first
    assert first[0] == Author(model, space).greedy()
    again = Author(model, space).propose(8, Random(5), avoid=first)
    assert again and not set(again) & set(first)


def test_probabilities_of_all_configs_add_up_to_one():
    tried = 0
    for n, space in enumerate(spaces(34, seed=6)):
        every = list(islice(space.configs(), 400))
        if not 1 < len(every) < 400:
            continue
        tried += 1
        author = Author(untrained(seed=n), space)
        scores = {config: author.score(config) for config in every}
        assert sum(np.exp(list(scores.values()))) == pytest.approx(1.0, abs=1e-4)
        ranked = list(author.likeliest())
        assert {config for config, _ in ranked} == set(every)
        assert [s for _, s in ranked] == sorted((s for _, s in ranked), reverse=True)
        assert all(s == pytest.approx(scores[c], abs=1e-4) for c, s in ranked)
        assert author.propose(5, Random(0), temperature=0.0) == [c for c, _ in ranked[:5]]
    assert tried >= 5


def test_sentences_are_drawn_as_often_as_they_are_likely():
    space = next(s for s in spaces(34) if 3 <= len(list(islice(s.configs(), 20))) < 12)
    author = Author(untrained(), space)
    random = Random(0)
    seen = Counter(author.draw(random) for _ in range(3000))
    for config in space.configs():
        likely = np.exp(author.score(config))
        assert seen[config] / 3000 == pytest.approx(likely, abs=5 * (likely / 3000) ** 0.5 + 1e-3)


def test_a_small_space_is_proposed_whole():
    space = next(s for s in spaces(34) if len(list(islice(s.configs(), 20))) == 1)
    assert Author(untrained(), space).propose(5, Random(0)) == list(space.configs())


def test_a_config_of_another_space_has_no_score():
    with pytest.raises(OptionError, match="cannot be written"):
        Author(untrained(), spaces(1)[0]).score(Config("no such sketch"))


@dataclass(frozen=True)
class Grown:
    """A sketch that training has never seen, with decisions and options that have no words."""

    name: str = "grown since"

    def next_decision(self, chosen):
        if "widget" not in chosen:
            return Decision("widget", "block", ("round", "square", 123456789))
        if "depth" not in chosen and chosen["widget"] == "round":
            return Decision("depth", "block", (3, 1 << 33))
        return None


def test_a_space_that_has_grown_since_training_is_written_all_the_same():
    """New decisions and options are spelled, and every config has a chance."""
    space = Space(spaces(1)[0].stage, TARGETS["znver4"], (Grown(),))
    author = Author(untrained(), space)
    every = dict(author.likeliest())
    assert set(every) == set(space_configs(space)) and len(every) == 4
    assert all(np.isfinite(score) for score in every.values())
    assert len(author.propose(4, Random(0), temperature=2.0)) == 4


def space_configs(space: Space) -> list[Config]:
    return [
        Config("grown since", (("widget", "round"), ("depth", 3))),
        Config("grown since", (("widget", "round"), ("depth", 1 << 33))),
        Config("grown since", (("widget", "square"),)),
        Config("grown since", (("widget", 123456789),)),
    ]


def test_a_decision_of_one_option_is_certain():
    author = Author(untrained(), spaces(1)[0])
    config = author.greedy()
    sentence = write(Grammar(vocabulary()), author.space, config)
    assert author.score(config) <= 0.0 and len(sentence) > 2
    assert author.score(config) >= len(sentence) * log(1e-9)


# the file -----------------------------------------------------------------------------------------
def test_a_model_is_read_as_it_was_written(tmp_path: Path):
    model = untrained()
    save(model, tmp_path / "a.npz")
    again = load(tmp_path / "a.npz")
    assert again.vocabulary == model.vocabulary and again.sizes == model.sizes
    assert again.about == model.about
    words = list(range(20))
    one, other = (m.read(m.empty(), words).scores for m in (model, again))
    np.testing.assert_allclose(one, other, atol=0.05 * np.abs(one).max())
    assert not list(tmp_path.glob("*.new*"))


def test_a_damaged_file_is_an_error(tmp_path: Path):
    """Bytes that are changed, or missing at the end."""
    file, other = tmp_path / "a.npz", tmp_path / "b.npz"
    save(untrained(), file)
    whole, sound = file.read_bytes(), load(file)
    random, said = Random(0), 0
    for n in range(40):
        at = random.randrange(len(whole) - 50)
        spoilt = whole[:at] if n % 4 == 0 else whole[:at] + random.randbytes(50) + whole[at + 50 :]
        other.write_bytes(spoilt)
        try:
            found = load(other)
        except OptionError as error:
            assert "not a language model that this gtco reads" in str(error)
            said += 1
        else:
            assert all(np.array_equal(found.weights[n], sound.weights[n]) for n in sound.weights)
    assert said >= 20
    with pytest.raises(OptionError, match="there is no language model"):
        load(tmp_path / "none.npz")


def rewritten(file: Path, **changes) -> None:
    with np.load(file) as data:
        arrays = dict(data)
    header = json.loads(arrays.pop("header").tobytes())
    arrays |= {n: changes.pop(n) for n in list(changes) if n in arrays}
    text = np.frombuffer(json.dumps({**header, **changes}).encode(), np.uint8)
    np.savez(file, header=text, **arrays)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": VERSION + 1}, f"has version {VERSION + 1}, and this gtco reads {VERSION}"),
        ({"vocabulary": ["=1", "=2"]}, "it lacks"),
        ({"vocabulary": [*vocabulary().words, "=more"]}, "words are trained"),
        ({"vocabulary": [*vocabulary().words[:-1], "=1"]}, "stands there twice"),
        ({"sizes": {"words": 7, "strange": 1}}, "strange"),
        ({"0.qkv": np.zeros((3, 3), np.float16)}, "0.qkv has another shape"),
        ({"last": np.full(16, np.nan, np.float16)}, "values that are none"),
    ],
)
def test_a_file_of_something_else_is_an_error(tmp_path: Path, changes, said):
    file = tmp_path / "a.npz"
    save(untrained(), file)
    rewritten(file, **changes)
    with pytest.raises(OptionError, match="not a language model that this gtco reads") as error:
        load(file)
    assert said in str(error.value) and "python -m gtco.bench language_model" in str(error.value)


def test_an_older_vocabulary_works_as_long_as_it_can_spell(tmp_path: Path):
    """One with the basic words alone spells everything else."""
    save(untrained(Vocabulary.of([])), tmp_path / "a.npz")
    space = spaces(1)[0]
    config = Author(load(tmp_path / "a.npz"), space).greedy()
    assert space.check(config) is None


def test_parameters_are_counted():
    sizes = Sizes(1000)
    assert 8e5 < sizes.parameters < 3e6
    assert replace(sizes, layers=0).parameters < sizes.parameters


def test_the_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(untrained(), tmp_path / "a.npz")
    module.loaded.cache_clear()
    assert module.loaded(tmp_path / "a.npz") is module.loaded(tmp_path / "a.npz")
