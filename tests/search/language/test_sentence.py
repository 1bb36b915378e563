"""Sentences: config and sentence are one thing in two forms, in every space; and the words that may
follow a prefix are exactly those that some config has there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtco.machine.target import TARGETS, Target
from gtco.search.language.prompt import LONGEST as LONGEST_PROMPT
from gtco.search.language.prompt import machine_words, prompt
from gtco.search.language.sentence import (
    LONGEST,
    Cursor,
    Grammar,
    after,
    begin,
    next_decision,
    read,
    write,
)
from gtco.search.language.words import BASIC, FEATURES, Vocabulary
from gtco.support.errors import OptionError
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Decision, Space
from tests.search.language.corpora import spaces, vocabulary
from tests.stages import CORES

COUNT = 3 * len(CORES)


def test_config_and_sentence_are_each_others_inverse_in_every_sketch():
    """With the fewest words, where everything is spelled, and with words for most of it."""
    seen = set()
    for n, space in enumerate(spaces(COUNT)):
        random = Random(n)
        for words in (Vocabulary.of([]), vocabulary()):
            grammar = Grammar(words)
            config = space.sample(random)
            sentence = write(grammar, space, config)
            assert read(grammar, space, sentence) == config
            seen.add((config.sketch, space.target.kind))
            said = prompt(words, space.stage, machine_words(space.target))
            assert len(said) <= LONGEST_PROMPT
            if words is vocabulary():
                assert len(said) + len(sentence) <= LONGEST
    assert len({sketch for sketch, kind in seen if kind == "cpu"}) >= 14
    assert len({sketch for sketch, kind in seen if kind == "cuda"}) >= 9


def test_different_configs_have_different_sentences():
    for space in spaces(COUNT, seed=2):
        grammar = Grammar(vocabulary())
        some = list(islice(space.configs(), 300))
        assert len({tuple(write(grammar, space, config)) for config in some}) == len(some)


def test_the_legal_words_are_those_that_some_config_has_there():
    """Against the sentences of all configs, in spaces that are small enough."""
    tried = 0
    for space in spaces(COUNT, seed=3):
        every = list(islice(space.configs(), 1500))
        if len(every) == 1500 or len(every) < 2:
            continue
        tried += 1
        start = begin(vocabulary(), space)
        follows = defaultdict(set)
        for config in every:
            sentence = tuple(write(start.grammar, space, config))
            for n, word in enumerate(sentence):
                follows[sentence[:n]].add(word)
            follows[sentence] = set()
        prefixes = Random(0).sample(sorted(follows), min(len(follows), 60))
        for prefix in prefixes:
            assert next_decision(start, prefix) == follows[prefix]
    assert tried >= 10


def test_every_walk_along_legal_words_is_a_config():
    for n, space in enumerate(spaces(COUNT, seed=4)):
        random, cursor = Random(n), begin(vocabulary(), space)
        words = []
        while legal := cursor.legal():
            word = random.choice(sorted(legal))
            words.append(word)
            cursor = legal[word]
        assert space.check(cursor.config) is None
        assert write(cursor.grammar, space, cursor.config) == words


@dataclass(frozen=True)
class Chosen:
    """A sketch of one decision."""

    options: tuple[int | str, ...]
    name: str = "strange"

    def next_decision(self, chosen):
        return None if "new decision" in chosen else Decision("new decision", "block", self.options)


def strange_space(*options):
    stage = spaces(1)[0].stage
    return Space(stage, TARGETS["znver4"], (Chosen(options),))


@given(
    st.lists(
        st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=12)),
        min_size=1,
        max_size=8,
        unique_by=lambda o: (type(o), o),
    )
)
@settings(max_examples=150, deadline=None)
def test_any_options_can_be_written(options):
    """Also those that would be spelled alike, as 13x2 and 13:2, or 7 and "7"."""
    space, grammar = strange_space(*options), Grammar(vocabulary())
    for option in options:
        config = Config("strange", (("new decision", option),))
        got = read(grammar, space, write(grammar, space, config))
        assert got == config and type(got["new decision"]) is type(option)


@pytest.mark.parametrize("options", [("13x2", "13:2", "13"), (7, "7", "07"), ("", " ", "\n", "é")])
def test_options_that_could_be_spelled_alike_are_told_apart(options):
    space, grammar = strange_space(*options), Grammar(vocabulary())
    configs = [Config("strange", (("new decision", option),)) for option in options]
    assert [read(grammar, space, write(grammar, space, c)) for c in configs] == configs


def test_a_number_beside_a_longer_one_can_end():
    """1 and 1x2 begin with the same word; what follows it is the end or the other's next field."""
    space = strange_space("1", "1x2")
    start = begin(vocabulary(), space)
    prefix = write(start.grammar, space, Config("strange", (("new decision", "1"),)))
    assert len(next_decision(start, prefix[:-1])) == 2


def test_a_word_that_may_not_stand_there_is_refused():
    space = spaces(1)[0]
    start = begin(vocabulary(), space)
    sentence = write(start.grammar, space, next(space.configs()))
    with pytest.raises(OptionError, match=r"cannot be '<end>': there may be d\.sketch"):
        after(start, [start.grammar.end])
    with pytest.raises(OptionError, match="there may be nothing more"):
        after(start, [*sentence, 0])
    with pytest.raises(OptionError, match="cannot be '<unknown>'"):
        after(start, [len(vocabulary())])
    with pytest.raises(OptionError, match="ends before its last decision"):
        read(start.grammar, space, sentence[:-1])


def test_a_config_of_another_space_is_not_written():
    with pytest.raises(OptionError, match="cannot be written as a sentence: unknown sketch"):
        write(Grammar(vocabulary()), spaces(1)[0], Config("no such sketch"))


def test_a_stage_without_a_sketch_has_no_sentence():
    space = replace(spaces(1)[0], sketches=())
    with pytest.raises(OptionError, match="it has no sketch"):
        begin(vocabulary(), space)


def test_a_sentence_that_has_not_ended_has_no_config():
    with pytest.raises(ValueError, match="not ended"):
        _ = Cursor(Grammar(vocabulary()), spaces(1)[0]).config


def test_the_prompt_is_of_the_program_and_the_machine():
    """Names do not count; sizes, formats and the machine do."""
    space = next(s for s in spaces(9) if s.target.kind == "cpu")
    said = prompt(vocabulary(), space.stage, machine_words(space.target))
    assert said == prompt(vocabulary(), space.stage.canonical, machine_words(space.target))
    machine = space.target
    assert isinstance(machine, Target)
    for other in (
        replace(machine, cores=machine.cores + 1),
        replace(machine, frequency=2 * machine.frequency),
        replace(
            machine, memory=tuple(replace(m, bandwidth=2 * m.bandwidth) for m in machine.memory)
        ),
    ):
        assert machine_words(other) != machine_words(machine)
    stages = {space.stage.key: space.stage for space in spaces(COUNT)}.values()
    different = {tuple(prompt(vocabulary(), s, machine_words(machine))) for s in stages}
    assert len(different) >= 0.9 * len(stages)


def test_vocabularies_have_what_values_are_spelled_with():
    with pytest.raises(OptionError, match="it lacks"):
        Vocabulary(("=1", "=2"))
    with pytest.raises(OptionError, match="stands there twice"):
        Vocabulary((*BASIC, "=1"))


def test_words_of_near_numbers_look_alike():
    words = Vocabulary.of(["m.fma=9"])
    found = words.features
    assert found.shape == (len(words), FEATURES)
    number = words.number

    def apart(a: str, b: str) -> float:
        return float(np.abs(found[number(a)][3:19] - found[number(b)][3:19]).sum())

    assert apart("=100", "=101") < apart("=100", "=120") < apart("=100", "=250")
    assert not found[number("d.sketch")].any() and found[number("m.fma=9")].any()


def test_every_sentence_is_of_a_space_that_is_there():
    """The spaces that the tests above draw from are not empty ones."""
    found = spaces(COUNT)
    assert len(found) > COUNT
    assert all(space_of(s.stage, s.target).size > 0 for s in found[:6])
