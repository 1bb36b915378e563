"""Which stages the next measurements go to: GTCO's subgraph scheduler (Section IV-C, equation 3).

The time that the models of a run take is a function of the slots t_i that each different stage got,

    f(t) = sum over models j of  max( sum over stages i of  w_ij * max(g_i(t), ES(g_i, t)),  L_j )

with w_ij the occurrences of stage i in model j, g_i the least seconds it was measured at after its
slots, L_j the seconds a model need not go below, and ES the seconds that a stage which stopped
gaining is taken to stay at. (The paper prints it for one model.) It is solved by gradient descent
over t from (1, ..., 1): each slot goes where f is expected to fall most for what the slot costs. A
model that meets its L_j, and a stage that is at its ES, have a gradient of zero and get none.

How g_i goes on is not known. As in Ansor, its slope is a mean of what the last slots gained and of
what may be hoped for, which is less the longer a stage was searched. Ansor hopes for g_i / t_i;
here it is the geometric mean of that and of (g_i - floor) / t_i, the floor being the machine's
peak: what stands at the peak has nothing to hope for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

WINDOW = 3  # slots that a stage's latest gain is averaged over
BACKWARD = 0.2  # share of that gain in the slope, as in Ansor; the rest is hope
LEAST_GAIN = 0.005  # share of a stage's seconds: if it gains less, it has not gained


@dataclass(frozen=True)
class Task:
    """A stage as the scheduler sees it.

    ``weights``: occurrences in each model; ``history``: least seconds after no slot (a prediction
    where nothing was measured), one slot, two, ...; ``floor``: seconds that it cannot go below, 0
    where none are known; ``cost`` of a slot, in any unit; ``patience``: slots on end without a gain
    after which it stops; ``exhausted``: nothing is left to try.
    """

    weights: tuple[int, ...]
    history: tuple[float, ...]
    floor: float = 0.0
    cost: float = 1.0
    patience: int = 2
    exhausted: bool = False

    @property
    def slots(self) -> int:
        """t_i, the number of slots so far."""
        return len(self.history) - 1

    @property
    def seconds(self) -> float:
        """g_i; once the stage has stopped this is its ES."""
        return self.history[-1]

    @property
    def unchanged(self) -> int:
        """The number of latest slots that together gained nothing."""
        return next(
            (n for n in range(self.slots) if not self._same(self.history[-2 - n])), self.slots
        )

    def _same(self, before: float) -> bool:
        return before - self.seconds <= LEAST_GAIN * before

    @property
    def stopped(self) -> bool:
        """True if the stage is at its ES: nothing is left, or as many slots as its patience gained
        nothing.
        """
        return self.exhausted or self.unchanged >= self.patience


def latency(tasks: Sequence[Task], model: int) -> float:
    """Seconds of all stages of one model."""
    return sum(task.weights[model] * task.seconds for task in tasks)


def gained(task: Task) -> float:
    """Seconds that each of the latest slots gained, on average."""
    window = min(WINDOW, task.slots)
    return (task.history[-1 - window] - task.seconds) / window if window else 0.0


def slope(task: Task) -> float:
    """-dg_i/dt_i: seconds that the next slot is expected to gain."""
    if task.stopped:
        return 0.0
    room = max(task.seconds - task.floor, 0.0)
    hope = sqrt(task.seconds * room) / max(task.slots, 1)
    return BACKWARD * gained(task) + (1.0 - BACKWARD) * hope


def gradient(tasks: Sequence[Task], requirements: Sequence[float] = (0.0,)) -> list[float]:
    """-df/dt_i of every task, in seconds a slot."""
    weights = _open_weights(tasks, requirements)
    return [slope(task) * weight for task, weight in zip(tasks, weights, strict=True)]


def _open_weights(tasks: Sequence[Task], requirements: Sequence[float]) -> list[int]:
    """How often each task occurs in the models that still take longer than they need."""
    above = [latency(tasks, j) > least for j, least in enumerate(requirements)]
    return [
        sum(w for w, open_ in zip(task.weights, above, strict=True) if open_) for task in tasks
    ]


def allot(
    tasks: Sequence[Task], slots: int, requirements: Sequence[float] = (0.0,)
) -> list[int]:
    """How many of the next ``slots`` each task gets: the descent's steps. Fewer in all where no
    task is left that may gain.

    The first slots are the initial point: one for each task that had none, all of them at once,
    whatever ``slots`` says. While steps are planned each is taken to gain nothing, so that they
    spread.
    """
    initial = [
        int(not task.slots and not task.exhausted and weight > 0)
        for task, weight in zip(tasks, _open_weights(tasks, requirements), strict=True)
    ]
    if any(initial):
        return initial
    given, planned = [0] * len(tasks), list(tasks)
    for _ in range(slots):
        falls = [
            g / task.cost
            for g, task in zip(gradient(planned, requirements), planned, strict=True)
        ]
        best = max(range(len(tasks)), key=falls.__getitem__, default=0)
        if not tasks or falls[best] <= 0:
            break
        given[best] += 1
        task = planned[best]
        planned[best] = replace(task, history=(*task.history, task.seconds))
    return given


def prospect(task: Task, slots: int) -> float:
    """Seconds that so many more slots would gain, judged by the history alone: the gain of the
    latest slots, which falls off as one over the number of slots, down to the floor.
    """
    if task.stopped:
        return 0.0
    total = sum(gained(task) * task.slots / (task.slots + n) for n in range(1, slots + 1))
    return max(min(total, task.seconds - task.floor), 0.0)
