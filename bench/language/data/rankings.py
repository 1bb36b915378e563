"""Rankings: for a stage on a machine several configs, each with its time, as the words of sentences
that share one prompt.

A model of language ranks configs by their likelihood, so this is what it should learn: which of two
sentences is the better one, and by how much. Times come from two sources:

- the analytic price of drawn configs (:func:`taught`), of which there are as many as one likes,
  because nothing is built;
- measurements, as :mod:`bench.language.data.demonstrations` reads them.

With each word stands the set of words that were legal there. So a training knows the likelihood
among these, which is what :class:`gtco.search.language.generation.Author` ranks by.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from gtco.search.language.prompt import machine_words, prompt
from gtco.search.language.sentence import LONGEST, Cursor, Grammar, write
from gtco.search.language.words import Vocabulary
from gtco.search.policy import Policy, priced
from gtco.support.errors import GtcoError, OptionError
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Decision, Option, Sketch, Space
from gtco.tensor.stage import Stage

from . import archive
from .machines import Place

LEAST = 4  # different configs of a ranking
DRAWN, BEST = 40, 8  # configs that are drawn at random; the best of them change
CHANGED = (4, 2)  # changes of each of the best, in two rounds
KEPT = 32  # configs of a ranking: a half are the cheapest, the others are drawn from the rest
FARTHEST = 8.0  # the logarithm of a time over the best one is cut here


@dataclass(frozen=True)
class Ranking:
    """One stage on one machine: the words of the prompt, those of each config's decisions, the
    legal words at each of these, and the logarithm of each time over the best one.
    """

    stage: str
    prompt: tuple[int, ...]
    sentences: tuple[tuple[int, ...], ...]
    legal: tuple[tuple[frozenset[int], ...], ...]
    slower: tuple[float, ...]


@dataclass(frozen=True)
class Rankings:
    """Many rankings as arrays. A place without a word holds -1.

    - ``prompts`` [rankings, words]; ``stages``, the key of each ranking's stage
    - ``starts`` [rankings + 1]: the sentences of each ranking
    - ``words`` [sentences, words] of the decisions; ``legal``, of the same shape, the place in
      ``sets`` of the legal words there; ``slower`` [sentences]
    """

    prompts: np.ndarray
    stages: np.ndarray
    starts: np.ndarray
    words: np.ndarray
    legal: np.ndarray
    slower: np.ndarray
    sets: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The longest prompt and sentence of each ranking [rankings, 2]."""
        lengths = (self.words >= 0).sum(axis=1)
        longest = [lengths[a:b].max() for a, b in zip(self.starts, self.starts[1:], strict=False)]
        return np.stack([(self.prompts >= 0).sum(axis=1), np.array(longest, int)], axis=1)

    def part(self, chosen: np.ndarray) -> Rankings:
        """The rankings at these places, or where this is true."""
        places = np.arange(len(self))[chosen]
        rows = [np.arange(self.starts[n], self.starts[n + 1]) for n in places]
        every = np.concatenate(rows) if rows else np.zeros(0, int)
        return Rankings(
            self.prompts[places],
            self.stages[places],
            np.cumsum([0, *map(len, rows)]),
            self.words[every],
            self.legal[every],
            self.slower[every],
            self.sets,
        )

    def besides(self, keys: Collection[str]) -> Rankings:
        """The rankings of other stages than those with these ``keys``."""
        return self.part(~np.isin(self.stages, list(keys)))

    def batches(
        self, most_words: int, rng: np.random.Generator, most: int = KEPT
    ) -> Iterator[np.ndarray]:
        """The places of the rankings of each batch, in an order drawn anew; prompts and sentences
        of a batch are of about the same length, and up to ``most`` of a ranking count.
        """
        sizes = self.sizes + rng.uniform(0, 4, self.sizes.shape)
        counts = np.minimum(np.diff(self.starts), most)
        order = np.lexsort((sizes[:, 0], np.round(sizes[:, 1] / 4)))
        found: list[np.ndarray] = []
        begin, words = 0, 0.0
        for end, place in enumerate(order):
            words += sizes[place, 0] + sizes[place, 1] * counts[place]
            if words > most_words and end > begin:
                found.append(order[begin:end])
                begin, words = end, sizes[place, 0] + sizes[place, 1] * counts[place]
        if begin < len(order):
            found.append(order[begin:])
        for place in rng.permutation(len(found)):
            yield found[place]


def ranking_of(
    grammar: Grammar,
    stage: Stage,
    space: Space,
    place: Place,
    times: Mapping[Config, float],
    hardware: bool = True,
) -> Ranking | None:
    """The ranking of these configs; None where fewer than :data:`LEAST` fit into a sentence."""
    said = machine_words(place.machine, place.rates) if hardware else []
    begin = tuple(prompt(grammar.vocabulary, stage, said))
    written = {config: tuple(write(grammar, space, config)) for config in times}
    fitting = [c for c, words in written.items() if len(begin) + len(words) <= LONGEST]
    if len(fitting) < LEAST:
        return None
    sentences = tuple(written[config] for config in fitting)
    legal = tuple(_legal(grammar, space, words) for words in sentences)
    best = min(times[config] for config in fitting)
    slower = tuple(min(log(times[config] / best), FARTHEST) for config in fitting)
    return Ranking(stage.key, begin, sentences, legal, slower)


def _legal(grammar: Grammar, space: Space, words: Sequence[int]) -> tuple[frozenset[int], ...]:
    cursor, found = Cursor(grammar, space), []
    for word in words:
        legal = cursor.legal()
        found.append(frozenset(legal))
        cursor = legal[word]
    return tuple(found)


def taught(
    grammar: Grammar, stage: Stage, place: Place, policy: Policy, random: Random
) -> Ranking | None:
    """A ranking of drawn configs by their analytic price; None where the stage has no sketch on
    this machine or hardly a choice. Many of the configs are nearly the best, since these must be
    told apart.
    """
    space = space_of(stage, place.machine)
    sketches = tuple(cast(Sketch, _Remembering(sketch)) for sketch in space.sketches)
    space = replace(space, sketches=sketches)
    if not space.sketches:
        return None
    prices: dict[Config, float] = {}

    def price(config: Config) -> None:
        if config not in prices and (pick := priced(policy, space, config)) is not None:
            prices[config] = pick.seconds

    try:
        for _ in range(DRAWN):
            price(space.sample(random))
        if len(prices) < LEAST:
            return None
        for changes in CHANGED:
            for config in sorted(prices, key=prices.__getitem__)[:BEST]:
                for _ in range(changes):
                    price(space.mutate(config, random))
    except GtcoError:  # a stage of another machine's partition
        return None
    order = sorted(prices, key=prices.__getitem__)
    rest = order[KEPT // 2 :]
    kept = [*order[: KEPT // 2], *random.sample(rest, min(len(rest), KEPT // 2))]
    return ranking_of(grammar, stage, space, place, {c: prices[c] for c in kept})


class _Remembering:
    """A sketch that works out each decision once: the configs of a ranking share most of them."""

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._decisions: dict[tuple[tuple[str, Option], ...], Decision | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sketch, name)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        key = tuple(chosen.items())
        if key not in self._decisions:
            self._decisions[key] = self._sketch.next_decision(chosen)
        return self._decisions[key]


# arrays and files ---------------------------------------------------------------------------------
def rankings_of(every: Sequence[Ranking]) -> Rankings:
    known: dict[frozenset[int], int] = {}
    rows = [s for one in every for s in one.sentences]
    legal = [[known.setdefault(x, len(known)) for x in at] for one in every for at in one.legal]
    return Rankings(
        _table([one.prompt for one in every]),
        np.array([one.stage for one in every], "U16"),
        np.cumsum([0, *(len(one.sentences) for one in every)]),
        _table(rows),
        _table(legal, np.int32),
        np.array([x for one in every for x in one.slower], np.float32),
        tuple(known),
    )


def _table(rows: Sequence[Sequence[int]], kind: type = np.int16) -> np.ndarray:
    found: np.ndarray = np.full((len(rows), max(map(len, rows), default=1)), -1, kind)
    for row, words in zip(found, rows, strict=True):
        row[: len(words)] = words
    return found


def joined(parts: Sequence[Rankings]) -> Rankings:
    """All of several; raises :class:`OptionError` if there are none."""
    if not parts:
        raise OptionError("there are no rankings: run python -m bench language_model rank first")
    known: dict[frozenset[int], int] = {}
    legal = []
    for part in parts:
        new = np.array([known.setdefault(x, len(known)) for x in part.sets] + [-1], np.int32)
        legal.append(new[part.legal])  # -1 stays -1
    starts = np.cumsum([0, *(n for part in parts for n in np.diff(part.starts))])
    return Rankings(
        _wide([part.prompts for part in parts]),
        np.concatenate([part.stages for part in parts]),
        starts,
        _wide([part.words for part in parts]),
        _wide(legal),
        np.concatenate([part.slower for part in parts]),
        tuple(known),
    )


def _wide(tables: Sequence[np.ndarray]) -> np.ndarray:
    width = max(table.shape[1] for table in tables)
    padded = [np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=-1) for t in tables]
    return np.concatenate(padded)


def write_file(rankings: Rankings, vocabulary: Vocabulary, file: Path) -> None:
    sets = [sorted(words) for words in rankings.sets]
    arrays = {name: getattr(rankings, name) for name in ARRAYS}
    arrays["set_words"] = np.array([word for words in sets for word in words], np.int16)
    arrays["set_sizes"] = np.array([len(words) for words in sets], np.int32)
    archive.write(file, vocabulary, arrays)


ARRAYS = ("prompts", "stages", "starts", "words", "legal", "slower")


def read_file(file: Path, vocabulary: Vocabulary) -> Rankings | None:
    """The rankings of a file, as :func:`archive.read` reads it."""
    return archive.read(file, vocabulary, "rankings", _rankings)


def _rankings(data: Mapping[str, np.ndarray]) -> Rankings:
    ends = np.cumsum(data["set_sizes"])[:-1]
    sets = np.split(data["set_words"], ends) if len(data["set_sizes"]) else []
    arrays = {name: data[name] for name in ARRAYS}
    return Rankings(**arrays, sets=tuple(frozenset(words.tolist()) for words in sets))


def read_all(folder: Path, vocabulary: Vocabulary) -> Rankings:
    """The rankings of all files of a folder."""
    found = (read_file(file, vocabulary) for file in archive.files_of(folder))
    return joined([part for part in found if part is not None and len(part)])
