"""The sizes of a library of many, from the model to the kernels: which are searched in full, in
which order, and what goes on at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log, prod

from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob
from gtco.codegen.workers import Ahead, Workers
from gtco.driver.checks import at_sizes
from gtco.driver.compilation import Compilation, Progress, silent
from gtco.driver.forms import form_of
from gtco.driver.layouts import CLOSE, LOOKED_AT
from gtco.driver.sharing import Sharing
from gtco.machine.target import Target
from gtco.runtime.artifact import MAX_STEPS
from gtco.search.records.records import Records
from gtco.support.errors import OptionError
from gtco.support.sizes import apart, said
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

FEW = 4  # variants of a library whose stages and kernels are made for each by itself
GROWTH = 4.0  # from one size that is searched in full to the next, by the product of its dimensions


def searched(sizes: Sequence[Mapping[str, int]]) -> list[int]:
    """The numbers of the sizes whose stages are searched in full: the smallest, the largest, and
    some between, each about :data:`GROWTH` times as large as the one before. The smallest first.
    """
    products = [prod(one.values()) for one in sizes]
    order = sorted(range(len(sizes)), key=lambda n: (products[n], n))
    low, high = products[order[0]], products[order[-1]]
    steps = max(1, round(log(high / low) / log(GROWTH)))
    wanted = [low * (high / low) ** (step / steps) for step in range(steps + 1)]
    return [*dict.fromkeys(min(order, key=lambda n: abs(log(products[n] / w))) for w in wanted)]


def check_steps(known: Sequence[int], many: int) -> None:
    """Raises :class:`OptionError` if a library of so many sizes would have more steps than there is
    room for. ``known``: those of the sizes that were searched; others have about as many.
    """
    least = min(known)
    if sum(known) + least * (many - len(known)) > MAX_STEPS:
        raise OptionError(
            f"dims asks for {many} sizes, and the model has {least} steps or more at each of them, "
            f"but one library has at most {MAX_STEPS:,} steps: give {MAX_STEPS // least} sizes or "
            "fewer, such as every second one, or make two libraries"
        )


class Many:
    """The compilations of all sizes. ``symbol``: of a range whose parts are among them, or "";
    ``kept`` says then which of the parts at one choice of the other sizes the library gets.
    """

    def __init__(
        self,
        sizes: Sequence[Mapping[str, int]],
        runs: Sequence[Compilation],
        symbol: str,
        kept: Callable[[Sequence[int]], list[int]],
        progress: Progress,
    ) -> None:
        self.sizes, self.runs, self.symbol = sizes, runs, symbol
        self.kept, self.progress = kept, progress
        self.sharing: Sharing  # once the machine is known
        self._text = runs[0].options.dump is not None
        self._guessed: dict[str, tuple[Job | ProgramJob, Kernel | Failure]] = {}

    def cut(self, machine: Target, records: Records | None, workers: Workers) -> list[int]:
        """The steps from the model to the stages of each size, and the outlines of their kernels,
        which the workers make while the next size is cut. What kernels follow from the outlines so
        far they compile where they have nothing else to do; where more follows, a kernel is
        compiled again, so the library is the same whatever was compiled when. Gives the numbers of
        the sizes that the library gets.
        """
        self.sharing = Sharing(machine)
        choices, many = self._choices(), len(self.sizes)
        ends = [n for numbers in self._ends(choices) for n in numbers]
        first = self._searched(ends)
        order = deque([*first, *(n for n in ends if n not in first)])
        later = [numbers for numbers in choices if numbers[0] not in ends]
        start = time.perf_counter()
        self.runs[0].rates(machine)  # a phase of its own, if this machine was not measured
        left = [numbers for numbers in choices if numbers not in later]
        kept, cut = list[int](), set[int]()
        with Ahead(workers) as ahead:
            while order:
                number, done = order.popleft(), len(cut) + 1
                self.progress("fuse", None, f"{done}/{many} sizes, {said(self.sizes[number])}")
                run = self.runs[number]
                own, run.progress = run.progress, silent  # else hundreds of lines
                run.repeats = number not in first
                with at_sizes(self.sizes[number]):
                    run.lower(machine)
                run.partition(machine, records)
                run.progress = own
                if not run.repeats:
                    self._learn(run)
                if done == len(first) and not self.symbol:
                    check_steps([len(self.runs[n].found.stages) for n in first], many)
                begun = time.perf_counter()
                cut.add(number)
                for numbers in [one for one in left if cut.issuperset(one)]:
                    left.remove(numbers)
                    for one in (chosen := self.kept(numbers) if self.symbol else numbers):
                        self.outline(self.runs[one], ahead)
                    kept += chosen
                if not order and later:  # with the parts that are worth it at both ends
                    worth = {self.sizes[n][self.symbol] for n in kept}
                    left = [
                        [n for n in one if self.sizes[n][self.symbol] in worth] for one in later
                    ]
                    order.extend(n for numbers in left for n in numbers)
                    later = []
                self.sharing.take(ahead.so_far())
                ahead.guess(job for job, _ in self.sharing.jobs(self._text).values())
                run.report.phases.append(("fuse", time.perf_counter() - begun))
            self.sharing.take(ahead.answers())
            self._guessed = ahead.guessed()
        what = f"{len(self.sharing.stages)} different stages of {len(kept)} sizes"
        self.progress("fuse", time.perf_counter() - start, what)
        return sorted(kept)

    def generate(self, runs: Sequence[Compilation], workers: Workers) -> None:
        """The kernels of the sizes that the library gets."""
        start, own = time.perf_counter(), [run.progress for run in runs]
        for run in runs:
            run.progress = silent
        with runs[0].phase("generate"):
            made = self.sharing.compile(
                self._text,
                workers,
                lambda done, of: self.progress("generate", None, f"{done}/{of}"),
                self._guessed,
            )
        shared = runs[0].shared
        assert shared is not None
        shared.kernels |= made
        shared.picks |= {key: self.sharing.picks[key] for key in made}
        what = f"{len({k.symbol for _, k in made.values()})} kernels of {len(made)} stages"
        self.progress("generate", time.perf_counter() - start, what)
        for run, progress in zip(runs, own, strict=True):
            run.build(workers)
            run.progress = progress

    def outline(self, run: Compilation, ahead: Ahead) -> None:
        """Chooses the configs of the stages of one size. Their outlines are made meanwhile. A stage
        takes a config that differs from that of another size in its chunks at most, if that is
        predicted to be nearly as fast as its best.
        """
        shared = run.shared
        assert shared is not None
        before = len(self.sharing.picks)
        self.sharing.outline(run.found.stages, partial(self._choose, run), ahead)
        for key in [*self.sharing.picks][before:]:
            shared.forms.add(self.sharing.stages[key], self.sharing.picks[key].config)
        shared.layouts.add_picks(run.found.stages, self.sharing.picks, run.graph.constants)

    def _choose(self, run: Compilation, stage: Stage) -> Pick | None:
        policy, shared = run.policy, run.shared
        assert shared is not None
        constants = run.graph.constants
        if run.repeats and (near := shared.forms.near(policy, stage)):
            close = [pick for pick in near if pick.seconds <= CLOSE * near[0].seconds]
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

    def _learn(self, run: Compilation) -> None:
        """The configs of a size that was searched are tried first at others."""
        assert run.shared is not None
        for stage in {stage.key: stage for stage in run.found.stages}.values():
            run.shared.forms.learn(run.policy, stage)

    def _choices(self) -> list[list[int]]:
        """The numbers of the sizes, those together of which some may be left out: with a range, its
        parts at one choice of the other sizes.
        """
        if not self.symbol:
            return [[number] for number in range(len(self.sizes))]
        return [numbers for _, numbers in apart(self.sizes, self.symbol)]

    def _ends(self, choices: list[list[int]]) -> list[list[int]]:
        """The choices at which all parts of a range are tried: those of the smallest and of the
        largest other sizes. All, where there is no range.
        """
        if not self.symbol:
            return choices
        order = sorted(choices, key=lambda numbers: prod(self.sizes[numbers[0]].values()))
        return order if len(order) < 3 else [order[0], order[-1]]

    def _searched(self, ends: Sequence[int]) -> list[int]:
        """The numbers of the sizes whose stages are searched in full. A graph of one sample often
        differs from those of several, so the smallest parts are looked at by themselves.
        """
        kinds = [[*ends]]
        if self.symbol:
            least = min(one[self.symbol] for one in self.sizes)
            ones = [number for number in ends if self.sizes[number][self.symbol] == least]
            kinds = [ones, [number for number in ends if number not in ones]]
        return [
            numbers[n]
            for numbers in kinds
            if numbers
            for n in searched([self.sizes[number] for number in numbers])
        ]
