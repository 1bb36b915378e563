"""Weights of a library's variants in few layouts.

A weight is stored once for each layout in which some kernel reads it, and its layout follows from
the kernel's tile. The best tile depends on the sizes, so variants of many sizes would bring many
copies of each weight. A later variant therefore takes a config that reads a layout which is there,
if that is predicted to be nearly as fast as its best. A layout that is larger than the weight is
for products whose smallest size gains by it, since then all do. So sizes come here from the
smallest on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from gtco.codegen.jobs import Kernel
from gtco.search.policy import Policy, priced
from gtco.search.recorded import RecordedPolicy
from gtco.tensor.packing import Packing
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage

CLOSE = 1.03  # times the predicted seconds of the best config
WIDE = 1.08  # the same, of a library of hundreds of sizes, which would have many layouts
GROWN = 1.2  # the same, if the best needs a layout that is larger than the weight
SETTLED = 1.2  # the same, of sizes between the anchors of such a library
LOOKED_AT = 32  # configs of a stage


class Layouts:
    """The layouts of constants that variants have so far. Constants of equal contents are one array
    (:class:`gtco.driver.sizes.shared.Shared`), which is alive while this is used.
    """

    def __init__(self) -> None:
        self.close = CLOSE
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

    def choose(
        self,
        policy: Policy,
        built: Mapping[str, tuple[Config, Kernel]],
        constants: Mapping[str, np.ndarray],
        stage: Stage,
        without: Collection[str] = (),
    ) -> Pick | None:
        """The policy's choice, or one that is nearly as fast and needs no new layout. A kernel that
        is ``built``, by the stage's key, is taken again. A config that won by its measurements is
        kept.
        """
        best = policy.choose(stage, without)
        there = built.get(stage.key)
        if best is None or (there and there[0] == best.config):
            return best
        if there is None and self.fits(best, stage, constants):
            return best
        promising, most = policy.best(stage, LOOKED_AT, without), self.close
        if best.config != promising[0].config or _won(policy, stage, best):  # it was measured
            return best
        if there is not None and there[0].sketch not in without:
            return priced(policy, space_of(stage, policy.target), there[0]) or best
        otherwise = best
        if any(larger(packing) for _, packing in _packings(best)):
            plain = policy.best(stage, LOOKED_AT, {best.sketch.name, *without})
            most = max(most, GROWN)
            promising += plain
            if plain and plain[0].seconds <= most * best.seconds:
                otherwise = plain[0]
        close = [pick for pick in promising if pick.seconds <= most * best.seconds]
        return next((pick for pick in close if self.fits(pick, stage, constants)), otherwise)

    def fits(self, pick: Pick, stage: Stage, constants: Mapping[str, np.ndarray]) -> bool:
        """True if the pick brings no further layout of a constant that has one."""
        for place, packing in _packings(pick):
            known = self._known.get(id(constants.get(stage.inputs[place].name)), set())
            if known and packing not in known:
                return False
        return True


def _won(policy: Policy, stage: Stage, pick: Pick) -> bool:
    return isinstance(policy, RecordedPolicy) and policy.won(stage, pick.config)


def larger(packing: Packing) -> bool:
    """True if a constant takes more room in this layout for little speed: sums of its quarters.
    Winograd's transform of taps takes more too, and halves a time at least.
    """
    return bool(packing.quarters)


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
