"""The sizes of a library of many, from the model to the kernels: which are searched in full, in
which order, and what goes on at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil, prod

from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob
from gtco.codegen.workers import Ahead, Workers
from gtco.driver.checks import at_sizes
from gtco.driver.compilation import Among, Compilation, Progress, silent
from gtco.driver.phases import Built, Fused, Lowered
from gtco.driver.sizes.anchors import ANCHORS, anchors
from gtco.driver.sizes.layouts import Copies
from gtco.driver.sizes.plan import Plan
from gtco.driver.sizes.sharing import Sharing
from gtco.machine.target import Target
from gtco.runtime.artifact import MAX_STEPS
from gtco.search.records.records import Record, Records
from gtco.support.counting import counted
from gtco.support.errors import OptionError
from gtco.support.garbage import uncollected
from gtco.support.sizes import sizes_text
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

LONG = 60.0  # seconds: a longer wait is said
# Kernels are guessed whenever there are so many times as many sizes: what follows from the outlines
# of all sizes takes longer with each, and after every size it would take most of the time.
OFTEN = 1.2
FEW = 4  # variants of a library whose stages and kernels are made for each by itself


def in_order(sizes: Sequence[Mapping[str, int]]) -> list[int]:
    """The numbers of the sizes in the order in which they are cut into stages: the smallest, the
    largest, and the others from the smallest on.
    """
    order = sorted(range(len(sizes)), key=lambda n: (scale_of(sizes[n]), n))
    return [order[0], *order[:0:-1][:1], *order[1:-1]]


def scale_of(sizes: Mapping[str, int]) -> int:
    return prod(sizes.values())


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


def wait(took: Sequence[float], many: int) -> str:
    """How long the sizes that are left take to be cut into stages, in words, by the seconds of
    those so far; empty if that is not long, or not known yet. Sizes between the anchors take less,
    so the anchors tell what it is at most.
    """
    if not took:
        return ""
    between = took[ANCHORS:]
    rate = sum(between or took) / len(between or took)
    seconds = rate * (many - len(took))
    if seconds < LONG:
        return ""
    most = "at most " if not between and many > ANCHORS else ""
    return f", {most}about {round(seconds / 60)} min for {many - len(took)} more"


class Many:
    """The compilations ``runs`` of all sizes of a plan; with a range these are candidates, of which
    the library gets some (:meth:`Plan.cheapest`).
    """

    def __init__(
        self, plan: Plan, runs: Sequence[Compilation], progress: Progress, machine: Target
    ) -> None:
        self.plan, self.sizes, self.runs, self.progress = plan, plan.sizes, runs, progress
        assert runs[0].shared is not None
        self.machine, self.sharing, self.shared = machine, Sharing(machine), runs[0].shared
        self.fused: dict[Compilation, Fused] = {}  # until their kernels are made
        self._text = runs[0].options.dump is not None
        self._guessed: dict[str, tuple[Job | ProgramJob, Kernel | Failure]] = {}

    def fuse(
        self,
        lowered: dict[Compilation, Lowered],
        records: Records | None,
        shipped: Sequence[Record],
        workers: Workers,
    ) -> list[int]:
        """The steps from the model to the stages of each size, and the outlines of their kernels,
        which the workers make while the next size is cut. What kernels follow from the outlines so
        far they compile where they have nothing else to do; where more follows, a kernel is
        compiled again, so the library is the same whatever was compiled when. Gives the numbers of
        the sizes that the library gets. Takes out of ``lowered`` what was lowered already.
        """
        machine = self.machine
        choices, many = self._choices(), len(self.sizes)
        left = self._ends(choices)
        later = [numbers for numbers in choices if numbers not in left]
        ends = [n for numbers in left for n in numbers]
        first, between = self._anchors(ends)
        order = deque(first[n] for n in in_order([self.sizes[n] for n in first]))
        start = time.perf_counter()
        self.runs[0].rates(machine)  # a phase of its own, if this machine was not measured
        kept, cut, took = list[int](), list[int](), list[float]()
        guess_at = 1  # sizes that are cut
        with workers.ahead() as ahead:
            while order:
                number, done = order.popleft(), len(cut) + 1
                shown = f"{done}/{many} sizes, {sizes_text(self.sizes[number])}"
                self.progress("fuse", None, shown + wait(took, many))
                size_start = time.perf_counter()
                run = self.runs[number]
                among = Among(scale_of(self.sizes[number]), done <= 2)
                # silent, else there were hundreds of lines
                with run.told(silent), at_sizes(self.sizes[number]), uncollected():
                    read = lowered.pop(run, None) or run.read(machine)
                    simple = run.simplify(read, machine, among)
                    del read
                    self.fused[run] = run.fuse(simple, machine, records, shipped, among)
                    del simple
                cut.append(number)
                if done == 2 and self.plan.range is None:
                    check_steps([len(self.fused[self.runs[n]].partition.stages) for n in cut], many)
                begun = time.perf_counter()
                with uncollected():
                    new = [number] if self.plan.kept_anyway(number) else []
                    ready = {*cut}
                    for numbers in [one for one in left if ready.issuperset(one)]:
                        left.remove(numbers)
                        new += self._kept(numbers)
                    for one in new:
                        if one not in kept:
                            self.outline(self.runs[one], ahead)
                            kept.append(one)
                    if not order and between:
                        self.shared.forms.settled = True  # others take what these have
                        order.extend(between)
                        between = []
                    if not order and later:  # with the parts that are worth it at both ends
                        samples = self.plan.samples
                        worth = {samples(n) for n in kept}
                        left = [[n for n in one if samples(n) in worth] for one in later]
                        order.extend(n for numbers in left for n in numbers)
                        later = []
                    self.sharing.take(ahead.so_far())
                    if len(cut) >= guess_at:
                        guess_at = ceil(OFTEN * len(cut))
                        ahead.guess(job for job, _ in self.sharing.jobs(self._text).values())
                run.report.phases.append(("fuse", time.perf_counter() - begun))
                took.append(time.perf_counter() - size_start)
            begun = time.perf_counter()
            self.sharing.take(ahead.answers())
            self.runs[kept[0]].report.phases.append(("fuse", time.perf_counter() - begun))
            self._guessed = ahead.guessed()
        what = f"{len(self.sharing.stages)} different stages of {len(kept)} sizes"
        self.progress("fuse", time.perf_counter() - start, what)
        return sorted(kept)

    def generate(self, runs: Sequence[Compilation], workers: Workers) -> dict[Compilation, Built]:
        """The kernels of the sizes that the library gets."""
        start = time.perf_counter()
        with runs[0].told(silent), runs[0].phase("generate"):
            made = self.sharing.compile(
                self._text,
                workers,
                lambda done, of: self.progress("generate", None, f"{done}/{of}"),
                self._guessed,
            )
        self.shared.kernels |= made
        self.shared.picks |= {key: self.sharing.picks[key] for key in made}
        kernels = counted(len({k.symbol for _, k in made.values()}), "kernel")
        what = f"{kernels} of {counted(len(made), 'stage')}"
        self.progress("generate", time.perf_counter() - start, what)
        built: dict[Compilation, Built] = {}
        for run in runs:
            with run.told(silent):
                built[run] = run.generate(self.fused.pop(run), workers)
        return built

    def outline(self, run: Compilation, ahead: Ahead) -> None:
        """Chooses the configs of the stages of one size. Their outlines are made meanwhile. A stage
        takes a config that differs from that of another size in its chunks at most, if that is
        predicted to be nearly as fast as its best.
        """
        shared, fused = self.shared, self.fused[run]
        before, stages = len(self.sharing.picks), fused.partition.stages
        constants = fused.graph.constants
        copies = Copies(shared.layouts, stages, fused.predicted, constants)

        def choose(stage: Stage) -> Pick | None:
            known = {*shared.forms.of(stage)}
            if not fused.searched and (near := shared.forms.near(fused.policy, stage)):
                return copies.cheapest(near, stage, known)
            return copies.choose(fused.policy, {}, stage, known=known)

        self.sharing.outline(stages, choose, ahead)
        for key in [*self.sharing.picks][before:]:
            shared.forms.add(self.sharing.stages[key], self.sharing.picks[key].config)
        shared.layouts.add_picks(stages, self.sharing.picks, constants)

    def _anchors(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """Of the sizes with these numbers the anchors and the others. All are anchors where a range
        has parts, since these are few.
        """
        if self.plan.range is not None or len(numbers) <= ANCHORS:
            return numbers, []
        chosen = [numbers[n] for n in anchors([self.sizes[n] for n in numbers])]
        return chosen, [number for number in numbers if number not in chosen]

    def _choices(self) -> list[list[int]]:
        """The numbers of the sizes, those together of which some may be left out: with a range, its
        parts at one choice of the other sizes.
        """
        if self.plan.range is None:
            return [[number] for number in range(len(self.sizes))]
        return [numbers for _, numbers in self.plan.choices()]

    def _kept(self, numbers: list[int]) -> list[int]:
        """Those of one choice that the library gets."""
        if self.plan.range is None:
            return numbers
        return self.plan.cheapest({n: self.fused[self.runs[n]].predicted() for n in numbers})

    def _ends(self, choices: list[list[int]]) -> list[list[int]]:
        """The choices at which all parts of a range are tried: those of the smallest and of the
        largest other sizes. All, where there is no range.
        """
        if self.plan.range is None:
            return choices
        order = sorted(choices, key=lambda numbers: scale_of(self.sizes[numbers[0]]))
        return order if len(order) < 3 else [order[0], order[-1]]
