"""Weights of a library's variants in few layouts.

A weight is stored once for each layout in which some kernel reads it, and its layout follows from
the kernel's tile. The best tile depends on the sizes, so variants of many sizes would bring many
copies of each weight. A copy therefore has a price: one of all weights of the model costs
:data:`COPY` of the variant's time, and a stage takes the config whose seconds and copies cost least
together. So a small weight gets a further layout for a small gain, and a large one of a short stage
does not. The first layout of a weight is free, so sizes come here from the smallest on: it is large
sizes that gain by layouts that are larger than the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np

from gtco.codegen.jobs import Kernel
from gtco.driver.sizes.forms import form_of
from gtco.search.policy import Policy, priced
from gtco.search.recorded import RecordedPolicy
from gtco.tensor.packing import Packing
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage

COPY = 0.05  # of a variant's seconds: what one more copy of all weights may cost
CLOSE = 1.03  # times the seconds of the cheapest: a config of a known form is taken
LOOKED_AT = 32  # configs of a stage, and so many of other sketches


class Layouts:
    """The layouts of constants that variants have so far. Constants of equal contents are one array
    (:class:`gtco.driver.sizes.shared.Shared`), which is alive while this is used.
    """

    def __init__(self) -> None:
        self._known: dict[int, set[Packing]] = {}  # packings of an array, by its id

    def add(
        self,
        stages: Collection[Stage],
        kernels: Mapping[str, Kernel],
        constants: Mapping[str, np.ndarray],
    ) -> None:
        """What the kernels of a variant read."""
        for stage in stages:
            packings = kernels[stage.key].packings  # packings, by the names of the canonical stage
            for mine, canonical in zip(stage.inputs, stage.canonical.inputs, strict=True):
                if canonical.name in packings and mine.name in constants:
                    known = self._known.setdefault(id(constants[mine.name]), set())
                    known.add(packings[canonical.name])

    def add_picks(
        self,
        stages: Collection[Stage],
        picks: Mapping[str, Pick],
        constants: Mapping[str, np.ndarray],
    ) -> None:
        """What kernels of a variant will read that are not built yet. ``picks``: by the stage's
        key; the layouts of a stage without one are not known.
        """
        found: dict[str, list[tuple[int, Packing]]] = {}
        for stage in stages:
            if (pick := picks.get(stage.key)) is None:
                continue
            if stage.key not in found:
                found[stage.key] = [*_packings(pick)]
            for place, packing in found[stage.key]:
                if (name := stage.inputs[place].name) in constants:
                    self._known.setdefault(id(constants[name]), set()).add(packing)

    def is_new(self, array: np.ndarray, packing: Packing) -> bool:
        """True if the array has other layouts alone."""
        known = self._known.get(id(array), set())
        return bool(known) and packing not in known


class Copies:
    """What a variant pays for further layouts of its constants, and the picks that cost least with
    them. ``seconds``: gives what its ``stages`` are predicted to take, and is asked once at most.
    """

    def __init__(
        self,
        layouts: Layouts,
        stages: Collection[Stage],
        seconds: Callable[[], float],
        constants: Mapping[str, np.ndarray],
    ) -> None:
        self._layouts, self._constants, self._seconds = layouts, constants, seconds
        self._alike: dict[str, list[Stage]] = {}  # stages, by their key
        for stage in stages:
            self._alike.setdefault(stage.key, []).append(stage)

    @cached_property
    def _rate(self) -> float:
        """Seconds a byte."""
        stages = chain.from_iterable(self._alike.values())
        inputs = {one.name: one for stage in stages for one in stage.inputs}
        every = sum(one.type.nbytes for name, one in inputs.items() if name in self._constants)
        return COPY * self._seconds() / max(1, every)

    def bytes(self, pick: Pick, stage: Stage) -> float:
        """Of the further layouts that the pick brings, for each stage that is equal to this one."""
        alike = self._alike.get(stage.key, [stage])
        new: dict[tuple[int, Packing], int] = {}
        for place, packing in _packings(pick):
            for name in (one.inputs[place].name for one in alike):
                if name in self._constants:
                    array = self._constants[name]
                    if self._layouts.is_new(array, packing):
                        new[id(array), packing] = prod(packing.packed_shape) * array.itemsize
        return sum(new.values()) / len(alike)

    def choose(
        self,
        policy: Policy,
        built: Mapping[str, tuple[Config, Kernel]],
        stage: Stage,
        without: Collection[str] = (),
        known: Collection[Config] = (),
    ) -> Pick | None:
        """The policy's choice, or another one that costs less with its copies. A kernel that is
        ``built``, by the stage's key, is taken again. A config that won by its measurements is
        kept. ``known``: as in :meth:`cheapest`.
        """
        best = policy.choose(stage, without)
        there = built.get(stage.key)
        if best is None or (there and there[0] == best.config):
            return best
        liked = not known or form_of(best.config) in known
        if there is None and liked and not self.bytes(best, stage):
            return best
        promising = policy.best(stage, LOOKED_AT, without)
        measured = not promising or best.config != promising[0].config
        if measured or (isinstance(policy, RecordedPolicy) and policy.won(stage, best.config)):
            return best
        if there is not None and there[0].sketch not in without:
            return priced(policy, space_of(stage, policy.target), there[0]) or best
        others = policy.best(stage, LOOKED_AT, {best.sketch.name, *without})
        return self.cheapest([*promising, *others], stage, known)

    def cheapest(
        self, picks: Sequence[Pick], stage: Stage, known: Collection[Config] = ()
    ) -> Pick:
        """The pick whose seconds and copies cost least, or one of the forms that are ``known``
        (:func:`gtco.driver.sizes.forms.form_of`) if it is nearly as fast and copies no more.
        """
        copied = [self.bytes(pick, stage) for pick in picks]
        rate = self._rate if any(copied) else 0
        costs = [p.seconds + rate * nbytes for p, nbytes in zip(picks, copied, strict=True)]
        at = costs.index(min(costs))
        close = CLOSE * picks[at].seconds
        for pick, nbytes in zip(picks, copied, strict=True):
            if pick.seconds <= close and nbytes <= copied[at] and form_of(pick.config) in known:
                return pick
        return picks[at]


def _packings(pick: Pick) -> Iterator[tuple[int, Packing]]:
    """Layouts of the stage's constants, by their places among its inputs. The pick may have been
    made for an equal stage with other names.
    """
    layouts = getattr(pick.sketch, "layouts", None)  # sketches that pack constants have it
    if layouts is None:
        return
    names = [one.name for one in pick.sketch.stage.inputs]
    for name, packing in layouts(pick.config).items():
        yield names.index(name), packing
