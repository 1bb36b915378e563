"""What each part of the training is worth: short trainings of equal CPU seconds that differ in one
thing, judged on rankings that none of them saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from gtco.search.language.model import LanguageModel
from gtco.search.language.words import Vocabulary

from ..data.rankings import Rankings
from ..training import listwise
from ..training.finetune import RANKED, best_only, split
from ..training.network import Network
from ..training.train import CLIPPED, Lessons, optimizer_of, share, training_loss

JUDGED = 200  # rankings of stages that are not trained on


@dataclass(frozen=True)
class Variant:
    """``width`` 0 is the base model's; without ``pretrained`` the weights are drawn."""

    pretrained: bool = True
    hardware: bool = True
    listwise: bool = True
    width: int = 0


VARIANTS: Mapping[str, Variant] = {
    "as it ships": Variant(),
    "the best sentence alone": Variant(listwise=False),
    "without words of the machine": Variant(hardware=False),
    "without pre-training": Variant(pretrained=False),
    "without pre-training, half as wide": Variant(pretrained=False, width=64),
    "without pre-training, twice as wide": Variant(pretrained=False, width=256),
}


@dataclass(frozen=True)
class Outcome:
    """``steps`` that were made, and by judged set the geometric mean of the best time over that of
    the likeliest sentence.
    """

    steps: int
    quality: dict[str, float]


def ablate(
    base: LanguageModel,
    every: Rankings,
    judged: Mapping[str, Rankings],
    seconds: float,
    say: Callable[[str], None],
    seed: int = 0,
    variants: Mapping[str, Variant] = VARIANTS,
) -> dict[str, Outcome]:
    """Trains each variant for so many CPU ``seconds``."""
    torch.set_num_threads(1)
    seen, unseen = split(every)
    few = unseen.part(np.arange(len(unseen))[:: max(len(unseen) // JUDGED, 1)])
    found = {}
    for name, variant in variants.items():
        judges = {"unseen stages by their price": few, **judged}
        lessons: Rankings = seen
        if not variant.hardware:
            lessons = silent(seen, base.vocabulary)
            judges = {k: silent(v, base.vocabulary) for k, v in judges.items()}
        sizes = replace(base.sizes, width=variant.width) if variant.width else base.sizes
        network = Network(sizes, base.vocabulary, seed)
        if variant.pretrained:
            network.set(base.weights)
        shown: Lessons = lessons if variant.listwise else best_only(lessons)
        steps = _trained(network, shown, seconds, seed)
        quality = {k: first_choice(network, v) for k, v in judges.items()}
        found[name] = Outcome(steps, quality)
        say(f"{name}: {steps} steps; " + ", ".join(f"{k} {v:.3f}" for k, v in quality.items()))
    return found


def _trained(network: Network, lessons: Lessons, seconds: float, seed: int) -> int:
    """The number of steps; the rate of learning follows the seconds that are spent."""
    optimizer, step, epoch = optimizer_of(network, RANKED.rate), 0, 0
    begin = time.process_time()
    while True:
        for chosen in lessons.batches(RANKED.words, np.random.default_rng((seed, epoch))):
            done = (time.process_time() - begin) / seconds
            if done >= 1:
                return step
            for group in optimizer.param_groups:
                group["lr"] = RANKED.rate * share(done, RANKED.warm)
            rng = np.random.default_rng((seed, step))
            loss = training_loss(network, lessons, chosen, rng, RANKED.at_once)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIPPED)
            optimizer.step()
            step += 1
        epoch += 1


@torch.no_grad()
def first_choice(network: Network, every: Rankings) -> float:
    """The geometric mean over rankings of the best time over that of the likeliest sentence."""
    lost = []
    for n in range(len(every)):
        batch = listwise.batch_of(every, np.array([n]), None)
        total, _ = listwise.likelihoods(network, every, batch)
        lost.append(float(batch.slower[0, int(total[0].argmax())]))
    return float(np.exp(-np.mean(lost)))


def silent(every: Rankings, vocabulary: Vocabulary) -> Rankings:
    """The rankings with prompts that say nothing of the machine."""
    of_machine = [n for n, word in enumerate(vocabulary.words) if word.startswith("m.")]
    kept = (every.prompts >= 0) & ~np.isin(every.prompts, of_machine)
    prompts = np.full_like(every.prompts, -1)
    for row, words, own in zip(prompts, every.prompts, kept, strict=True):
        row[: own.sum()] = words[own]
    return replace(every, prompts=prompts)
