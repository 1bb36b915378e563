"""One space, many policies: decisions, configs, and the programs of a stage that they span.

The open choices of a stage are an ordered list of named decisions (GTCO Section IV-D): a tuner
mutates it in this order, an analyzer enumerates it and a language model reads it. The first
decision is the sketch, a loop structure; the others are the choices that this structure leaves
open. A policy picks a :class:`Config`. :func:`build` checks it, and turns it into a program or a
:class:`Rejection`. A decision's role says what the decision is for, and a policy may use nothing
else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from random import Random
from typing import Any, Literal, Protocol

from gtco.machine.target import Machine
from gtco.tensor.loops import Line
from gtco.tensor.packing import Packing
from gtco.tensor.stage import Stage
from gtco.tensor.workload import Workload

Option = int | str
SKETCH = "sketch"  # the name of the first decision
# The roles of decisions:
# - structure: the loops, a sketch by its name; the first decision of a stage;
# - micro-kernel: the row of the register level's table that makes the innermost loops;
# - parallel: numbers of chunks that a loop is cut into, each a task or a share of one;
# - grain: the part of the output that one task makes, the same choice seen from the other side;
# - registers: results that are summed up side by side;
# - operand: the place from which an operand is read;
# - block: extents of a loop that stay in a cache;
# - overlap: whether and how memory is read ahead of its use, the overlapping option first;
# - order: the outer one of two loops, the usual order first;
# - loops: the same, if none is usual.
Role = Literal[
    "structure",
    "micro-kernel",
    "parallel",
    "grain",
    "registers",
    "operand",
    "block",
    "overlap",
    "order",
    "loops",
]


@dataclass(frozen=True)
class Decision:
    """One named choice, its role and its options, given the choices before it.

    - ``kernels``: for a micro-kernel, each option's row of the table of rates, and the number of
      useful products of one lane of one of its vector operations (products beyond the stage's
      columns are not useful);
    - ``unsaid``: the option of configs that were written before this decision existed.
    """

    name: str
    role: Role
    options: tuple[Option, ...]
    kernels: tuple[tuple[str, float], ...] = ()
    unsaid: Option | None = None


@dataclass(frozen=True)
class Config:
    """A sketch's name and a full set of choices, in the order they were made."""

    sketch: str
    choices: tuple[tuple[str, Option], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> Mapping[str, Option]:
        return dict(self.choices)

    def to_json(self) -> dict[str, Any]:
        """All choices by name, the sketch first."""
        return {SKETCH: self.sketch, **self.by_name}

    @property
    def key(self) -> str:
        """Hash of all choices, 16 hex digits."""
        return sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Config:
        """The config of any object, in the order of its keys; :func:`check` says if it belongs to a
        space.
        """
        return Config(data.get(SKETCH, ""), tuple((k, v) for k, v in data.items() if k != SKETCH))


@dataclass(frozen=True)
class Rejection:
    """The reason why a config has no program. ``reason`` is one of a few, for counting; ``detail``
    is a sentence.
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Program:
    """The result of ``build``: a TIR function and the facts that the runtime needs to call it.

    - ``tasks``: the extent of the parallel range;
    - ``workspace``: private scratch of a thread, in bytes;
    - ``packings``: the layout of constant inputs, by input name;
    - ``sources``: LLVM IR modules into which the function calls;
    - ``lines``: its loops in words, if the sketch knows more of them than the function shows.
    """

    function: Any
    tasks: int
    workspace: int
    packings: Mapping[str, Packing]
    sources: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()


class Sketch(Protocol):
    """A stage with a loop structure. Sketches are frozen dataclasses; ``name`` says which rule made
    them.
    """

    @property
    def stage(self) -> Stage: ...

    @property
    def name(self) -> str: ...

    @property
    def structure(self) -> str:
        """The loops as the papers write them, as ``SSRSRS``."""
        ...

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The first decision that ``chosen`` leaves open, with its options; None when it is
        complete.
        """
        ...

    def workload(self, config: Config) -> Workload: ...

    def build(self, config: Config, symbol: str) -> Program | Rejection: ...


@dataclass(frozen=True)
class Pick:
    """The choice of a policy for a stage: a sketch, its config and the predicted seconds."""

    sketch: Sketch
    config: Config
    seconds: float


def configs(sketch: Sketch, chosen: Mapping[str, Option] | None = None) -> Iterator[Config]:
    """Every config of a sketch, depth first in the order of its decisions."""
    chosen = chosen or {}
    decision = sketch.next_decision(chosen)
    if decision is None:
        yield Config(sketch.name, tuple(chosen.items()))
        return
    for option in decision.options:
        yield from configs(sketch, {**chosen, decision.name: option})


def check(sketch: Sketch, config: Config) -> Rejection | None:
    """The reason why the config is not in the sketch's space; None if it is. Configs come from
    anywhere (an old record, a mutation), so their choices must be the options of the decisions, in
    their order.
    """
    if config.sketch != sketch.name:
        what = f"it is a config of '{config.sketch}', the sketch is '{sketch.name}'"
        return Rejection("unknown sketch", what)
    chosen: dict[str, Option] = {}
    for name, choice in config.choices:
        decision = sketch.next_decision(chosen)
        if decision is None:
            what = f"'{name}' is given, and nothing is left to decide"
            return Rejection("unknown decision", what)
        if decision.name != name:
            what = f"'{name}' is given where '{decision.name}' is to be decided"
            return Rejection("unknown decision", what)
        if not _is_option(choice, decision):
            options = ", ".join(map(str, decision.options))
            return Rejection("no option", f"{name}={choice!r} is none of the options {options}")
        chosen[name] = choice
    if (left := sketch.next_decision(chosen)) is not None:
        return Rejection("left open", f"'{left.name}' is left open")
    return None


def _is_option(choice: object, decision: Decision) -> bool:
    """True if the choice is an option. Python's True equals 1, but is not an option."""
    return any(type(o) is type(choice) and o == choice for o in decision.options)


def build(sketch: Sketch, config: Config, symbol: str) -> Program | Rejection:
    """The config's program. This is the only way to one, so that nothing outside the space is
    built.
    """
    return check(sketch, config) or sketch.build(config, symbol)


@dataclass(frozen=True)
class Space:
    """Every program of a stage on a target. The first decision is the sketch, and ``sketches`` are
    its options. They follow from the other two fields (:func:`gtco.tensor.sketch.space_of`).
    """

    stage: Stage
    target: Machine
    sketches: tuple[Sketch, ...] = field(compare=False, repr=False)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        """The first decision that ``chosen`` leaves open; None when it is complete."""
        if SKETCH not in chosen:
            return Decision(SKETCH, "structure", tuple(s.name for s in self.sketches))
        sketch = next(s for s in self.sketches if s.name == chosen[SKETCH])
        return sketch.next_decision({k: v for k, v in chosen.items() if k != SKETCH})

    def configs(self) -> Iterator[Config]:
        """Every config, in the order of the decisions."""
        for sketch in self.sketches:
            yield from configs(sketch)

    @cached_property
    def size(self) -> int:
        """The number of configs."""
        return sum(1 for _ in self.configs())

    def sketch(self, config: Config) -> Sketch | Rejection:
        """The sketch of the config, or the reason why the config is not in the space."""
        for sketch in self.sketches:
            if sketch.name == config.sketch:
                return check(sketch, config) or sketch
        known = ", ".join(sketch.name for sketch in self.sketches) or "none"
        what = f"no sketch '{config.sketch}' for {self.stage.label}, which has {known}"
        return Rejection("unknown sketch", what)

    def check(self, config: Config) -> Rejection | None:
        """The reason why the config is not in the space; None if it is."""
        found = self.sketch(config)
        return found if isinstance(found, Rejection) else None

    def spelled_out(self, config: Config) -> Config:
        """The config with the decisions that it leaves unsaid, if that is in the space; else the
        config itself.
        """
        said = config.to_json()
        chosen: dict[str, Option] = {}
        if all(sketch.name != config.sketch for sketch in self.sketches):
            return config
        while decision := self.next_decision(chosen):
            choice = said.get(decision.name, decision.unsaid)
            if choice is None or not _is_option(choice, decision):
                return config
            chosen[decision.name] = choice
        return Config.from_json(chosen) if said.keys() <= chosen.keys() else config

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        """The config's program, checked first."""
        found = self.sketch(config)
        return found if isinstance(found, Rejection) else found.build(config, symbol)

    def sample(self, rng: Random) -> Config:
        """A config drawn decision by decision, with equal probability for each option."""
        return self._completed({}, lambda decision: rng.choice(decision.options))

    def mutate(self, config: Config, rng: Random) -> Config:
        """The config with one decision changed. A later choice is kept if it is still an option,
        and else drawn again. Returns the config itself if the space has no other. Raises
        ``ValueError`` if the config is not in the space.
        """
        if rejection := self.check(config):
            raise ValueError(str(rejection))
        kept: dict[str, Option] = config.to_json()
        chosen: dict[str, Option] = {}
        open_: list[tuple[dict[str, Option], Decision]] = []
        while decision := self.next_decision(chosen):
            if len(decision.options) > 1:
                open_.append((dict(chosen), decision))
            chosen[decision.name] = kept[decision.name]
        if not open_:
            return config
        chosen, decision = rng.choice(open_)
        others = [o for o in decision.options if o != kept[decision.name]]
        chosen[decision.name] = rng.choice(others)

        def choose(decision: Decision) -> Option:
            if _is_option(kept.get(decision.name), decision):
                return kept[decision.name]
            return rng.choice(decision.options)

        return self._completed(chosen, choose)

    def crossover(self, one: Config, other: Config, rng: Random) -> Config | None:
        """A config whose every decision comes from one of its parents, drawn if theirs differ. None
        if at some decision neither parent's choice is still an option. Raises ``ValueError`` if a
        parent is not in the space.
        """
        parents = []
        for parent in (one, other):
            if rejection := self.check(parent):
                raise ValueError(str(rejection))
            parents.append(parent.to_json())
        chosen: dict[str, Option] = {}
        while decision := self.next_decision(chosen):
            theirs = [p[decision.name] for p in parents if decision.name in p]
            left = [choice for choice in theirs if _is_option(choice, decision)]
            if not left:
                return None
            chosen[decision.name] = rng.choice(left)
        return Config.from_json(chosen)

    def _completed(
        self, chosen: dict[str, Option], choose: Callable[[Decision], Option]
    ) -> Config:
        while decision := self.next_decision(chosen):
            chosen[decision.name] = choose(decision)
        return Config.from_json(chosen)
