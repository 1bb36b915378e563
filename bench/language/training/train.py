"""Trains a network on sentences or on rankings: pre-training and fine-tuning alike (TLM, Section
5.1).

The state of a training is one file: weights, optimizer, step, the curve of losses. It is written
every so often, whole or not at all, so a training may be stopped at any moment, and goes on from
there with the batches that it would have had.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtco.machine.target import cpu_target
from gtco.support.errors import OptionError

from ..data import archive
from ..data.corpus import Corpus
from ..data.rankings import Rankings
from . import listwise
from .network import Network, batch_of, loss_of

Lessons = Corpus | Rankings

CLIPPED = 1.0  # the most that a gradient's norm may be
DECAY = 0.05
NARROW = 64  # networks of less width gain nothing by bfloat16
JUDGED = 256  # unseen sentences at a point of the curve


@dataclass(frozen=True)
class Course:
    """How a training goes.

    - ``epochs`` over the corpus, ``words`` of a batch, ``rate`` of learning at its highest
    - ``warm``: the share of the steps in which the rate rises; it falls by a cosine to a tenth
    - ``at_once``: sentences of a ranking in a batch, at most
    - ``kept``: seconds between two states that are kept
    """

    epochs: int = 2
    words: int = 6000
    rate: float = 2e-3
    warm: float = 0.04
    seed: int = 0
    at_once: int = 16
    kept: float = 120.0


@dataclass(frozen=True)
class Point:
    """A point of the curve: the step, seconds of training until then, the mean loss since the last
    point, and the loss on sentences that are not trained on.
    """

    step: int
    seconds: float
    loss: float
    unseen: float


def train(
    network: Network,
    lessons: Lessons,
    unseen: Lessons,
    course: Course,
    file: Path,
    seconds: float = float("inf"),
    say: Callable[[str], None] = lambda text: None,
) -> tuple[bool, list[Point]]:
    """Trains ``network`` in place on sentences or rankings, from the state in ``file`` if there is
    one, for at most so many ``seconds``. Gives whether it is finished, and its curve. Raises
    :class:`OptionError` where the state is damaged or belongs to another course or corpus.
    """
    plan = list(_plan(lessons, course))
    unseen = unseen.part(np.arange(len(unseen))[:: max(len(unseen) // JUDGED, 1)])
    known = archive.mark(network.vocabulary)
    about = {**asdict(course), "sentences": len(lessons), "vocabulary": known}
    about.pop("kept")
    optimizer = optimizer_of(network, course.rate)
    state = _read(file, about)
    step, curve, spent = 0, [], 0.0
    if state is not None:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["seconds"]
        curve = [Point(**point) for point in state["curve"]]
    begin = kept = time.monotonic()
    losses: list[float] = []

    def keep() -> None:
        nonlocal losses, kept
        now, said = spent + time.monotonic() - begin, ""
        if losses:
            mean, lost = float(np.mean(losses)), evaluate(network, unseen)
            curve.append(Point(step, now, mean, lost))
            said = f"step {step}/{len(plan)}: loss {mean:.4f}, unseen {lost:.4f}, {now:.0f} s"
        losses, kept = [], time.monotonic()
        _write(file, about, network, optimizer, step, now, curve)
        if said:
            say(said)

    while step < len(plan) and time.monotonic() - begin < seconds:
        for group in optimizer.param_groups:
            group["lr"] = course.rate * share(step / len(plan), course.warm)
        rng = np.random.default_rng((course.seed, step))
        loss = training_loss(network, lessons, plan[step], rng, course.at_once)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIPPED)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if time.monotonic() - kept > course.kept:
            keep()
    keep()
    return step == len(plan), curve


def optimizer_of(network: Network, rate: float) -> torch.optim.Optimizer:
    """AdamW, which decays matrices alone."""
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
    )


def training_loss(
    network: Network,
    lessons: Lessons,
    chosen: np.ndarray,
    rng: np.random.Generator | None,
    sentences: int = 0,
) -> Tensor:
    """The loss of a batch; with ``rng`` it is one of a training, which may use bfloat16."""
    wide = network.sizes.width >= NARROW
    with torch.autocast("cpu", torch.bfloat16, wide and rng is not None and has_bfloat16()):
        if isinstance(lessons, Rankings):
            return listwise.loss_of(network, lessons, chosen, rng, sentences)
        return loss_of(network, *batch_of(lessons, chosen))


@cache
def has_bfloat16() -> bool:
    """True where the CPU multiplies bfloat16 itself: training is then three times as quick."""
    flags = cpu_target().features
    return "avx512bf16" in flags or "amx-bf16" in flags


@torch.no_grad()
def evaluate(network: Network, lessons: Lessons) -> float:
    """The mean loss of a sentence's words of decisions, or of a ranking."""
    total = count = 0.0
    for chosen in lessons.batches(8000, np.random.default_rng(0)):
        if isinstance(lessons, Rankings):
            weight = float(len(chosen))
        else:
            weight = float((lessons.lengths[chosen] - lessons.prompts[chosen]).sum())
        total += weight * training_loss(network, lessons, chosen, None).item()
        count += weight
    return total / max(count, 1.0)


def _plan(lessons: Lessons, course: Course) -> Iterator[np.ndarray]:
    """All batches of all epochs; the seed determines them."""
    for epoch in range(course.epochs):
        rng = np.random.default_rng((course.seed, epoch))
        if isinstance(lessons, Rankings):
            yield from lessons.batches(course.words, rng, course.at_once)
        else:
            yield from lessons.batches(course.words, rng)


def share(done: float, warm: float) -> float:
    """Of the highest rate of learning, when a share of the training is ``done``."""
    if done < warm:
        return (done + 1e-3) / (warm + 1e-3)
    return 0.1 + 0.45 * (1 + cos(pi * (done - warm) / (1 - warm)))


# the state ----------------------------------------------------------------------------------------
def _write(
    file: Path,
    about: dict[str, Any],
    network: Network,
    optimizer: torch.optim.Optimizer,
    step: int,
    seconds: float,
    curve: list[Point],
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    state = {
        "about": about,
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "seconds": seconds,
        "curve": [asdict(point) for point in curve],
    }
    torch.save(state, new)
    new.replace(file)
    file.with_suffix(".curve.json").write_text(json.dumps(state["curve"], indent=1))


def _read(file: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        state = torch.load(file, weights_only=True)
        known = dict(state["about"])
    except (
        OSError,
        EOFError,
        RuntimeError,
        LookupError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        raise OptionError(
            f"the training in {file} is damaged ({str(error)[:200]}): delete it to begin anew"
        ) from error
    if known != about:
        changed = sorted(name for name in about if about[name] != known.get(name))
        raise OptionError(
            f"the training in {file} has another {', '.join(changed)}: delete it to begin anew, or "
            "give the options and the corpus that it began with"
        )
    result: dict[str, Any] = state
    return result
