"""The model that ships with gtco: it is small, it is read, and it beats chance where it was
trained.
"""

from __future__ import annotations

from statistics import geometric_mean

import pytest

from bench.harness import readings
from bench.language.data.demonstrations import of_readings
from bench.language.evaluation.evaluate import judge
from gtco.search.language.model import SHIPPED, load
from tests.search.language.corpora import spaces


def test_it_is_small_and_says_how_it_was_trained():
    assert SHIPPED.stat().st_size <= 3 << 20
    model = load(SHIPPED)
    assert 5e5 < model.sizes.parameters <= 3e6
    assert {"pretrained", "ranked", "measured"} <= set(model.about)


def test_it_knows_the_words_of_most_decisions():
    """It was trained on this space, or on one that is nearly the same."""
    known = load(SHIPPED).vocabulary.numbers
    names = set()
    for space in spaces(34):
        chosen: dict[str, int | str] = {}
        while decision := space.next_decision(chosen):
            names.add(f"d.{decision.name}")
            chosen[decision.name] = decision.options[0]
    assert len(names & set(known)) >= 0.6 * len(names)


@pytest.mark.parametrize("file", sorted(readings.FOLDER.glob("*.gz")), ids=lambda f: f.name)
def test_it_beats_chance_on_what_was_measured(file):
    """On some stages of each file of readings: of one machine it was trained with all of them, of
    the others with none. docs/papers/tlm.md has the figures over all stages.
    """
    model = load(SHIPPED)
    found = [judge(model, shown) for shown in of_readings(file)[::4]]
    ours, chance = (
        geometric_mean(j.quality[name][0] for j in found) for name in ("language model", "random")
    )
    assert ours > chance
