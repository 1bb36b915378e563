"""Every stage of a model -> kernels. What fails is cut into single operators, then given to the
fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gtco.codegen.build import Failure, Job, Kernel
from gtco.codegen.workers import Workers
from gtco.errors import BuildError
from gtco.target import Target
from gtco.tensor.space import Config, Sketch
from gtco.tensor.stage import Stage, make_stage


class Choice(Protocol):
    """What a policy picked for a stage: a sketch, its config, and the seconds it predicts."""

    @property
    def sketch(self) -> Sketch: ...

    @property
    def config(self) -> Config: ...

    @property
    def seconds(self) -> float: ...


Choose = Callable[[Stage], Choice | None]


@dataclass
class Generated:
    """The stages as they were built in the end, with kernels and choices by stage key."""

    stages: list[Stage]
    kernels: dict[str, Kernel] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def generate(
    stages: Sequence[Stage],
    choose: Choose,
    fallback: Choose,
    target: Target,
    workers: Workers,
    *,
    text: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Generated:
    """Build each different stage once, in ``workers``.

    A stage that cannot be built is cut into single operators (first with the policy's choice, then
    with ``fallback``); every failure becomes a note. Raises :class:`BuildError` where even the
    fallback fails.
    """
    result = Generated(list(stages))
    for chooser in (choose, choose, fallback):
        todo = {s.key: s for s in result.stages if s.key not in result.kernels}
        failed = _attempt(todo, chooser, target, workers, text, progress, result)
        if not failed:
            return result
        result.stages = [
            piece
            for stage in result.stages
            for piece in (split(stage) if stage.key in failed else [stage])
        ]
    reasons = "\n  ".join(result.notes[-len(failed) :])
    raise BuildError(f"code generation failed even operator by operator:\n  {reasons}")


def split(stage: Stage) -> list[Stage]:
    """The stage's operators, each a stage of its own."""
    return [make_stage([op], stage.types, stage.constants) for op in stage.operators]


def _attempt(
    todo: dict[str, Stage],
    choose: Choose,
    target: Target,
    workers: Workers,
    text: bool,
    progress: Callable[[int, int], None],
    result: Generated,
) -> set[str]:
    """Build ``todo`` into ``result``; gives the keys that failed."""
    failed: set[str] = set()
    jobs = []
    for key, stage in todo.items():
        choice = choose(stage)
        if choice is None:
            failed.add(key)
            result.notes.append(f"no kernel can compute {stage.label}")
            continue
        result.choices[key] = choice
        jobs.append(Job(f"gtco_{key}", stage.canonical, choice.config, target, text))
    for done, answer in enumerate(workers.build(jobs), 1):
        key = answer.symbol.removeprefix("gtco_")
        if isinstance(answer, Failure):
            failed.add(key)
            what = f"{todo[key].label} ({key}, {result.choices[key].config.to_json()})"
            result.notes.append(f"stage {what} could not be built: {answer.reason}")
        else:
            result.kernels[key] = answer
        progress(done, len(jobs))
    return failed
