"""Pre-training and fine-tuning (TLM, Section 5.1): what a network learns from, in which order.

1. ``pretrain``: sentences with random decisions teach the language: the base.
2. ``finetune`` from the base: the order in which the analytic price puts drawn configs
   (``ranked``), then the order that was measured (``measured``) beside some of the former, so that
   little data does not make the model forget the rest.

The paper shows the best sentence of each stage alone in its second step. :func:`best_only` makes
such a corpus of rankings, to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch

from gtco.search.language.model import LanguageModel, Sizes, load, save
from gtco.search.language.words import Vocabulary
from gtco.support.errors import OptionError

from ..data import rankings
from ..data.corpus import Corpus, Sentence, corpus_of
from ..data.rankings import Ranking, Rankings, rankings_of
from .network import Network
from .train import Course, Lessons, Point, train

UNSEEN = 0.02  # share of the stages whose sentences are not trained on, for the curve
RANKED = Course(epochs=3, words=5000, rate=1e-3, seed=1, kept=300.0)
MEASURED = Course(epochs=6, words=5000, rate=1e-3, seed=2, at_once=48)
REPLAYED = 1.0  # rankings of the price for each measured one

Say = Callable[[str], None]
L = TypeVar("L", bound=Lessons)


def split(every: L, share: float = UNSEEN) -> tuple[L, L]:
    """The lessons to train on, and those of a share of the stages that are not."""
    seen = np.array([int(key[-6:], 16) / 16**6 >= share for key in every.stages])
    if seen.all() or not seen.any():  # a toy: it is judged by what it sees
        return every, every
    return cast(L, every.part(seen)), cast(L, every.part(~seen))


@dataclass(frozen=True)
class Trained:
    """A model, whether its training has finished, and the curve of its last part."""

    model: LanguageModel
    finished: bool
    curve: list[Point]


def pretrain(
    folder: Path,
    vocabulary: Vocabulary,
    every: Corpus,
    sizes: Sizes,
    course: Course,
    seconds: float,
    say: Say,
    name: str = "base",
) -> Trained:
    """Trains the base for at most so many ``seconds``, going on where it was stopped; the file
    ``NAME.npz`` is written in any case.
    """
    torch.set_num_threads(1)
    seen, unseen = split(every)
    network = Network(sizes, vocabulary, course.seed)
    done, curve = train(network, seen, unseen, course, folder / f"{name}.state", seconds, say)
    about = {"sentences": len(seen), "steps": curve[-1].step, "unseen": curve[-1].unseen}
    model = network.model({"pretrained": about})
    save(model, folder / f"{name}.npz")
    return Trained(model, done, curve)


def finetune(
    base: LanguageModel,
    parts: Sequence[tuple[str, Lessons, Course]],
    folder: Path,
    name: str,
    seconds: float,
    say: Say,
) -> Trained:
    """Trains from ``base`` on one set of lessons after the other. The state of each part is a file,
    so a training that was stopped goes on. Writes ``NAME.npz`` when all parts are done.
    """
    torch.set_num_threads(1)
    model = base
    curve: list[Point] = []
    for part, every, course in parts:
        network = Network(base.sizes, base.vocabulary)
        network.set(model.weights)
        seen, unseen = split(every)
        state = folder / f"{name}.{part}.state"
        done, curve = train(network, seen, unseen, course, state, seconds, say)
        about = {part: {"lessons": len(seen), "unseen": curve[-1].unseen}}
        model = network.model({**model.about, **about})
        if not done:
            return Trained(model, False, curve)
    save(model, folder / f"{name}.npz")
    return Trained(model, True, curve)


def beside(measured: Sequence[Ranking], taught: Rankings, seed: int = 0) -> Rankings:
    """The measured rankings, and beside them a drawn share of those of the price. Raises
    :class:`OptionError` if nothing was measured.
    """
    if not measured:
        raise OptionError(
            "no measured stage is left to fine-tune on: give records with the programs of their "
            "stages (--records), or files of readings (--readings)"
        )
    own = rankings_of(measured)
    count = min(int(REPLAYED * len(own)), len(taught))
    drawn = np.random.default_rng(seed).choice(len(taught), count, replace=False)
    return rankings.joined([own, taught.part(drawn)])


def mean_of(models: Sequence[LanguageModel]) -> LanguageModel:
    """The model of the mean weights of several trainings from one start: one training on so few
    measurements depends much on its seed.
    """
    one = models[0]
    weights = {n: np.mean([m.weights[n] for m in models], axis=0) for n in one.weights}
    about = {**one.about, "trainings": len(models)}
    return LanguageModel(one.sizes, one.vocabulary, weights, about)


def best_only(every: Rankings) -> Corpus:
    """The fastest sentence of each ranking."""
    found = []
    for n, stage in enumerate(every.stages):
        own = slice(every.starts[n], every.starts[n + 1])
        best = every.words[own][np.argmin(every.slower[own])]
        begin = every.prompts[n][every.prompts[n] >= 0].tolist()
        found.append(Sentence(stage, (*begin, *best[best >= 0].tolist()), len(begin)))
    return corpus_of(found)


def base_of(folder: Path, name: str = "base") -> LanguageModel:
    """The pre-trained model of a folder; :class:`OptionError` without one."""
    return load(folder / f"{name}.npz")
