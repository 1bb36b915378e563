"""The subgraph scheduler beside round-robin and TVM's own, at equal trials on the same readings.

``python -m bench scheduler [--models vit-ti-16,swin-t] [--draws 48] [--readings FILE]``

Of each heavy stage of a model, configs drawn at random are built and timed once, and their readings
replayed: whatever a scheduler gives a slot to, it reads the next ``SLOT`` of that stage. TVM's is
MetaSchedule's ``GradientBased`` of the installed wheel, run by its own ``tune`` with a runner that
replays. ``over the best`` is the model's time over the least that all readings allow, in the
geometric mean over shuffled orders of the readings. ``--readings`` keeps them, or replays those
kept before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from rich.table import Table

from gtco.cli.arguments import positive
from gtco.search.scheduler import Task, allot

from ..harness.by_model import ended, every_model, parser
from ..harness.suite import console
from ..harness.workload import export
from ..models.names import MODELS

SLOT = 4  # trials
SHUFFLES = 20
PATIENCE = 4  # slots; fewer stop sooner and end farther from the best
SHARES = (0.2, 0.3, 0.4, 0.6, 0.8)  # of all trials, at which schedulers are compared
NEAR = 1.02  # times the best: as good as done


@dataclass(frozen=True)
class Readings:
    """A stage that runs ``weight`` times: seconds of configs drawn at random, in order, and the
    seconds that it would take at the machine's peak.
    """

    label: str
    weight: int
    floor: float
    seconds: tuple[float, ...]

    @property
    def slots(self) -> tuple[float, ...]:
        """The best time of each slot."""
        return tuple(
            min(self.seconds[n : n + SLOT]) for n in range(0, len(self.seconds) - SLOT + 1, SLOT)
        )


# A scheduler: the tasks in the order in which they get slots.
Scheduler = Callable[[Sequence[Readings], int], list[int]]


def round_robin(tasks: Sequence[Readings], seed: int) -> list[int]:
    """Each stage in turn, as long as it has readings."""
    most = max(len(task.slots) for task in tasks)
    return [i for turn in range(most) for i, task in enumerate(tasks) if turn < len(task.slots)]


def equation_3(tasks: Sequence[Readings], seed: int) -> list[int]:
    """gtco's scheduler, one slot at a time."""
    known = [Task((t.weight,), (t.slots[0],), t.floor, patience=PATIENCE) for t in tasks]
    order: list[int] = []
    while any(given := allot(known, 1)):
        for i, n in enumerate(given):
            for _ in range(n):
                history, slots = known[i].history, tasks[i].slots
                best = min(history[-1], slots[len(history) - 1])
                left = len(slots) - len(history)
                known[i] = _after(known[i], best, left == 0)
                order.append(i)
    return order


def _after(task: Task, best: float, exhausted: bool) -> Task:
    history = (*task.history, best)
    return Task(
        task.weights, history, task.floor, patience=task.patience, exhausted=exhausted
    )


def gradient_based(tasks: Sequence[Readings], seed: int) -> list[int]:
    """MetaSchedule's scheduler, run by TVM itself. Its tasks are empty functions, and its
    measurements are read from the replay.
    """
    import tvm
    from tvm import te
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult
    from tvm.s_tir.meta_schedule.search_strategy import ReplayTrace
    from tvm.s_tir.meta_schedule.space_generator import ScheduleFn

    order: list[int] = []
    given = [0] * len(tasks)

    @derived_object
    class Builder(PyBuilder):
        def build(self, build_inputs: Any) -> Any:
            numbers = [int(b.mod["main"].attrs["task"]) for b in build_inputs]
            return [BuilderResult(str(number), None) for number in numbers]

    @derived_object
    class Future(PyRunnerFuture):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def done(self) -> bool:
            return True

        def result(self) -> Any:
            return RunnerResult([self.seconds], None)

    @derived_object
    class Runner(PyRunner):
        def run(self, runner_inputs: Any) -> Any:
            read = []
            for one in runner_inputs:
                number = int(str(one.artifact_path))
                read.append(Future(tasks[number].slots[given[number]]))
                given[number] += 1
                order.append(number)
            return read

    def context(number: int) -> Any:
        x = te.placeholder((1,), name="x")
        function = te.create_prim_func([x, te.compute((1,), lambda i: x[i])])
        return ms.TuneContext(
            mod=tvm.IRModule({"main": function.with_attr("task", number)}),
            target=tvm.target.Target({"kind": "llvm", "num-cores": 2}),
            space_generator=ScheduleFn(
                lambda schedule: None, sch_rules=[], postprocs=[], mutator_probs={}
            ),
            search_strategy=ReplayTrace(),
            task_name=str(number),
            num_threads=1,
            rand_state=seed + 1,
            logger=ms.logging.get_logger(__name__),
        )

    weights = [float(task.weight) for task in tasks]
    slots = [len(task.slots) for task in tasks]
    assert len(set(slots)) == 1, "TVM's limit is the same for every task"
    scheduler = ms.task_scheduler.GradientBased(seed=seed + 1)
    contexts = [context(number) for number in range(len(tasks))]
    # one trial an iteration: what a slot read is its best
    scheduler.tune(
        contexts, weights, sum(slots), slots[0], 1, Builder(), Runner(), [], None, None
    )
    return order


SCHEDULERS: dict[str, Scheduler] = {
    "round-robin": round_robin,
    "MetaSchedule's GradientBased": gradient_based,
    "equation 3": equation_3,
}


def curve(tasks: Sequence[Readings], order: Sequence[int]) -> Iterator[float]:
    """Seconds of the model after each slot, from the slot on by which every stage has had one."""
    best: dict[int, float] = {}
    given = [0] * len(tasks)
    for i in order:
        best[i] = min(best.get(i, float("inf")), tasks[i].slots[given[i]])
        given[i] += 1
        if len(best) == len(tasks):
            yield sum(task.weight * best[n] for n, task in enumerate(tasks))


def shuffled(tasks: Sequence[Readings], seed: int) -> list[Readings]:
    random = Random(seed)
    found = []
    for task in tasks:
        seconds = list(task.seconds)
        random.shuffle(seconds)
        found.append(Readings(task.label, task.weight, task.floor, tuple(seconds)))
    return found


@dataclass(frozen=True)
class Row:
    """One scheduler on one model.

    - the model's time over the best after each of ``SHARES`` of the trials
    - the median number of trials until it was within ``NEAR`` of the best, and in how many of the
      orders it got there
    - the mean number of trials that it gave out of ``total``, and the time at which it ended
    """

    model: str
    scheduler: str
    over: tuple[float, ...]
    trials: float
    reached: int
    given: float
    total: int
    end: float


def compare(model: str, tasks: Sequence[Readings]) -> list[Row]:
    best = sum(task.weight * min(task.seconds) for task in tasks)
    slots = sum(len(task.slots) for task in tasks)
    rows = []
    for name, scheduler in SCHEDULERS.items():
        over: list[list[float]] = [[] for _ in SHARES]
        near: list[int] = []
        given: list[int] = []
        ends: list[float] = []
        for seed in range(SHUFFLES):
            order = shuffled(tasks, seed)
            chosen = scheduler(order, seed)
            seconds = list(curve(order, chosen))
            given.append(SLOT * len(chosen))
            ends.append(seconds[-1] / best)
            first = len(tasks) - 1  # every stage has had a slot
            for found, share in zip(over, SHARES, strict=True):
                at = min(max(int(share * slots) - 1 - first, 0), len(seconds) - 1)
                found.append(seconds[at] / best)
            reached = next((n for n, s in enumerate(seconds) if s <= NEAR * best), None)
            if reached is not None:
                near.append(SLOT * (reached + 1 + first))
        means = tuple(statistics.geometric_mean(values) for values in over)
        median = statistics.median([*near, *[float("inf")] * (SHUFFLES - len(near))])
        end = statistics.geometric_mean(ends)
        spent = statistics.fmean(given)
        rows.append(Row(model, name, means, median, len(near), spent, SLOT * slots, end))
    return rows


def measure(name: str, options: argparse.Namespace) -> list[Readings]:
    """The heavy stages of a model with readings of configs drawn at random from their spaces."""
    from gtco.codegen.generate import generate
    from gtco.codegen.workers import Workers
    from gtco.compiler import stages_of
    from gtco.tensor.sketch import space_of
    from gtco.tensor.space import Pick, Rejection
    from gtco.tuning.latencies import peak_seconds
    from gtco.tuning.measure import Measurer
    from gtco.tuning.tune import heaviest
    from gtco.tuning.verdict import judge

    options.folder.mkdir(parents=True, exist_ok=True)
    policy, stages = stages_of(export(name, options.folder), threads=options.threads)
    random, found = Random(0), []
    with Workers(options.threads) as workers:
        measurer = Measurer(workers, policy.target, options.threads)
        generated = generate(stages, policy.choose, policy.target, workers)
        for result in heaviest([generated]):
            space = space_of(result.stage, policy.target)
            drawn = [space.sample(random) for _ in range(4 * options.draws)]
            picks = []
            for config in list(dict.fromkeys(drawn))[: options.draws]:
                sketch = space.sketch(config)
                assert not isinstance(sketch, Rejection)
                picks.append(Pick(sketch, config, policy.price(sketch, config)))
            kernel = generated.kernels[result.stage.key]
            trial, _ = measurer.build(result.stage, result.first, kernel, picks)
            if trial is None:
                continue
            for timed in measurer.time([trial], 0.0):
                if not timed.failed:
                    result.add(timed, judge(timed.readings, timed.wrong))
            seconds = [result.readings[p.config] for p in picks if p.config in result.readings]
            if seconds:  # where a space is small, its configs are drawn again
                drawn_again = itertools.islice(itertools.cycle(seconds), options.draws)
                floor = peak_seconds(result, policy)
                runs = result.occurrences
                found.append(Readings(result.stage.label, runs, floor, tuple(drawn_again)))
    return found


def main(argv: Sequence[str]) -> int:
    rows, failed = every_model(_parser().parse_args(argv), replayed)
    show(rows)
    return ended(failed)


def replayed(name: str, options: argparse.Namespace) -> list[Row]:
    """Every scheduler on one model's readings. The readings come from the file if it has them."""
    known: dict[str, list[dict[str, Any]]] = {}
    if options.readings and options.readings.exists():
        known = json.loads(options.readings.read_text())
    if name in known:
        tasks = [Readings(**{**t, "seconds": tuple(t["seconds"])}) for t in known[name]]
    else:
        tasks = measure(name, options)
        if options.readings:
            known[name] = [asdict(task) for task in tasks]
            options.readings.write_text(json.dumps(known, indent=1))
    return compare(name, tasks)


def show(rows: Sequence[Row]) -> None:
    table = Table(title="time of the model over the best, at equal trials", title_justify="left")
    table.add_column("model")
    table.add_column("scheduler")
    for share in SHARES:
        table.add_column(f"{share:.0%} of the trials", justify="right")
    table.add_column(f"trials to {NEAR:g} of the best", justify="right")
    table.add_column("trials given, end", justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.scheduler,
            *(f"{over:.3f}" for over in row.over),
            f"{row.trials:g} ({row.reached} of {SHUFFLES} orders)",
            f"{row.given:.0f} of {row.total}, {row.end:.3f}",
        )
    console().print(table)


def _parser() -> argparse.ArgumentParser:
    found = parser("scheduler", __doc__, MODELS, file="--readings")
    found.add_argument("--draws", type=positive, default=48, help="configs of each stage")
    return found
