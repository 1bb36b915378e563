"""How good the sentences of a model are, by what was measured before (TLM, Tables 2 and 3): nothing
is built or timed here.

For a stage some configs were measured. A system ranks them: the model by their likelihood, the
analytic policy by its price, and ``both`` by the price times the time that the likelihood stands
for. Its quality at k trials is the best time of all over the best among its first k: 1 where the
fastest config is among these. Random order has the expected value of the same. The configs that
were measured are those of some other search, so this says how a system ranks what that search
found, and not what it would find by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, log
from random import Random

import numpy as np

from gtco.search.language.generation import Author
from gtco.search.language.model import LanguageModel
from gtco.search.language.policy import SHARPNESS
from gtco.search.policy import priced
from gtco.tensor.space import Config

from ..data.demonstrations import Demonstration, policy_of

TRIALS = (1, 10, 16, 32)
LEAST = 4  # measured configs that a stage needs


@dataclass(frozen=True)
class Judged:
    """One stage: the number of configs that were measured; by system, the quality at each number of
    :data:`TRIALS`; whether the model's own first sentence was measured, and its quality then; and
    seconds a sentence.
    """

    label: str
    configs: int
    quality: dict[str, tuple[float, ...]]
    own: float | None
    seconds: float


def judge(model: LanguageModel, shown: Demonstration, hardware: bool = True) -> Judged:
    times, space = dict(shown.times), shown.space
    author = Author(model, space, shown.place.rates, hardware)
    scores = {config: author.score(config) for config in times}
    policy = policy_of(shown.place)
    prices = {}
    for config in times:
        pick = priced(policy, space, config)
        assert pick is not None
        prices[config] = pick.seconds
    best = min(times.values())
    ranked = {
        "language model": sorted(times, key=lambda c: -scores[c]),
        "analytic": sorted(times, key=prices.__getitem__),
        "both": sorted(times, key=lambda c: log(prices[c]) - scores[c] / SHARPNESS),
    }
    quality = {
        name: tuple(best / min(times[c] for c in order[:k]) for k in TRIALS)
        for name, order in ranked.items()
    }
    quality["random"] = tuple(expected(list(times.values()), k) for k in TRIALS)
    begin = time.process_time()  # whatever else runs
    written = Author(model, space, shown.place.rates, hardware).propose(10, Random(0))
    each = (time.process_time() - begin) / max(len(written), 1)
    own = times.get(written[0])
    return Judged(shown.stage.label, len(times), quality, best / own if own else None, each)


def expected(times: Sequence[float], k: int) -> float:
    """The expected quality of ``k`` configs drawn without order."""
    ordered, n = sorted(times), len(times)
    k = min(k, n)
    chances = [comb(n - 1 - i, k - 1) / comb(n, k) for i in range(n - k + 1)]
    return sum(c * ordered[0] / t for c, t in zip(chances, ordered, strict=False))


@dataclass(frozen=True)
class Summary:
    """Over stages: the geometric mean of each system's quality at each number of trials; of how
    many stages the model's own first sentence was measured, and its quality there.
    """

    stages: int
    quality: dict[str, tuple[float, ...]]
    measured: int
    own: float | None
    seconds: float


def summary(judged: Sequence[Judged]) -> Summary:
    mean = statistics.geometric_mean
    own = [j.own for j in judged if j.own is not None]
    return Summary(
        len(judged),
        {
            name: tuple(mean(j.quality[name][n] for j in judged) for n in range(len(TRIALS)))
            for name in judged[0].quality
        },
        len(own),
        mean(own) if own else None,
        statistics.median(j.seconds for j in judged),
    )


def lines(name: str, found: Summary) -> list[str]:
    """A table for people."""
    said = [f"{name}: {found.stages} stages", "  trials      " + "".join(f"{k:>8}" for k in TRIALS)]
    for system, values in found.quality.items():
        said.append(f"  {system:14}" + "".join(f"{v:8.3f}" for v in values))
    own = f", where it is {found.own:.3f} of the best" if found.own else ""
    said.append(
        f"  the first sentence was measured for {found.measured} of them{own}; "
        f"{1e3 * found.seconds:.1f} ms a sentence"
    )
    return said


# stages of which only the standing config is known ------------------------------------------------
@dataclass(frozen=True)
class Known:
    """How often, of ``stages``, the standing config is the first proposal, and is among the first
    ten, by the model and by the policy.
    """

    stages: int
    model: tuple[float, float]
    analytic: tuple[float, float]


def agreement(model: LanguageModel, every: Sequence[Demonstration]) -> Known:
    """With the temperature 0. A stage with one config alone says nothing and is left out."""
    hits = []
    for shown in every:
        if shown.space.size < 2:
            continue
        author = Author(model, shown.space, shown.place.rates)
        sentences = author.propose(10, Random(0), temperature=0.0)
        picks = policy_of(shown.place).best(shown.stage, 10)
        ours, theirs = sentences, [pick.config for pick in picks]
        hits.append([*_hits(ours, shown.config), *_hits(theirs, shown.config)])
    means = np.mean(hits, axis=0) if hits else np.zeros(4)
    return Known(len(hits), (means[0], means[1]), (means[2], means[3]))


def _hits(proposed: Sequence[Config], wanted: Config) -> tuple[bool, bool]:
    return wanted in proposed[:1], wanted in proposed


# what was learned of the language -----------------------------------------------------------------
def errors(
    model: LanguageModel, every: Sequence[Demonstration], draws: int, seed: int = 0
) -> float:
    """The share of sentences, written without masks, that are not configs of their space; the
    paper's 1.1 calls a program are a share of 0.09.
    """
    from gtco.search.language.prompt import machine_words, prompt
    from gtco.search.language.sentence import LONGEST, Cursor, Grammar

    random, wrong, total = np.random.default_rng(seed), 0, 0
    grammar = Grammar(model.vocabulary)
    for shown in every:
        said = machine_words(shown.place.machine, shown.place.rates)
        words = prompt(model.vocabulary, shown.stage, said)
        begin = model.read(model.empty(), words)
        for _ in range(draws):
            cursor, prefix, total = Cursor(grammar, shown.space), begin, total + 1
            while not cursor.ended and prefix.length < LONGEST:
                weights = np.exp(prefix.scores - prefix.scores.max(), dtype=np.float64)
                word = int(random.choice(len(weights), p=weights / weights.sum()))
                legal = cursor.legal()
                if word not in legal:
                    break
                cursor = legal[word]
                prefix = model.read(prefix, [word])
            wrong += not cursor.ended
    return wrong / max(total, 1)
