"""What a library of many sizes does once: the search for stages, and the code of kernels.

A few of the sizes are searched in full. Each other size takes the cheapest of their partitions
(:mod:`gtco.graph.fusion.repeat`). Kernels that differ in numbers alone are compiled once
(:mod:`gtco.codegen.generalize`), and each stage has its numbers beside its weights. A stage
therefore prefers a config that differs from that of another size in its chunks at most, if that is
predicted to be nearly as fast as its best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gtco.codegen.jobs import Failure, Job, Kernel, Outlined
from gtco.codegen.outlines import Outline, arguments
from gtco.codegen.workers import Ahead, Workers
from gtco.driver.compilation import Compilation
from gtco.driver.forms import form_of
from gtco.driver.layouts import CLOSE, LOOKED_AT
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage


@dataclass
class Sharing:
    """The kernels of a library of many sizes, while they are chosen and compiled; all by the
    stage's key.
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    picks: dict[str, Pick] = field(default_factory=dict)
    outlined: dict[str, Outlined] = field(default_factory=dict)

    def outline(self, run: Compilation, ahead: Ahead) -> None:
        """Chooses the configs of the stages of one variant. Their outlines are made meanwhile."""
        new = {s.key: s for s in run.found.stages if s.key not in self.stages}
        target, shared = run.policy.target, run.shared
        assert shared is not None
        jobs = []
        for key, stage in new.items():
            if (pick := self._choose(run, stage)) is None:
                continue  # what becomes of it is a question for generate
            self.stages[key], self.picks[key] = stage, pick
            shared.forms.add(stage, pick.config)
            jobs.append(Job(f"gtco_{key}", stage.canonical, pick.config, target, outlined=True))
        ahead.add(jobs)
        shared.layouts.add_picks(run.found.stages, self.picks, run.graph.constants)

    def take(self, answers: Iterable[Kernel | Failure]) -> None:
        """The outlines that were made."""
        for answer in answers:
            if isinstance(answer, Outlined):  # a failure is met again when it is built alone
                self.outlined[answer.symbol.removeprefix("gtco_")] = answer

    def _choose(self, run: Compilation, stage: Stage) -> Pick | None:
        policy, shared = run.policy, run.shared
        assert shared is not None
        constants = run.graph.constants
        if run.repeats and (near := shared.forms.near(policy, stage)):
            close = (pick for pick in near if pick.seconds <= CLOSE * near[0].seconds)
            return next((p for p in close if shared.layouts.fits(p, stage, constants)), near[0])
        best = shared.layouts.choose(policy, {}, constants, stage)
        known = shared.forms.of(stage)
        if best is None or not known or form_of(best.config) in known:
            return best
        first = policy.choose(stage)
        promising = policy.best(stage, LOOKED_AT)
        if first is None or not promising or first.config != promising[0].config:
            return best  # it was measured
        close = [
            pick
            for pick in promising
            if pick.seconds <= CLOSE * first.seconds and form_of(pick.config) in known
        ]
        fitting = (p for p in close if shared.layouts.fits(p, stage, constants))
        return next(fitting, best)

    def compile(self, run: Compilation, workers: Workers, progress: Callable[[str], None]) -> int:
        """Compiles the kernels, those of one outline as one. They are known to all variants then
        (:class:`gtco.driver.shared.Shared`). Gives the number of kernels that were compiled.
        """
        shared, target = run.shared, run.policy.target
        assert shared is not None
        text = run.options.dump is not None
        groups: dict[str, list[str]] = {}
        for key, one in self.outlined.items():
            groups.setdefault(one.outline.key, []).append(key)
        jobs: dict[str, tuple[Job, list[str]]] = {}
        for outline, keys in groups.items():
            outlines: list[Outline] = [self.outlined[key].outline for key in keys]
            several = len({each.numbers for each in outlines}) > 1
            symbol = f"gtco_{outline if len(keys) > 1 else keys[0]}"
            jobs[symbol] = (
                Job(
                    symbol,
                    self.stages[keys[-1]].canonical,
                    self.picks[keys[-1]].config,
                    target,
                    text,
                    arguments=arguments(outlines) if several else None,
                ),
                keys,
            )
        made = 0
        for done, answer in enumerate(workers.build(job for job, _ in jobs.values()), 1):
            progress(f"{done}/{len(jobs)}")
            if not isinstance(answer, Kernel):
                continue
            made += 1
            job, keys = jobs[answer.symbol]
            for key in keys:
                shared.kernels[key] = self.picks[key].config, self._member(answer, key, job)
        shared.picks |= {key: pick for key, pick in self.picks.items() if key in shared.kernels}
        return made

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
