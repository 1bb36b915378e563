"""Measures for the models of one call: first rivals of their picks and of their partitions, then
the whole models. At the end it records what stands.

:mod:`gtco.tuning` tunes stages and :mod:`gtco.driver.cooptimize` compares partitions. This module
hands them what they need of each :class:`~gtco.driver.compilation.Compilation` and puts their
results there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.driver.compilation import Compilation
from gtco.driver.cooptimize import SHARE, CutModel, Measured, cooptimize, part, rest
from gtco.runtime.publish import temporary
from gtco.runtime.writing.linking import write_artifact
from gtco.search.recorded import by_stage, last_reading
from gtco.search.records.records import Record, Records, circumstances, now
from gtco.support.options import Tune
from gtco.tuning import whole
from gtco.tuning.result import StageResult, together
from gtco.tuning.runner import Runner
from gtco.tuning.tune import tune
from gtco.tuning.view import View


def measure(
    compilations: Sequence[Compilation],
    workers: Workers,
    records: Records,
    effort: Tune,
    runner: Runner | None = None,
) -> None:
    """Replaces picks by candidates that were measured to be faster, in all models. A stage that
    several models have is tuned once. ``runner`` runs what is measured; None is this machine.
    """
    first = compilations[0]
    views: list[View] = []
    notes: dict[int, list[str]] = {}
    # The end of the time is for what only whole models show, where it suffices for that.
    last = sum(map(whole_cost, compilations))
    if settles := last <= whole.SHARE * effort.seconds:
        effort = replace(effort, seconds=effort.seconds - last)

    def progress(view: View) -> None:
        views.append(view)
        first.progress("tune", None, view)

    def tuned(models: Sequence[Generated], effort: Tune) -> None:
        known = [len(model.notes) for model in models]
        found = tune(
            models,
            first.policy,
            workers,
            threads=first.options.threads,
            effort=effort,
            records=records,
            shipped=first.shipped,
            progress=progress,
            earlier=results,
            runner=runner,
        )
        for model, length in zip(models, known, strict=True):
            notes.setdefault(id(model), []).extend(model.notes[length:])
        results.extend(found)

    results: list[StageResult] = []
    start = time.monotonic()
    with first.phase("tune") as say:
        if effort.fusion:
            begin, some = time.monotonic(), part(effort, SHARE / len(compilations))
            for compilation in compilations:
                partitioned(compilation, tuned, workers, some, say, runner)
            trials = sum(result.measured for result in results)
            effort = rest(effort, time.monotonic() - begin, trials)
        tuned([c.generated for c in compilations], effort)
        for compilation in compilations:
            compilation.report.notes += notes[id(compilation.generated)]
            compilation.accidents |= bool(notes[id(compilation.generated)])
            if settles:
                settle(compilation, records, runner)
            if results or not as_it_was(compilation):
                conclude(compilation, records)
        end = replace(views[-1], elapsed=time.monotonic() - start)
        say(str(end))
    for compilation in compilations[1:]:
        compilation.report.phases.append(first.report.phases[-1])
    for compilation in compilations:
        compilation.report.tuning = together(results, compilation.generated)
        compilation.report.tuned = end


def partitioned(
    run: Compilation,
    tuned: Callable[[Sequence[Generated], Tune], None],
    workers: Workers,
    effort: Tune,
    say: Callable[[str], None],
    runner: Runner | None = None,
) -> None:
    """Measures rivals of the predicted partition and gives the model the one that wins."""
    policy = run.policy
    steps = Measured(
        run.whole,
        policy,
        workers,
        run.options.threads,
        lambda stages: run.generate(stages, policy, workers),
        tuned,
        runner,
    )
    first = CutModel(run.graph, run.found, run.generated)
    chosen, news = cooptimize(first, steps, effort)
    run.graph, run.found, run.generated = chosen.graph, chosen.partition, chosen.generated
    run.report.fusion = news
    say(news)


def as_it_was(run: Compilation) -> bool:
    """True if the stages and picks are still those from before anything was measured."""
    return run.first[2].same(run.generated)


def whole_cost(run: Compilation) -> float:
    """The least number of seconds that :func:`settle` is predicted to take."""
    weights = sum(array.nbytes for array in run.graph.constants.values())
    return whole.cost(sum(run.policy.predict(stage) for stage in run.found.stages), weights)


def settle(run: Compilation, records: Records, runner: Runner | None = None) -> None:
    """Runs the untuned and the tuned model alternately, and keeps only the changes that make the
    model faster.
    """
    graph, found, first = run.first
    if as_it_was(run):
        return
    with temporary("trials") as folder:
        builds = ("first", graph, first), ("tuned", run.graph, run.generated)
        libraries = [
            write_artifact(run.artifact(name, graph.copy(), generated), folder / f"{name}.so")
            for name, graph, generated in builds
        ]
        readings = whole.read(libraries[0], libraries[1], runner)
    if isinstance(readings, str):
        run.report.notes.append(f"tuning: what it made {readings}: it is left as it was")
        run.accidents = True
        run.graph, run.found, run.generated = graph, found, first
        return
    verdict = whole.judge(first, run.generated, readings)
    if verdict.uncut:
        here = circumstances(run.policy.target)
        known = by_stage(records.under(here))
        records.add(whole.refuted(first, run.generated, readings, known, here))
        run.graph, run.found = graph, found
    run.generated = whole.settled(first, run.generated, verdict)
    run.report.settled = verdict


def conclude(run: Compilation, records: Records) -> None:
    """Records the final stages of the model and their configs, for later compiles by records. All
    these rows have one time and the key of the model, because models share stages but not
    partitions.
    """
    here = circumstances(run.policy.target)
    known = by_stage(records.under(here))
    stages = {stage.key: stage.canonical for stage in run.generated.stages}
    chosen, end, model = [], now(), run.whole.key
    for key, stage in stages.items():
        pick = run.generated.choices[key]
        seconds = last_reading(known.get(key, ()), pick.config)
        row = Record.of(stage, pick, here, "chosen", (seconds, None, None), model)
        chosen.append(replace(row, time=end))
    records.add(chosen)
