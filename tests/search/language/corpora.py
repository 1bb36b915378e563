"""Shared code of the tests of the language model: stages, machines and a vocabulary for them."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import numpy as np

from gtco.machine.gpu import gpu_target
from gtco.machine.target import TARGETS, Machine
from gtco.search.language.model import LanguageModel, Sizes
from gtco.search.language.prompt import machine_words, stage_words
from gtco.search.language.words import Vocabulary
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Space
from tests.stages import CORES, drawn

MACHINES: tuple[Machine, ...] = (
    *(TARGETS[name] for name in ("znver4", "haswell", "sapphirerapids")),
    *(gpu_target(name) for name in ("cuda:a100", "cuda:h100", "cuda:2080ti")),
)


def spaces(count: int, seed: int = 0) -> list[Space]:
    """Spaces of stages of every family on different machines; none is empty."""
    found = []
    for n in range(count):
        core = CORES[n % len(CORES)]
        stage = drawn(core, Random(f"{seed}:{n}"), Random(f"{seed}:{n}l"), n % 3)
        for machine in (MACHINES[n % 3], MACHINES[3 + n % 3]):
            space = space_of(stage, machine)
            if space.sketches:
                found.append(space)
    return found


@lru_cache
def vocabulary() -> Vocabulary:
    """A vocabulary that knows some of what these spaces say: half of the texts are spelled."""
    words: dict[str, None] = {}
    for space in spaces(len(CORES), seed=1):
        words |= dict.fromkeys(machine_words(space.target))
        words |= dict.fromkeys(w for w in stage_words(space.stage) if isinstance(w, str))
        chosen: dict[str, int | str] = {}
        while decision := space.next_decision(chosen):
            words[f"d.{decision.name}"] = None
            texts = [o for o in decision.options if isinstance(o, str) and o.isalpha()]
            words |= dict.fromkeys(f"={text}" for text in texts[::2])
            chosen[decision.name] = decision.options[0]
    return Vocabulary.of(words)


def untrained(words: Vocabulary | None = None, seed: int = 0, width: int = 16) -> LanguageModel:
    """A model with drawn weights, which writes any sentence."""
    words = words or vocabulary()
    sizes = Sizes(len(words), layers=2, width=width, heads=2)
    random = np.random.default_rng(seed)
    weights = {
        name: random.normal(size=shape).astype(np.float32) / np.sqrt(shape[0])
        for name, shape in sizes.shapes().items()
    }
    return LanguageModel(sizes, words, weights, {"trained": "not at all"})
