"""The state of a tuning as a value, for whoever shows it: each stage, the times of the models so
far, when it ends, what was gained, and what more tuning is expected to gain. It prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gtco.support.counting import counted

LEAST_GAIN = 1.005  # times as fast; less is noise
# Not measured yet; still gaining, or not tried enough; done with, or nothing left to try.
State = Literal["waiting", "open", "done"]
HOUR = 3600.0


def became(before: float, now: float) -> str:
    """Seconds before and after, with three digits or more; one number if both are the same."""
    digits = next((n for n in range(2, 6) if now >= 10.0 ** -(n + 1)), 6)
    first, last = f"{1e3 * before:.{digits}f}", f"{1e3 * now:.{digits}f}"
    return f"{last} ms, as before" if first == last else f"{first} -> {last} ms"


@dataclass(frozen=True)
class StageView:
    """A stage.

    - ``runs``: how often it runs in all models;
    - ``seconds`` of one run, measured, or predicted while it waits;
    - ``share`` of the machine's peak, if it has products.
    """

    label: str
    runs: int
    first_seconds: float
    seconds: float
    share: float | None
    trials: int
    state: State

    @property
    def total(self) -> float:
        return self.runs * self.seconds


@dataclass(frozen=True)
class View:
    """A tuning.

    - ``stages``: the heaviest first;
    - ``models``: seconds of a run of each model, with its first picks and now. They are the sum of
      the stages' times, which are predicted where they were not measured;
    - ``elapsed``: seconds so far, and how many more are expected;
    - ``changed``: how many picks were changed;
    - ``unranked``: how many stages had last readings that were too noisy to compare candidates;
      ``noise`` is the largest difference between two readings of one kernel among them;
    - ``hour``: seconds of all models together that another hour is expected to gain, by what the
      latest slots gained;
    - ``others``: candidates that were measured of stages that only rejected partitions have.
    """

    doing: str
    stages: tuple[StageView, ...]
    models: tuple[tuple[float, float], ...]
    elapsed: float
    remaining: float
    changed: int = 0
    unranked: int = 0
    noise: float = 0.0
    hour: float = 0.0
    others: int = 0

    @property
    def trials(self) -> int:
        return sum(stage.trials for stage in self.stages)

    @property
    def before(self) -> float:
        return sum(first for first, _ in self.models)

    @property
    def now(self) -> float:
        return sum(now for _, now in self.models)

    @property
    def measured(self) -> int:
        return sum(stage.trials > 0 for stage in self.stages)

    def __str__(self) -> str:
        """The state in one line."""
        if not self.doing and not self.measured and not self.others:
            return "no candidate was timed"
        others = f" and {self.others} of other partitions" if self.others else ""
        done = (
            f"{counted(self.trials, 'candidate')} of {counted(self.measured, 'stage')}{others} "
            f"measured, {counted(self.changed, 'pick')} changed; stages timed alone add up to "
            f"{became(self.before, self.now)}"
        )
        if self.doing:
            done += f"; {self.doing}, about {self.remaining:.0f} s to go"
        return done

    @property
    def outlook(self) -> list[str]:
        """Sentences on what was gained, where the rest of the time goes, and what more tuning would
        gain.
        """
        if not self.measured:
            return []
        by = f"{counted(self.trials + self.others, 'candidate')} in {self.elapsed:.0f} s"
        if self.changed and self.now and self.before >= LEAST_GAIN * self.now:
            gain = self.before / self.now
            said = [f"gained: {became(self.before, self.now)} ({gain:.3f} times) by {by}"]
        else:
            said = [f"{by}: none is faster by more than the noise"]
        heaviest = sorted(self.stages, key=lambda s: -s.total)[:3]
        shares = [
            f"{s.total / self.now:.0%} {s.label}"
            + (f" ({s.share:.0%} of the peak)" if s.share else "")
            for s in heaviest
        ]
        said.append(f"where the time goes now: {'; '.join(shares)}")
        waiting = sum(stage.state == "waiting" for stage in self.stages)
        if waiting:
            said.append(
                f"{waiting} of {len(self.stages)} stages were not measured: the budget was spent"
            )
        if all(stage.state == "done" for stage in self.stages):
            said.append("expected gain from more time: none, every stage stopped gaining")
        elif self.hour < 0.001 * self.now:
            said.append("expected gain from one more hour: none")
        else:
            said.append(f"expected gain from one more hour: {1e3 * self.hour:.2f} ms")
        return said
