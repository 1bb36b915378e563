"""Runs TVM's MetaSchedule on gtco's stages: its rules, evolutionary search, XGBoost model and
gradient scheduler. Its candidates are built and timed as gtco's are.

Every batch of candidates is timed in one process beside gtco's first pick for the stage, in rounds,
with weights as cold as in a model (:mod:`bench.search.tvm_kernels`). Their results are compared
with those of the pick.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from gtco.codegen.jobs import Failure, Job, Kernel
from gtco.codegen.processes import python
from gtco.codegen.workers import Workers
from gtco.machine.target import Target
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import BuildError, InternalError, UnsupportedError
from gtco.tensor.space import Config
from gtco.tensor.stage import Stage
from gtco.tuning.local import run

from .tvm_kernels import Program, TvmJob, TvmKernels, artifact
from .tvm_stage import program

BATCH = 16  # trials of an iteration; its default of 64 would learn nothing within so few
POPULATION = 128  # of its search; its default of 512 takes most of the time on two cores
WARM_UP = 100  # measured programs before its model proposes; fewer where the trials are fewer
SHORTEST, LONGEST = 0.5, 4.0  # seconds that a batch is read for
WORKER = python(TvmJob.__module__)  # as it is named here, or the answers are of other classes


@dataclass(frozen=True)
class Task:
    """A stage that runs ``weight`` times, gtco's first pick for it, and the seconds of that pick.
    """

    stage: Stage
    weight: int
    first: Program
    seconds: float


@dataclass
class Found:
    """The results of a search: the task and the seconds of each trial in order (infinite if it
    failed), and the failures in words. ``gains`` are the trials that were a task's best so far,
    with their number; ``told`` the seconds from ``begin`` to each trial.
    """

    trials: list[tuple[int, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    gains: dict[int, list[tuple[int, Program]]] = field(default_factory=dict)
    told: list[float] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def add(self, task: int, seconds: float, made: Program | None = None) -> None:
        self.trials.append((task, seconds))
        self.told.append(time.monotonic() - self.begin)
        if made is not None and seconds < self.best.get(task, (inf, made))[0]:
            self.gains.setdefault(task, []).append((len(self.trials), made))

    @property
    def best(self) -> dict[int, tuple[float, Program]]:
        """The seconds and the program of each task's last gain."""
        last = {task: gains[-1] for task, gains in self.gains.items()}
        return {task: (self.trials[number - 1][1], made) for task, (number, made) in last.items()}

    def after(self, task: int, trials: int) -> tuple[Program, float] | None:
        """A task's best program of the first ``trials`` of all, and the seconds that these took.
        """
        known = [made for number, made in self.gains.get(task, ()) if number <= trials]
        return (known[-1], self.told[trials - 1]) if known else None


class Search:
    """MetaSchedule's builder and runner for the tasks; their results are in ``found``."""

    def __init__(self, tasks: Sequence[Task], target: Target, threads: int) -> None:
        self.tasks, self.target, self.threads = tasks, target, threads
        self.found = Found()
        self.built: dict[str, tuple[int, Program]] = {}
        self.serial = 0
        self.end, self.over = inf, False

    def run(self, trials: int, seed: int, seconds: float = inf) -> Found:
        """Runs so many trials in all, or as many as ``seconds`` allow; MetaSchedule's scheduler
        chooses the tasks.
        """
        from tvm.s_tir import meta_schedule as ms

        with Workers(self.target.cores, command=WORKER) as workers:
            builder, runner = self._builder(workers), self._runner()
            scheduler = ms.task_scheduler.GradientBased(seed=seed)
            warm_up = min(WARM_UP, trials // 4)
            model = ms.cost_model.XGBModel(num_warmup_samples=warm_up)
            self.end = time.monotonic() + seconds
            try:
                scheduler.tune(
                    [self._context(number, seed) for number in range(len(self.tasks))],
                    [float(task.weight) for task in self.tasks],
                    trials,
                    trials,
                    BATCH,
                    builder,
                    runner,
                    [ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel()],
                    ms.database.MemoryDatabase(),
                    model,
                )
            except RuntimeError:  # TVM's, for any exception of ours
                if not self.over:
                    raise
        return self.found

    def _context(self, number: int, seed: int) -> Any:
        import tvm
        from tvm.s_tir import meta_schedule as ms

        from gtco.codegen.llvm import llvm_target

        function = program(self.tasks[number].stage, self.target.lanes)
        return ms.TuneContext(
            mod=tvm.IRModule({"main": function.with_attr("task", number)}),
            target=llvm_target(self.target),
            space_generator="post-order-apply",
            search_strategy=ms.search_strategy.EvolutionarySearch(population_size=POPULATION),
            task_name=str(number),
            num_threads=self.threads,
            rand_state=seed + number,
            logger=ms.logging.get_logger(__name__),
        )

    def _builder(self, workers: Workers) -> Any:
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder

        search = self

        @derived_object
        class Builder(PyBuilder):
            def build(self, build_inputs: Any) -> Any:
                named = search.build([b.mod for b in build_inputs], workers)
                return [
                    BuilderResult(name, None) if not why else BuilderResult(None, why)
                    for name, why in named
                ]

        return Builder()

    def build(self, modules: Sequence[Any], workers: Workers) -> list[tuple[str, str]]:
        """The name of each module's program, and the reason if there is none."""
        import tvm

        if time.monotonic() > self.end:  # its own loop knows no limit of time
            self.over = True
            raise RuntimeError("the time is over")
        named: dict[str, Any] = {}
        for module in modules:
            self.serial += 1
            named[f"tvm_{self.serial}"] = module
        jobs: Any = [TvmJob(s, tvm.ir.save_json(m), self.target) for s, m in named.items()]
        whys: dict[str, str] = {}
        for answer in workers.build(jobs):
            module = named[answer.symbol]
            task = int(module["main"].attrs["task"])
            try:
                if isinstance(answer, Failure):
                    raise BuildError(answer.reason)
                assert isinstance(answer, TvmKernels)
                self.built[answer.symbol] = task, Program.of_tvm(answer, module)
            except (BuildError, UnsupportedError) as error:
                whys[answer.symbol] = str(error)
                self.found.add(task, inf)
                self.found.failures.append(str(error))
        return [(name, whys.get(name, "")) for name in named]

    def _runner(self) -> Any:
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

        search = self

        @derived_object
        class Future(PyRunnerFuture):
            def __init__(self, seconds: float, why: str) -> None:
                super().__init__()
                self.seconds, self.why = seconds, why

            def done(self) -> bool:
                return True

            def result(self) -> Any:
                if self.why:
                    return RunnerResult(None, self.why)
                return RunnerResult([self.seconds], None)

        @derived_object
        class Runner(PyRunner):
            def run(self, runner_inputs: Any) -> Any:
                names = [str(one.artifact_path) for one in runner_inputs]
                return [Future(*read) for read in search.time(names)]

        return Runner()

    def time(self, names: Sequence[str]) -> list[tuple[float, str]]:
        """Seconds of each program of one task that was built, and the reason if there are none."""
        taken = [self.built.pop(name) for name in names]
        if not taken:
            return []
        number = taken[0][0]
        programs = [made for _, made in taken]
        read = self._read(number, programs)
        for (seconds, why), made in zip(read, programs, strict=True):
            self.found.add(number, inf if why else seconds, None if why else made)
            if why:
                self.found.failures.append(why)
        return read

    def _read(self, number: int, programs: Sequence[Program]) -> list[tuple[float, str]]:
        task = self.tasks[number]
        ratios = beside(task, programs, self.target, self.threads, (SHORTEST, LONGEST))
        if isinstance(ratios, str):
            if len(programs) == 1:
                return [(inf, f"TVM's program {ratios} while it was timed")]
            # it is one of them: the others are worth another try
            half = len(programs) // 2
            return [*self._read(number, programs[:half]), *self._read(number, programs[half:])]
        wrong = "TVM's program computes something else"
        return [(task.seconds * r, "") if r else (inf, wrong) for r in ratios]


def beside(
    task: Task,
    programs: Sequence[Program],
    target: Target,
    threads: int,
    seconds: tuple[float, float],
) -> list[float | None] | str:
    """The time of each program over that of gtco's first pick in the same round, in the median;
    None if the program computes something else. If the process fails, the failure in words. Rounds
    go on for ``seconds``, (least, most).
    """
    made, runs = artifact(task.stage, [task.first, *programs], target, threads)
    with tempfile.TemporaryDirectory(prefix="gtco-trials-") as folder:
        library = Path(folder, "trials.so")
        write_artifact(made, library)
        said = run(library, *seconds)
    if isinstance(said, str):
        return said
    steps = np.array(said["seconds"])
    times = np.stack([steps[:, list(r)].sum(axis=1) for r in runs], axis=1)
    first = (times[:, 1] + times[:, -1]) / 2  # the very first one brought in the activations
    middle = np.median(times[:, 2:-1] / first[:, None], axis=0)
    wrong = set(said["wrong"])
    return [None if n in wrong else float(m) for n, m in enumerate(middle, 2)]


def programs(
    stage: Stage, configs: Sequence[Config], target: Target, workers: Workers
) -> dict[Config, Program]:
    """Each config's kernel, under a name of its own. All of them were built before."""
    named = {f"gtco_{stage.key}_{config.key}": config for config in configs}
    jobs = [Job(name, stage.canonical, c, target) for name, c in named.items()]
    found = {}
    for answer in workers.build(jobs):
        if not isinstance(answer, Kernel):
            raise InternalError(f"{stage.label} is built no more: {answer.reason}")
        found[named[answer.symbol]] = Program.of(answer, stage.canonical)
    return found
