"""Measures for the models of one call: first rivals of their picks and of their partitions, then
the whole models. At the end it records what stands.

:mod:`gtco.tuning` tunes stages and :mod:`gtco.driver.cooptimize` compares partitions. This module
hands them what they need of each compilation, and gives what then stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gtco.codegen.generate import Generated
from gtco.codegen.workers import Workers
from gtco.driver.compilation import Compilation
from gtco.driver.cooptimize import SHARE, Measured, cooptimize, part, rest
from gtco.driver.linking.finishing import artifact
from gtco.driver.phases import Built, CutModel
from gtco.runtime.publish import temporary, weights_beside
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
    built: Mapping[Compilation, Built],
    workers: Workers,
    records: Records,
    shipped: Sequence[Record],
    effort: Tune,
    runner: Runner | None = None,
) -> dict[Compilation, Built]:
    """All models with candidates that were measured to be faster in the place of picks. A stage
    that several models have is tuned once. ``shipped``: the records that come with gtco;
    ``runner`` runs what is measured, None is this machine. The kernels of ``built`` are changed.
    """
    made = dict(built)
    first = next(iter(made))
    before = {run: _copied(one.model) for run, one in made.items()}
    views: list[View] = []
    notes: dict[int, list[str]] = {}
    asked: list[Generated] = []  # kept, so that no other model gets the id of one that is gone
    # The end of the time is for what only whole models show, where it suffices for that.
    last = sum(map(whole_cost, made.values()))
    if settles := last <= whole.SHARE * effort.seconds:
        effort = replace(effort, seconds=effort.seconds - last)

    def progress(view: View) -> None:
        views.append(view)
        first.progress("tune", None, view)

    def tuned(models: Sequence[Generated], effort: Tune) -> None:
        asked.extend(models)
        known = [len(model.notes) for model in models]
        found = tune(
            models,
            made[first].policy,
            workers,
            threads=first.options.threads,
            effort=effort,
            records=records,
            shipped=shipped,
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
        # a prediction may be too low, by less than this
        slow = [
            run
            for run, one in made.items()
            if 2 * one.whole.times * predicted(one) > effort.latency
        ]
        if effort.fusion and slow:
            begin, some = time.monotonic(), part(effort, SHARE / len(slow))
            for run in slow:
                made[run] = partitioned(run, made[run], tuned, workers, some, say, runner)
            trials = sum(result.measured for result in results)
            effort = rest(effort, time.monotonic() - begin, trials)
        tuned([one.generated for one in made.values()], effort)
        for run in made:
            said = notes[id(made[run].generated)]
            run.report.notes += said
            run.accidents |= bool(said)
            if settles:
                made[run] = settle(run, made[run], before[run], records, runner)
            if results or not before[run].generated.same(made[run].generated):
                conclude(made[run], records)
        end = replace(views[-1], elapsed=time.monotonic() - start)
        say(str(end))
    for run, one in made.items():
        if run is not first:
            run.report.phases.append(first.report.phases[-1])
        run.report.tuning = together(results, one.generated)
        run.report.tuned = end
    return made


def _copied(model: CutModel) -> CutModel:
    """The model as it is now: measuring changes the kernels that it has."""
    return replace(model, generated=model.generated.copy())


def partitioned(
    run: Compilation,
    built: Built,
    tuned: Callable[[Sequence[Generated], Tune], None],
    workers: Workers,
    effort: Tune,
    say: Callable[[str], None],
    runner: Runner | None = None,
) -> Built:
    """Measures rivals of the predicted partition and gives the model the one that wins."""
    policy, constants = built.policy, built.model.graph.constants
    steps = Measured(
        built.whole.graph,
        policy,
        workers,
        run.options.threads,
        lambda stages: replace(
            run.kernels(stages, policy, constants, workers), times=built.whole.times
        ),
        tuned,
        runner,
    )
    chosen, news = cooptimize(built.model, steps, effort)
    run.report.fusion = news
    say(news)
    return replace(built, model=chosen)


def predicted(built: Built) -> float:
    """Seconds of a run, or of a part of its batch, by what is known of its stages."""
    return sum(map(built.policy.predict, built.model.partition.stages))


def whole_cost(built: Built) -> float:
    """The least number of seconds that :func:`settle` is predicted to take. It runs one part of a
    batch.
    """
    weights = sum(array.nbytes for array in built.model.graph.constants.values())
    return whole.cost(predicted(built), weights)


def settle(
    run: Compilation, built: Built, first: CutModel, records: Records, runner: Runner | None = None
) -> Built:
    """Runs the untuned model, ``first``, and the tuned one alternately. Only those changes stay
    that make the model faster.
    """
    tuned = built.generated
    if first.generated.same(tuned):
        return built
    with temporary("trials") as folder:
        builds = ("first", replace(built, model=first)), ("tuned", built)
        libraries = [
            write_artifact(
                artifact(run, name, one.with_graph(one.model.graph.copy())), folder / f"{name}.so"
            )
            for name, one in builds
        ]
        if runner is not None and any(map(weights_beside, libraries)):
            run.report.notes.append(
                "tuning: the weights are in a file of their own, which is not sent to a farm, so "
                "the whole model was not timed: what single stages gained is kept"
            )
            return built
        readings = whole.read(libraries[0], libraries[1], runner, whole_cost(built))
    if isinstance(readings, str):
        run.report.notes.append(f"tuning: what it made {readings}: it is left as it was")
        run.accidents = True
        return replace(built, model=first)
    verdict = whole.judge(first.generated, tuned, readings)
    stands = built.model
    if verdict.uncut:
        here = circumstances(built.policy.target)
        known = by_stage(records.under(here))
        records.add(whole.refuted(first.generated, tuned, readings, known, here))
        stands = first
    run.report.settled = verdict
    stands = replace(stands, generated=whole.settled(first.generated, tuned, verdict))
    return replace(built, model=stands)


def conclude(built: Built, records: Records) -> None:
    """Records the final stages of the model and their configs, for later compiles by records. All
    these rows have one time and the key of the model, because models share stages but not
    partitions.
    """
    here = circumstances(built.policy.target)
    known = by_stage(records.under(here))
    generated = built.generated
    stages = {stage.key: stage.canonical for stage in generated.stages}
    chosen, end, model = [], now(), built.whole.graph.key
    for key, stage in stages.items():
        pick = generated.choices[key]
        seconds = last_reading(known.get(key, ()), pick.config)
        row = Record.of(stage, pick, here, "chosen", (seconds, None, None), model)
        chosen.append(replace(row, time=end))
    records.add(chosen)
