"""Kernels that several stages share: of a library of many sizes, or of the steps of a loop that was
written out. Kernels that differ in numbers alone are compiled once
(:mod:`gtco.codegen.generalize`), and each stage has its numbers beside its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType

from gtco.codegen.generate import Choose
from gtco.codegen.jobs import Failure, Job, Kernel, Outlined, ProgramJob
from gtco.codegen.outlines import Outline, arguments
from gtco.codegen.workers import Ahead, Workers
from gtco.machine.target import Target
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage

ALONE = 8  # stages of one graph that differ in where their slices begin have kernels of their own


def alike(stages: Iterable[Stage]) -> list[Stage]:
    """The stages of a graph that are to share kernels: those of more than :data:`ALONE` that differ
    in where their slices begin alone, such as the steps of a loop that was written out.
    """
    groups: dict[str, dict[str, Stage]] = {}
    for stage in stages:
        groups.setdefault(stage.key_anywhere, {})[stage.key] = stage
    return [one for group in groups.values() if len(group) > ALONE for one in group.values()]


@dataclass
class Sharing:
    """Kernels that several stages share, while they are chosen and compiled; all by the stage's
    key.
    """

    target: Target
    stages: dict[str, Stage] = field(default_factory=dict)
    picks: dict[str, Pick] = field(default_factory=dict)
    outlined: dict[str, Outlined] = field(default_factory=dict)

    def outline(
        self, stages: Iterable[Stage], choose: Callable[[Stage], Pick | None], ahead: Ahead
    ) -> None:
        """Chooses the configs of the stages that are new. Their outlines are made meanwhile."""
        jobs = []
        for key, stage in {s.key: s for s in stages if s.key not in self.stages}.items():
            if (pick := choose(stage)) is None:
                continue  # what becomes of it is a question for generate
            self.stages[key], self.picks[key] = stage, pick
            job = Job(f"gtco_{key}", stage.canonical, pick.config, self.target, outlined=True)
            jobs.append(job)
        ahead.add(jobs)

    def take(self, answers: Iterable[Kernel | Failure]) -> None:
        """The outlines that were made."""
        for answer in answers:
            if isinstance(answer, Outlined):  # a failure is met again when it is built alone
                self.outlined[answer.symbol.removeprefix("gtco_")] = answer

    def jobs(self, text: bool) -> dict[str, tuple[Job, list[str]]]:
        """The kernels of the outlines so far, by their symbols: the job of each and its stages, the
        first of which it is built from. First those of several stages, which will stay so.
        ``text``: with the lowered TIR.
        """
        groups: dict[str, list[str]] = {}
        for key in self.stages:  # in this order, whichever outline came first
            if key in self.outlined:
                groups.setdefault(self.outlined[key].outline.key, []).append(key)
        jobs: dict[str, tuple[Job, list[str]]] = {}
        for outline, keys in sorted(groups.items(), key=lambda group: len(group[1]) == 1):
            outlines: list[Outline] = [self.outlined[key].outline for key in keys]
            several = len({each.numbers for each in outlines}) > 1
            symbol = f"gtco_{outline if len(keys) > 1 else keys[0]}"
            jobs[symbol] = (
                Job(
                    symbol,
                    self.stages[keys[0]].canonical,
                    self.picks[keys[0]].config,
                    self.target,
                    text,
                    arguments=arguments(outlines) if several else None,
                ),
                keys,
            )
        return jobs

    def compile(
        self,
        text: bool,
        workers: Workers,
        progress: Callable[[int, int], None] = lambda done, total: None,
        guessed: Mapping[str, tuple[Job | ProgramJob, Kernel | Failure]] = MappingProxyType({}),
    ) -> dict[str, tuple[Config, Kernel]]:
        """Compiles the kernels, those of one outline as one. Gives each stage's config and kernel.
        ``guessed``: jobs that were done already, by their symbols, with their answers.
        """
        jobs = self.jobs(text)
        answers: list[Kernel | Failure] = []
        left: list[Job] = []
        for symbol, (job, _) in jobs.items():
            before = guessed.get(symbol)
            if before is not None and before[0] == job:
                answers.append(before[1])
            else:
                left.append(job)
        made: dict[str, tuple[Config, Kernel]] = {}
        for done, answer in enumerate(chain(answers, workers.build(left)), 1):
            progress(done, len(jobs))
            if isinstance(answer, Kernel):
                job, keys = jobs[answer.symbol]
                for key in keys:
                    made[key] = self.picks[key].config, self._member(answer, key, job)
        return {key: made[key] for key in self.stages if key in made}

    def _member(self, kernel: Kernel, key: str, job: Job) -> Kernel:
        """The kernel as one of its stages calls it."""
        one = self.outlined[key]
        values: tuple[int, ...] = ()
        dtype = ""
        if job.arguments is not None:
            values, dtype = job.arguments.values(one.outline.numbers), job.arguments.dtype
        return replace(
            kernel,
            tasks=one.tasks,
            workspace=one.workspace,
            packings=one.packings,
            lines=one.lines,
            numbers=values,
            numbers_dtype=dtype,
        )


def shared_steps(
    stages: Iterable[Stage],
    choose: Choose,
    target: Target,
    text: bool,
    workers: Workers,
    known: dict[str, tuple[Config, Kernel]],
) -> dict[str, Pick]:
    """The choices for those of the stages that are :func:`alike`. Their kernels join those that are
    ``known``.
    """
    if not (steps := alike(stages)):
        return {}
    sharing = Sharing(target)
    with workers.ahead() as ahead:
        sharing.outline(steps, lambda stage: choose(stage, ()), ahead)
        sharing.take(ahead.answers())
    made = sharing.compile(text, workers)
    known |= made
    return {key: sharing.picks[key] for key in made}
