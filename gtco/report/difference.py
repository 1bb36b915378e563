"""The facts of two libraries of one model, stage by stage. Stages are matched by the model's nodes
that their operators came from, so another partition is seen as what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import networkx

from gtco.report.facts import VERSION, Facts, ModelFacts, StageFacts
from gtco.support.counting import counted
from gtco.support.errors import OptionError
from gtco.support.sizes import sizes_text

FORMAT = "gtco-report-difference"
State = Literal["same", "changed", "partition", "before only", "after only"]


@dataclass(frozen=True)
class Row:
    """Stages that do the same work in both libraries, by their numbers.

    - ``state``: ``same``: one stage, built the same way; ``changed``: one stage, built in another
      way; ``partition``: other stages; or the work is in one of the two alone;
    - ``changes``: in words.
    """

    name: str
    operators: tuple[str, ...]
    state: State
    before: tuple[int, ...]
    after: tuple[int, ...]
    before_seconds: float
    after_seconds: float
    changes: tuple[str, ...]

    @property
    def gain(self) -> float:
        return self.before_seconds - self.after_seconds


@dataclass(frozen=True)
class ModelDifference:
    """A variant that both libraries have. Seconds are those of a run."""

    sizes: Mapping[str, int]
    before: ModelFacts
    after: ModelFacts
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Difference:
    before: Facts
    after: Facts
    models: tuple[ModelDifference, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "models": [
                {"sizes": dict(model.sizes), "rows": [asdict(row) for row in model.rows]}
                for model in self.models
            ],
        }


def difference(before: Facts, after: Facts) -> Difference:
    """What changed from one library to the other. Raises :class:`OptionError` if they have no
    variant in common, by its sizes and its inputs and outputs.
    """
    models = []
    for one in before.models:
        for other in after.models:
            known = (one.sizes, one.inputs, one.outputs)
            if known == (other.sizes, other.inputs, other.outputs):
                models.append(ModelDifference(one.sizes, one, other, rows(one, other)))
    if not models:
        raise OptionError(
            f"{before.file} and {after.file} are not of one model in one shape: "
            f"{_signature(before)}, and {_signature(after)}"
        )
    return Difference(before, after, tuple(models))


def _signature(facts: Facts) -> str:
    first = facts.models[0]
    sizes = f" ({sizes_text(first.sizes)})" if first.sizes else ""
    return f"{', '.join(first.inputs)} -> {', '.join(first.outputs)}{sizes}"


def rows(before: ModelFacts, after: ModelFacts) -> tuple[Row, ...]:
    """The stages of both, in the order in which the newer library runs them."""
    named = all(any(op.node for s in m.stages for op in s.operators) for m in (before, after))
    graph = networkx.Graph()
    for side, model in (("before", before), ("after", after)):
        graph.add_nodes_from((side, stage.number) for stage in model.stages)
        for stage, key in keys(model, named):
            graph.add_edge((side, stage.number), ("key", key))
    found = []
    for part in networkx.connected_components(graph):
        old = sorted(number for side, number in part if side == "before")
        new = sorted(number for side, number in part if side == "after")
        found.append(row([before.stages[n] for n in old], [after.stages[n] for n in new]))
    return tuple(sorted(found, key=lambda r: (r.after or r.before, r.before)))


def keys(model: ModelFacts, named: bool) -> Iterator[tuple[StageFacts, Hashable]]:
    """What the stages of two libraries are matched by: kind and node of each operator. The second
    operator of a kind and node, as of a copy, matches the second one. ``named``: do both libraries
    say which nodes there are? Otherwise the stages' names and kinds have to do.
    """
    seen: Counter[Hashable] = Counter()
    for stage in model.stages:
        own: list[Hashable] = [(op.kind, op.node) for op in stage.operators if op.node]
        if not named or not own:
            own = [(stage.name, *(op.kind for op in stage.operators))]
        for key in own:
            yield stage, (key, seen[key])
            seen[key] += 1


def row(before: Sequence[StageFacts], after: Sequence[StageFacts]) -> Row:
    heaviest = max([*after, *before], key=lambda stage: stage.seconds)
    changes: tuple[str, ...] = ()
    state: State = "partition"
    if not before or not after:
        state = "before only" if before else "after only"
    elif len(before) == len(after) == 1:
        changes = changed(before[0], after[0])
        state = "changed" if changes else "same"
    else:
        names = [", ".join("+".join(_kinds(s)) for s in side) for side in (before, after)]
        changes = (f"{_stages(before)} ({names[0]}) became {_stages(after)} ({names[1]})",)
    return Row(
        heaviest.name,
        tuple(op.kind for op in heaviest.operators),
        state,
        tuple(stage.number for stage in before),
        tuple(stage.number for stage in after),
        sum(stage.seconds for stage in before),
        sum(stage.seconds for stage in after),
        changes,
    )


def changed(before: StageFacts, after: StageFacts) -> tuple[str, ...]:
    """How a stage is built now that it was not before, in words."""
    said: list[str] = []
    pairs = {
        "operators": ("+".join(_kinds(before)), "+".join(_kinds(after))),
        "sketch": (before.sketch, after.sketch),
        "format": (before.number_format, after.number_format),
        "instructions": (before.instructions, after.instructions),
    }
    said += [f"{name}: {old} → {new}" for name, (old, new) in pairs.items() if old != new]
    choices = [{d.name: d.value for d in stage.config} for stage in (before, after)]
    return (*said, *changed_choices(*choices))


def changed_choices(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The decisions of a config that are other ones now: ``tile: 6x4 → 12x2``."""
    pairs = {
        name: (str(before.get(name, "none")), str(after.get(name, "none")))
        for name in dict.fromkeys([*before, *after])
    }
    return [f"{name}: {old} → {new}" for name, (old, new) in pairs.items() if old != new]


def _kinds(stage: StageFacts) -> list[str]:
    return [op.kind for op in stage.operators]


def _stages(found: Sequence[StageFacts]) -> str:
    return counted(len(found), "stage")
