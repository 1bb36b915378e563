"""Pre-training and fine-tuning (TLM, Section 5.1): which sentences a network sees, in which order.

1. ``pretrain``: sentences with random decisions teach the language: the base.
2. ``finetune`` from the base: what the policy picks (``experts``), then what was measured to be
   fastest (``measured``) beside a share of the former, so that little data does not make the model
   forget the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gtco.search.language.model import LanguageModel, Sizes, load, save
from gtco.search.language.words import Vocabulary
from gtco.support.errors import OptionError

from . import corpus
from .corpus import Corpus, Sentence
from .network import Network
from .train import Course, Point, train

UNSEEN = 0.02  # share of the stages whose sentences are not trained on, for the curve
EXPERTS = Course(epochs=1, words=5000, rate=1e-3, seed=1)
MEASURED = Course(epochs=5, words=3000, rate=5e-4, seed=2)
REPLAYED = 1.0  # expert sentences for each measured one

Say = Callable[[str], None]


def split(every: Corpus, share: float = UNSEEN) -> tuple[Corpus, Corpus]:
    """The sentences to train on, and those of a share of the stages that are not."""
    seen = np.array([int(key[-6:], 16) / 16**6 >= share for key in every.stages])
    if seen.all() or not seen.any():  # a toy: it is judged by what it sees
        return every, every
    return every.part(seen), every.part(~seen)


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
) -> Trained:
    """Trains the base for at most so many ``seconds``, going on where it was stopped; the file
    ``base.npz`` is written in any case.
    """
    torch.set_num_threads(1)
    seen, unseen = split(every)
    network = Network(sizes, vocabulary, course.seed)
    done, curve = train(network, seen, unseen, course, folder / "base.state", seconds, say)
    about = {"sentences": len(seen), "steps": curve[-1].step, "unseen": curve[-1].unseen}
    model = network.model({"pretrained": about})
    save(model, folder / "base.npz")
    return Trained(model, done, curve)


def finetune(
    base: LanguageModel,
    parts: Sequence[tuple[str, Corpus, Course]],
    folder: Path,
    name: str,
    seconds: float,
    say: Say,
) -> Trained:
    """Trains from ``base`` on one corpus after the other. The state of each part is a file, so a
    training that was stopped goes on. Writes ``NAME.npz`` when all parts are done.
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
        about = {part: {"sentences": len(seen), "unseen": curve[-1].unseen}}
        model = network.model({**model.about, **about})
        if not done:
            return Trained(model, False, curve)
    save(model, folder / f"{name}.npz")
    return Trained(model, True, curve)


def beside(measured: Sequence[Sentence], experts: Corpus, seed: int = 0) -> Corpus:
    """The measured sentences, and beside them a drawn share of the experts' sentences. Raises
    :class:`OptionError` if nothing was measured.
    """
    if not measured:
        raise OptionError(
            "no measured stage is left to fine-tune on: give records with the programs of their "
            "stages (--records), or files of readings (--readings)"
        )
    own = corpus.corpus_of(measured)
    count = min(int(REPLAYED * len(own)), len(experts))
    drawn = np.random.default_rng(seed).choice(len(experts), count, replace=False)
    return corpus.joined([own, experts.part(drawn)])


def without(sentences: Sequence[Sentence], keys: Collection[str]) -> list[Sentence]:
    """The sentences whose stage is not one of ``keys``."""
    return [sentence for sentence in sentences if sentence.stage not in keys]


def base_of(folder: Path) -> LanguageModel:
    """The pre-trained model of a folder; :class:`OptionError` without one."""
    return load(folder / "base.npz")
