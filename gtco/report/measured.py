"""Runs a library on random inputs, and adds the times of its stages to its facts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gtco.machine.target import cpu_name, detect
from gtco.report.bounds import bandwidths, capacities, nominal
from gtco.report.facts import Facts, Machine, Measurement, ModelFacts, Timing
from gtco.report.gather import judged
from gtco.runtime.module import Model, load
from gtco.runtime.tensors import random_inputs
from gtco.support.errors import PACKAGES, ArtifactError, GtcoError

SECONDS = 4.0  # seconds of runs, for each variant
MOST_SECONDS = 16.0  # seconds of runs, for all of them
LEAST_RUNS, MOST_RUNS = 10, 500


def measured(facts: Facts, library: Path, threads: int = 0) -> Facts:
    """The facts with the times of each variant's stages on this machine, and with its peak and
    bandwidths. A library that cannot be opened here stays unmeasured, and the facts say why.
    """
    models, ran = [], 0
    for model in facts.models:
        try:
            with load(library, threads=threads, dims=model.sizes or None) as opened:
                seconds = min(SECONDS, MOST_SECONDS / len(facts.models))
                models.append(timed(model, opened, seconds))
                ran = opened.threads if opened.device is None else 0
        except ArtifactError as error:
            models.append(replace(model, unmeasured=f"not measured: {error}"))
    facts = replace(facts, models=tuple(models))
    formats = {stage.number_format for model in models for stage in model.stages}
    return judged(facts, machine_here(sorted(formats), ran) if ran else facts.machine)


def timed(model: ModelFacts, opened: Model, seconds: float = SECONDS) -> ModelFacts:
    """The facts of a variant with the times of its stages, of so many seconds of runs. Runs with
    and without the clock between stages alternate, so that both see the same machine.
    """
    inputs = [*random_inputs(opened.inputs).values()]
    opened.timed(inputs)
    opened(*inputs)
    stages: list[list[float]] = []
    whole: list[float] = []
    end = time.perf_counter() + seconds
    while len(whole) < LEAST_RUNS or (time.perf_counter() < end and len(whole) < MOST_RUNS):
        start = time.perf_counter()
        opened(*inputs)
        whole.append(time.perf_counter() - start)
        stages.append(opened.timed(inputs))
    timings = [timing(seconds) for seconds in np.transpose(stages)]
    total = sum(t.median for t in timings)
    end_to_end = timing(whole)
    return replace(
        model,
        stages=tuple(
            replace(stage, measured=found)
            for stage, found in zip(model.stages, timings, strict=True)
        ),
        measurement=Measurement(
            runs=len(whole),
            threads=opened.threads,
            end_to_end=end_to_end,
            stages_seconds=total,
            summed_seconds=float(np.median(np.sum(stages, axis=1))),
            unattributed_seconds=end_to_end.median - total,
        ),
        unmeasured="",
    )


def timing(seconds: Sequence[float] | np.ndarray) -> Timing:
    least, median, p99 = np.percentile(seconds, [0, 50, 99])
    return Timing(float(least), float(median), float(p99))


def machine_here(formats: Sequence[str], threads: int) -> Machine:
    """This machine's peaks, measured within the last hour, and its bandwidths, if a compile has
    measured them; otherwise those of its constants.
    """
    target = detect()
    machine = nominal(target, threads, f"the constants of {target.mcpu}")
    machine = replace(machine, name=f"{cpu_name()} ({target.mcpu})")
    try:
        from gtco.support.torchless import import_tvm

        import_tvm()
        from gtco.search.calibration.peak import LEAST_HELD, machine_peak
        from gtco.search.calibration.profile import cached

        products = [dtype for dtype in formats if dtype in machine.peaks]
        found = {dtype: machine_peak(threads, dtype) for dtype in products}
        rates = cached(target)
    except ModuleNotFoundError as error:
        package = PACKAGES.get(str(error.name), str(error.name))
        return replace(machine, source=f"{machine.source}; measuring takes {package}")
    except GtcoError as error:
        return replace(machine, source=f"{machine.source}; not measured: {error}")
    peaks = {dtype: peak.flops for dtype, peak in found.items() if peak.held >= LEAST_HELD}
    machine = replace(machine, peaks={**machine.peaks, **peaks})
    whose = "measured here" if len(peaks) == len(found) else "by constants: other processes held "
    whose += "" if len(peaks) == len(found) else "the cores while they were to be measured"
    if rates is None:
        return replace(machine, source=f"peaks {whose}; bandwidths by constants")
    return replace(
        machine,
        bandwidths=bandwidths(rates.target.memory, threads),
        capacities=capacities(rates.target.memory, threads),
        source=f"peaks {whose}; bandwidths measured by a compile",
    )
