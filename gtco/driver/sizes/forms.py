"""Configs that stages of other sizes have, tried first where a stage differs from these in its
sizes alone.

A full look at a product prices some 200 configs. A stage of a further size prices those of the
micro-kernels that its kind has elsewhere, with every cut into tasks and blocks
(:meth:`gtco.search.analytic.AnalyticPolicy.nearby`), and a sketch gets a full look where another
micro-kernel promises more. So its kernel is often one that is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from gtco.search.analytic import AnalyticPolicy
from gtco.search.policy import Policy
from gtco.search.recorded import RecordedPolicy
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage

CHUNKS = "chunks"  # decisions whose names begin so are numbers of a kernel
RIVAL = 2.0  # times the best: sketches above that at sizes that are searched are not looked at
Kind = tuple[object, ...]


def kind_of(stage: Stage) -> Kind:
    """The stage without its sizes, but with those of its constants."""
    canonical = stage.canonical
    inputs = tuple(
        (i.type.dtype, i.constant, i.type.shape if i.constant else len(i.type.shape))
        for i in canonical.inputs
    )
    return inputs, tuple((op.kind, op.inputs, op.type.dtype) for op in canonical.operators)


def form_of(config: Config) -> Config:
    """The config without the decisions that are only numbers of its kernel. A cut into one piece
    stays in: its kernel has no loop there, so it is another kernel.
    """
    kept = (c for c in config.choices if not c[0].startswith(CHUNKS) or c[1] == 1)
    return Config(config.sketch, tuple(kept))


def _uncut(form: Config) -> Config:
    return Config(form.sketch, tuple(c for c in form.choices if not c[0].startswith(CHUNKS)))


class Forms:
    """The forms of each kind of stage so far, in the order in which they came."""

    def __init__(self) -> None:
        self.settled = False  # do the anchors have their configs?
        self._known: dict[Kind, dict[Config, None]] = {}
        self._configs: dict[Kind, dict[Config, None]] = {}  # whole configs, cuts included
        self._rivals: dict[Kind, set[str]] = {}
        self._near: dict[str, list[Pick]] = {}  # picks, by the stage's key

    def learn(self, policy: Policy, stage: Stage) -> None:
        """The form of a stage that gets a full look, and the sketches that come near it."""
        self._near.setdefault(stage.key, [])
        if (base := _analytic(policy)) is not None and (picks := base.standings(stage)):
            self.add(stage, picks[0].config)
            close = (p.sketch.name for p in picks if p.seconds <= RIVAL * picks[0].seconds)
            self._rivals.setdefault(kind_of(stage), set()).update(close)

    def add(self, stage: Stage, config: Config) -> None:
        """What a stage has in the library."""
        kind = kind_of(stage)
        self._known.setdefault(kind, {})[form_of(config)] = None
        if not self.settled:
            self._configs.setdefault(kind, {})[config] = None

    def of(self, stage: Stage) -> Sequence[Config]:
        """The forms that stages of this kind have."""
        return [*self._known.get(kind_of(stage), ())]

    def near(self, policy: Policy, stage: Stage) -> list[Pick]:
        """Picks of these forms, the least predicted time first; none where the stage needs a full
        look. A stage has the same ones whenever it is asked for.
        """
        if (there := self._near.get(stage.key)) is not None:
            return there
        kind, picks = kind_of(stage), list[Pick]()
        base = _analytic(policy)
        if base is not None and self.settled:
            picks = base.closest(stage, [*self._configs.get(kind, ())])
        elif base is not None and kind in self._rivals:
            known = dict.fromkeys(map(_uncut, self._known[kind]))
            picks = base.nearby(stage, [*known], self._rivals[kind])
        self._near[stage.key] = picks
        return picks

    def predict(self, policy: Policy, stage: Stage) -> float:
        """Seconds of the stage as one kernel, by the first of :meth:`near` where there are some."""
        near = self.near(policy, stage)
        return near[0].seconds if near else policy.predict(stage)


def _analytic(policy: Policy) -> AnalyticPolicy | None:
    """The policy that prices configs, where nothing was measured."""
    if isinstance(policy, RecordedPolicy):
        return None if policy.measured else _analytic(policy.policy)
    return policy if isinstance(policy, AnalyticPolicy) else None
