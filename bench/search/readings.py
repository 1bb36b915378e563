"""Measures how long configs of some stages take on this machine, for ``bench policy --readings``.

``python -m bench readings --out FILE [--per-stage 90] [--seconds 600] [--stages TEXT ...]
[--precision bf16]``

The file gets the machine's table of rates and, for each stage, the times of the policy's pick, of
its proposals and of drawn configs. Those of a batch are timed alternately with a standing config
of the stage, so that the speed of a shared machine cancels out. In the end the pick and the fastest
configs of each stage are timed once more, side by side and for longer, until the fastest ones are
all among those: the fastest of many short readings is partly luck. The command goes on with a file
that exists. A pick that the policy of today makes is added if it was not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from zlib import crc32

import numpy as np

from gtco.cli.arguments import positive
from gtco.cli.console import status
from gtco.codegen.jobs import Job, Kernel
from gtco.codegen.workers import Workers
from gtco.machine.load import Others
from gtco.machine.target import cpu_name, cpu_target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.profile import machine_table, table_json
from gtco.search.policy import priced
from gtco.support.errors import OptionError
from gtco.support.options import PRECISIONS
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick, Space
from gtco.tensor.stage import Stage
from gtco.tuning.measure import Measurer, Timed
from gtco.tuning.trial import Trial

from ..harness.readings import STAGES, append, load, precision_of
from ..harness.suite import available_threads, console

BATCH = 15  # configs that are timed alternately, beside the standing one
BATCH_SECONDS = 1.5
FINALISTS = 6  # the fastest configs of a stage, which are timed once more beside the pick
FINAL_SECONDS = 4.0
HOPELESS = 4.0  # times the pick's predicted time: such configs are not drawn
DRAWS = 40  # for one config that is kept
QUIET = 0.05  # share of the cores that other processes may take while a batch is timed
TRIES = 20  # for a batch, each after a pause of PAUSE seconds
PAUSE = 2.0


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    end = time.monotonic() + options.seconds
    target = cpu_target()
    if not options.out.exists():
        measured = machine_table(target)
        if measured.rates is None:
            raise OptionError(measured.note)
        append(options.out, {"about": cpu_name(), "table": table_json(measured.rates, target)})
    there = load(options.out)
    about, table = there.about, there.table
    if (about, table.target.mcpu) != (cpu_name(), target.mcpu):
        raise OptionError(
            f"{options.out} has readings of {about} ({table.target.mcpu}), and this machine is "
            f"{cpu_name()} ({target.mcpu}): give --out another file"
        )
    policy = AnalyticPolicy(replace(table.target, cores=options.threads), table)
    stages = {
        n: s.canonical
        for n, s in STAGES.items()
        if precision_of(n) == options.precision and _named(n, options.stages)
    }
    with Workers(options.threads) as workers, status() as update:
        measurer = Measurer(workers, policy.target, options.threads)
        for name, stage in stages.items():
            while time.monotonic() < end:
                read = load(options.out)
                known = read.seconds.get(name, {})
                wanted = _wanted(policy, name, stage, known, options.per_stage)[:BATCH]
                update(f"{name}: {len(known)} of {options.per_stage} configs")
                final = not wanted
                if final:
                    wanted = _finalists(policy, stage, known, read.final.get(name, frozenset()))
                    update(f"{name}: the fastest once more")
                if not wanted:
                    break
                standing = next(iter(known), wanted[0].config)
                seconds = FINAL_SECONDS if final else BATCH_SECONDS
                batch = _measured(measurer, stage, policy, standing, wanted, seconds, end)
                if batch is not None:
                    mark = {"final": True} if final else {}
                    append(options.out, {"stage": name, **mark, **batch})
    found = load(options.out).seconds
    console().print(
        f"{options.out}: {sum(map(len, found.values()))} configs of {len(found)} stages"
    )
    return 0


def _named(name: str, parts: Collection[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _wanted(
    policy: AnalyticPolicy, name: str, stage: Stage, known: Collection[Config], most: int
) -> list[Pick]:
    """The configs that are still to be measured: the pick, then alternately proposals and drawn
    ones, ``most`` of them together with the ``known`` ones. They are the same in each call.
    """
    space = space_of(stage, policy.target)
    pick = policy.choose(stage)
    assert pick is not None
    best = policy.best(stage, most // 4)
    others = policy.alternatives(stage, pick, [b.config for b in best])
    proposed = [p for pair in zip(best, others, strict=False) for p in pair] + best
    drawn = _drawn(policy, space, Random(crc32(name.encode())), most, HOPELESS * pick.seconds)
    mixed = [p for pair in zip(proposed, drawn, strict=False) for p in pair]
    listed = {p.config: p for p in (pick, *mixed, *drawn)}
    left = [p for p in listed.values() if p.config not in known]
    if pick.config not in known:
        return left[: max(1, most - len(known))]
    return left[: max(0, most - len(known))]


def _finalists(
    policy: AnalyticPolicy, stage: Stage, known: Mapping[Config, float], final: Collection[Config]
) -> list[Pick]:
    """The pick and the fastest of the ``known`` configs; none if all of these are ``final``."""
    space = space_of(stage, policy.target)
    pick = policy.choose(stage)
    by_time = sorted(known, key=known.__getitem__)
    priced_ones = (priced(policy, space, config) for config in by_time)
    fastest = [p for p in priced_ones if p is not None][:FINALISTS]  # others left the space
    if pick is not None and pick.config in known:
        fastest.append(pick)
    listed = {p.config: p for p in fastest}
    return [] if listed.keys() <= {*final} else [*listed.values()]


def _drawn(
    policy: AnalyticPolicy, space: Space, random: Random, n: int, least: float
) -> list[Pick]:
    found: dict[Config, Pick] = {}
    for _ in range(DRAWS * n):
        if len(found) == n:
            break
        pick = priced(policy, space, space.sample(random))
        if pick is not None and pick.seconds <= least:
            found.setdefault(pick.config, pick)
    return list(found.values())


def _measured(
    measurer: Measurer,
    stage: Stage,
    policy: AnalyticPolicy,
    standing: Config,
    wanted: Sequence[Pick],
    seconds: float,
    end: float,
) -> dict[str, object] | None:
    """A line of the file, or None if other processes kept the cores busy until ``end``. Configs
    that fail are left out, and a failing standing one is an error.
    """
    first = priced(policy, space_of(stage, policy.target), standing)
    if first is None:
        raise OptionError(
            f"the space of {stage.label} no longer contains {standing.to_json()}, which the file "
            "compares all others with: write a new file"
        )
    picks = [first, *(p for p in wanted if p.config != standing)]
    jobs = {f"k_{p.config.key}": p for p in picks}
    built = measurer.workers.build(
        [Job(symbol, stage, p.config, measurer.target) for symbol, p in jobs.items()]
    )
    kernels = {k.symbol: k for k in built if isinstance(k, Kernel)}
    kept = [(p, kernels[s]) for s, p in jobs.items() if s in kernels]
    if not kept or kept[0][0] is not first:
        raise OptionError(f"{stage.label}: {standing.to_json()} could not be built")
    trial = Trial(stage, tuple(p for p, _ in kept), tuple(k for _, k in kept))
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE)
        busy = Others()
        (timed,) = measurer.time([trial], seconds)
        if timed.failed:
            raise OptionError(f"{stage.label} could not be timed: {timed.failed}")
        others = busy.share()
        if others <= QUIET:
            return line_of(timed)
        if time.monotonic() >= end:
            return None
    raise OptionError(
        f"{stage.label} could not be timed: other processes took {others:.0%} of the cores. Finer "
        "tasks win then that lose on a quiet machine: measure again when nothing else runs"
    )


def line_of(timed: Timed) -> dict[str, object]:
    """``standing`` and ``ratios`` of a batch (:mod:`bench.harness.readings`)."""
    readings = timed.readings
    base = (readings[:, 0] + readings[:, -1]) / 2
    ratios: list[list[object]] = []
    for n, pick in enumerate(timed.trial.picks):
        if n not in timed.wrong:
            ratio = 1.0 if n == 0 else float(np.median(readings[:, n] / base))
            ratios.append([pick.config.to_json(), round(ratio, 4)])
    return {"standing": round(float(np.median(base)), 9), "ratios": ratios}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench readings", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="made or continued")
    parser.add_argument("--per-stage", type=positive, default=90, help="configs; %(default)s")
    parser.add_argument(
        "--seconds", type=positive, default=600, help="no batch begins later; %(default)s"
    )
    parser.add_argument("--stages", nargs="*", default=[], help="parts of the stages' names")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="%(default)s")
    parser.add_argument("--threads", type=positive, default=available_threads())
    return parser
