"""The language model beside other searches, measured on this machine (TLM, Tables 2 and 3, Fig. 9).

Stages of held-out models are tuned one at a time. Each system has the same number of trials, the
same space, and the same tuner, which builds, measures and decides; only who proposes differs.

- ``language model``: its policy's pick, then sentences, from the third slot on beside the search;
- ``search``: the analytic pick, then evolution with a cost model (XGBoost), as ``gtco tune`` does;
- ``analytic``: the same pick, then the alternatives of the least price and mutations;
- ``random``: a drawn config, then others that are drawn.

A trial is a config that was built, the first pick included. In the end the best of each system
after each number of trials, and TVM's MetaSchedule, are timed once more, side by side. A reading
that chose a config is thereby not what the config is judged by.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from random import Random
from typing import cast

from gtco.codegen.generate import generate
from gtco.codegen.workers import Workers
from gtco.search.analytic import AnalyticPolicy
from gtco.search.language.policy import LanguagePolicy
from gtco.search.policy import Policy, priced
from gtco.search.records.records import Record, Records
from gtco.search.records.standing import relative
from gtco.support.errors import UnsupportedError
from gtco.support.options import Tune
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage
from gtco.tuning.result import StageResult
from gtco.tuning.tune import tune
from gtco.tuning.view import View

from ...harness.lines import append, read
from ...search.metaschedule import Search, Task, beside, programs
from ...search.tvm_kernels import Program
from ..data.stages import Collected
from ..data.workloads import Workload

TRIALS = (1, 10, 16, 32, 64)  # and all of them
PATIENCE = 100_000  # slots without a gain: a system spends all its trials
DRAWS = 200  # for one config that can be priced
END_SECONDS = (2.0, 8.0)  # for the last timing of a stage: at least, and at most
METASCHEDULE = "MetaSchedule"


@dataclass(frozen=True)
class Trace:
    """What a system tried for a stage: by number of trials, the config that was best until then and
    the seconds since the search began.
    """

    tried: int
    best: dict[int, Config] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One stage. ``ratios``: by system and number of trials, the time of its best over that of the
    analytic pick, by the last timing; ``seconds`` that each search had taken by then.
    """

    model: str
    label: str
    key: str
    seed: int
    ratios: dict[str, dict[int, float]]
    seconds: dict[str, dict[int, float]]


class Drawn:
    """Proposes configs of a stage's space, each as likely as another. (A stage has a generator of
    its own, so what is drawn does not depend on the stages before.)
    """

    failures: Sequence[str] = ()

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy, self.seed = policy, seed
        self._randoms: dict[str, Random] = {}

    def propose(self, result: StageResult, n: int) -> list[Pick]:
        found: dict[Config, Pick] = {}
        for _ in range(n * DRAWS):
            if len(found) == n:
                break
            pick = self.draw(result.stage)
            if pick is not None and pick.config not in result.tested:
                found.setdefault(pick.config, pick)
        return list(found.values())

    def draw(self, stage: Stage) -> Pick | None:
        random = self._randoms.setdefault(stage.key, Random(f"{self.seed} {stage.key}"))
        space = space_of(stage, self.policy.target)
        return priced(self.policy, space, space.sample(random))

    def first(self, stage: Stage, without: object = ()) -> Pick | None:
        return next((pick for _ in range(DRAWS) if (pick := self.draw(stage)) is not None), None)


# what is judged -----------------------------------------------------------------------------------
def heavy_stages(
    collected: Iterable[Collected], policy: Policy, most: int
) -> list[tuple[str, Stage]]:
    """The heaviest stages of held-out models on CPUs in float32, batch 1: one of each model in
    turn, so that no model and no kind of stage has them all.
    """
    ranked: dict[str, list[Stage]] = {}
    for one in collected:
        if one.workload.held_out and one.workload == Workload(one.workload.model):
            weights = {s.key: n * policy.predict(s) for s, n in one.stages}
            ordered = sorted((s for s, _ in one.stages), key=lambda s: -weights[s.key])
            ranked[one.workload.model] = ordered
    found: dict[str, tuple[str, Stage]] = {}
    kinds: set[str] = set()
    while len(found) < most and any(ranked.values()):
        for model, stages in ranked.items():
            ranked[model] = fresh = [s for s in stages if s.key not in found]
            if fresh and len(found) < most:
                taken = next((s for s in fresh if s.label not in kinds), fresh[0])
                found[taken.key] = model, taken
                kinds.add(taken.label)
    return list(found.values())


# one system ---------------------------------------------------------------------------------------
def trace(
    stage: Stage,
    policy: Policy,
    workers: Workers,
    trials: int,
    seconds: float,
    effort: Tune,
    drawn: Drawn | None = None,
) -> Trace:
    """Tunes a stage as ``effort`` says, or by ``drawn`` configs, with so many ``trials``."""
    begin = time.monotonic()
    choose = drawn.first if drawn else policy.choose
    made = generate([stage], choose, policy.target, workers)
    told: list[tuple[int, float]] = [(1, time.monotonic() - begin)]

    def note(view: View) -> None:
        told.append((1 + view.trials, time.monotonic() - begin))

    first = made.choices[stage.key].config
    with Records(":memory:") as records:
        if trials > 1:
            tune(
                [made],
                policy,
                workers,
                threads=policy.target.cores,
                effort=replace(effort, trials=trials - 1, seconds=seconds, patience=PATIENCE),
                records=records,
                progress=note,
                proposals=drawn,
            )
        return traced(first, records.all(), told)


def traced(first: Config, rows: Sequence[Record], told: Sequence[tuple[int, float]]) -> Trace:
    """``told`` are numbers of trials and the seconds until they were decided."""
    order = list(dict.fromkeys([first, *(row.parsed for row in rows)]))
    times = {first: 1.0, **relative(rows)}
    best: dict[int, Config] = {}
    seconds: dict[int, float] = {}
    for k in (*(k for k in TRIALS if k < len(order)), len(order)):
        best[k] = min(order[:k], key=lambda config: times.get(config, inf))
        seconds[k] = min((s for n, s in told if n >= k), default=told[-1][1])
    return Trace(len(order), best, seconds)


# all of a stage -----------------------------------------------------------------------------------
def live(
    model: str,
    stage: Stage,
    policy: AnalyticPolicy,
    workers: Workers,
    weights: Path,
    trials: Mapping[str, int],
    seed: int,
    seconds: float,
) -> Row:
    """``trials`` of each system; those that are not named are left out. A search takes at most so
    many ``seconds``.
    """
    written = LanguagePolicy(policy, policy.rates, weights)
    ways: dict[str, tuple[Policy, Tune, Drawn | None]] = {
        "language model": (
            cast("Policy", written),
            Tune(policy="language-model", weights=str(weights)),
            None,
        ),
        "search": (policy, Tune(), None),
        "analytic": (policy, Tune(learned=False), None),
        "random": (policy, Tune(learned=False), Drawn(policy, seed)),
    }
    traces: dict[str, Trace] = {}
    for name, (chooser, effort, drawn) in ways.items():
        if name in trials:
            traces[name] = trace(stage, chooser, workers, trials[name], seconds, effort, drawn)
    pick = policy.choose(stage)
    assert pick is not None
    bests = (config for found in traces.values() for config in found.best.values())
    configs = list(dict.fromkeys([pick.config, *bests]))
    kernels = programs(stage, configs, policy.target, workers)
    first = kernels[pick.config]
    task = Task(stage.canonical, 1, first, pick.seconds)
    rivals = [kernels[config] for config in configs]
    theirs: dict[int, tuple[Program, float]] = {}
    if METASCHEDULE in trials:
        theirs = metaschedule(task, policy, trials[METASCHEDULE], seed, seconds)
    rivals += [made for made, _ in theirs.values()]
    timed = beside(task, rivals, policy.target, policy.target.cores, END_SECONDS)
    if isinstance(timed, str):
        raise UnsupportedError(f"{stage.label}: the last timing {timed}")
    times = {config: ratio for config, ratio in zip(configs, timed, strict=False) if ratio}
    ratios = {
        name: {k: times[c] for k, c in found.best.items() if c in times}
        for name, found in traces.items()
    }
    taken = {name: found.seconds for name, found in traces.items()}
    if theirs:
        own = zip(theirs, timed[len(configs) :], strict=True)
        ratios[METASCHEDULE] = {k: ratio for k, ratio in own if ratio}
        taken[METASCHEDULE] = {k: took for k, (_, took) in theirs.items()}
    return Row(model, stage.label, stage.key, seed, ratios, taken)


def metaschedule(
    task: Task, policy: AnalyticPolicy, trials: int, seed: int, seconds: float
) -> dict[int, tuple[Program, float]]:
    """The best program of TVM's search after so many trials, and the seconds until then. Empty if
    it has no right one.
    """
    search = Search([task], policy.target, policy.target.cores)
    try:
        found = search.run(trials, seed, seconds)
    except UnsupportedError:
        return {}
    most = len(found.trials)
    best = {k: found.after(0, k) for k in (*(k for k in TRIALS if k < most), most)}
    return {k: one for k, one in best.items() if one is not None}


# files and figures --------------------------------------------------------------------------------
def read_rows(path: Path) -> list[Row]:
    """The rows of a file, which need not exist."""
    found = []
    for data in read(path):
        for name in ("ratios", "seconds"):
            data[name] = {s: {int(k): v for k, v in each.items()} for s, each in data[name].items()}
        found.append(Row(**data))
    return found


def quality(rows: Sequence[Row], system: str, k: int, beside: tuple[str, int]) -> tuple[float, int]:
    """The geometric mean of the reference's time over the system's after ``k`` trials, and of how
    many rows both have one. A search that had no more configs to try counts with its last.
    """
    name, most = beside
    found = []
    for row in rows:
        own, theirs = row.ratios.get(system, {}), row.ratios.get(name, {})
        if own and theirs:
            found.append(reached(theirs, most) / reached(own, k))
    return (statistics.geometric_mean(found) if found else 0.0), len(found)


def reached(of: Mapping[int, float], k: int) -> float:
    """The value at the largest number of trials up to ``k``."""
    return of[max((n for n in of if n <= k), default=min(of))]


def lines(rows: Sequence[Row], trials: Sequence[int] = TRIALS) -> list[str]:
    """A table for people: speed of the search with most trials is 1."""
    most = max((k for row in rows for k in row.ratios.get("search", {})), default=0)
    trials = tuple(dict.fromkeys((*trials, most)))
    said = [
        f"{len(rows)} stages; speed over that of the search after {most} trials",
        "  trials        " + "".join(f"{k:>8}" for k in trials),
    ]
    systems = dict.fromkeys(name for row in rows for name in row.ratios)
    for name in systems:
        last = max(k for row in rows for k in row.ratios.get(name, {0: 0}))
        cells = [
            f"{quality(rows, name, k, ('search', most))[0]:8.3f}" if k <= last else f"{'':8}"
            for k in trials
        ]
        said.append(f"  {name:14}" + "".join(cells))
        spent = [row.seconds[name] for row in rows if name in row.seconds]
        means = [statistics.fmean(reached(one, k) for one in spent) for k in trials if k <= last]
        said.append(f"  {'seconds':>14}" + "".join(f"{mean:8.1f}" for mean in means))
    return said


def run(
    chosen: Sequence[tuple[str, Stage]],
    policy: AnalyticPolicy,
    threads: int,
    weights: Path,
    trials: Mapping[str, int],
    seed: int,
    path: Path,
    seconds: float,
    each: float,
    say: Callable[[str], None],
) -> list[Row]:
    """All rows of ``path`` after measuring those stages that it has not, until the ``seconds`` are
    over; a search takes at most ``each``.
    """
    end = time.monotonic() + seconds
    done = {(row.key, row.seed) for row in read_rows(path)}
    with Workers(threads) as workers:
        for model, stage in chosen:
            if (stage.key, seed) in done or time.monotonic() > end:
                continue
            left = min(each, max(end - time.monotonic(), 1.0))
            row = live(model, stage, policy, workers, weights, trials, seed, left)
            append(path, row)
            say(f"{model}: {stage.label}")
            say("\n".join(lines([row])))
    return read_rows(path)
