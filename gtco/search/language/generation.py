"""Writes sentences about a stage (TLM, Algorithm 2): decision by decision the model is asked which
of the legal words comes next.

Two sentences of one stage share the work up to the word where they part. What only one word can
follow is not asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

import numpy as np

from gtco.search.calibration.rates import RateTable
from gtco.search.language.model import LanguageModel, Prefix
from gtco.search.language.prompt import machine_words, prompt
from gtco.search.language.sentence import Cursor, Grammar, write
from gtco.support.errors import OptionError
from gtco.tensor.space import Config, Space

TEMPERATURE = 1.0  # above 1 sentences differ more
DRAWS = 8  # draws for each sentence that is wanted: many are drawn twice


@dataclass(frozen=True)
class Fork:
    """A place where several words are legal: the place after each, and the model's log-probability
    of each among them.
    """

    prefix: Prefix
    places: tuple[Cursor, ...]
    words: tuple[int, ...]
    chances: np.ndarray


@dataclass
class Author:
    """Writes sentences about one space. ``rates`` is the machine's table, if it was measured; for
    ``hardware`` false the prompt says nothing of the machine.
    """

    model: LanguageModel
    space: Space
    rates: RateTable | None = None
    hardware: bool = True
    _forks: dict[tuple[int, ...], Fork | Config] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.grammar = Grammar(self.model.vocabulary)
        said = machine_words(self.space.target, self.rates) if self.hardware else []
        words = prompt(self.model.vocabulary, self.space.stage, said)
        self._begin = self.model.read(self.model.empty(), words)

    def fork(self, before: Fork | None, taken: int, key: tuple[int, ...]) -> Fork | Config:
        """The next fork after taking the word at ``taken`` of ``before``, or the config that the
        sentence has then become. ``key`` are the words taken at all forks so far.
        """
        if key not in self._forks:
            if before is None:
                cursor, prefix, words = Cursor(self.grammar, self.space), self._begin, []
            else:
                cursor, prefix = before.places[taken], before.prefix
                words = [before.words[taken]]
            legal = cursor.legal()
            while len(legal) == 1:
                ((word, cursor),) = legal.items()
                words.append(word)
                legal = cursor.legal()
            if cursor.ended:
                self._forks[key] = cursor.config
            else:
                prefix = self.model.read(prefix, words) if words else prefix
                scores = prefix.scores[list(legal)]
                scores = scores - scores.max()
                chances = scores - np.log(np.exp(scores).sum())
                self._forks[key] = Fork(prefix, tuple(legal.values()), tuple(legal), chances)
        return self._forks[key]

    def draw(self, random: Random, temperature: float = TEMPERATURE) -> Config:
        """One sentence, drawn word by word, as a config."""
        key: tuple[int, ...] = ()
        fork = self.fork(None, 0, key)
        while isinstance(fork, Fork):
            weights = np.exp(fork.chances / temperature)
            (taken,) = random.choices(range(len(weights)), weights.tolist())
            key = (*key, fork.words[taken])
            fork = self.fork(fork, taken, key)
        return fork

    def greedy(self) -> Config:
        """The config of the sentence whose every word is the likeliest one there."""
        key: tuple[int, ...] = ()
        fork = self.fork(None, 0, key)
        while isinstance(fork, Fork):
            taken = int(fork.chances.argmax())
            key = (*key, fork.words[taken])
            fork = self.fork(fork, taken, key)
        return fork

    def likeliest(self) -> Iterator[tuple[Config, float]]:
        """All configs of the space, the likeliest first, each with its log-probability."""
        order = count()
        waiting: list[tuple[float, int, tuple[int, ...], Fork | None, int]] = [
            (0.0, next(order), (), None, 0)
        ]
        while waiting:
            unlikely, _, key, before, taken = heapq.heappop(waiting)
            fork = self.fork(before, taken, key)
            if isinstance(fork, Config):
                yield fork, -unlikely
                continue
            for n, chance in enumerate(fork.chances.tolist()):
                item = (unlikely - chance, next(order), (*key, fork.words[n]), fork, n)
                heapq.heappush(waiting, item)

    def propose(
        self,
        n: int,
        random: Random,
        avoid: Collection[Config] = (),
        temperature: float = TEMPERATURE,
    ) -> list[Config]:
        """Up to ``n`` different configs without those to ``avoid``: the greedy one first, the
        others drawn. With ``temperature`` 0 they are the ``n`` likeliest.
        """
        if not temperature:
            likely = (config for config, _ in self.likeliest() if config not in avoid)
            return list(islice(likely, n))
        found = dict.fromkeys(config for config in (self.greedy(),) if config not in avoid)
        for _ in range(DRAWS * n):
            if len(found) >= n:
                break
            config = self.draw(random, temperature)
            if config not in avoid:
                found[config] = None
        return list(found)

    def score(self, config: Config) -> float:
        """The log-probability of a config among all of the space. Raises :class:`OptionError` if
        the space does not contain it.
        """
        total = 0.0
        key: tuple[int, ...] = ()
        fork = self.fork(None, 0, key)
        # words that are forced are not forks, so the config's words are followed beside them
        cursor, left = Cursor(self.grammar, self.space), write(self.grammar, self.space, config)
        for word in left:
            legal = cursor.legal()
            if len(legal) > 1:
                if not isinstance(fork, Fork) or word not in fork.words:
                    raise OptionError(f"the space of {self.space.stage.label} is inconsistent")
                taken = fork.words.index(word)
                total += float(fork.chances[taken])
                key = (*key, word)
                fork = self.fork(fork, taken, key)
            cursor = legal[word]
        return total
