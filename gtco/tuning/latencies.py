"""How fast stages and models are now, beside their first picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from gtco.codegen.generate import Generated
from gtco.machine.target import detect
from gtco.search.calibration.peak import LEAST_HELD, Peak, known_peak, machine_peak
from gtco.search.policy import Policy
from gtco.support.options import PRECISIONS
from gtco.tensor.intrinsics.table import kinds, multiplied
from gtco.tuning.result import StageResult


class Latencies:
    """Seconds of stages and of models, with their first picks in this compile and with their picks
    now.

    - ``results`` of the stages that are tuned, by key, and those of ``earlier`` tunings of the same
      compile;
    - ``threads`` that the models run on; 0 means all cores;
    - ``reads_peak``: the machine's peak is read if it is not known yet.
    """

    def __init__(
        self,
        models: Sequence[Generated],
        policy: Policy,
        results: Mapping[str, StageResult],
        earlier: Mapping[str, Sequence[StageResult]],
        threads: int,
        reads_peak: bool,
    ) -> None:
        self.models, self.policy, self.results = models, policy, results
        self.earlier, self.threads, self.reads_peak = earlier, threads, reads_peak
        self.peaks: dict[str, Peak | None] = {}  # peaks of the machine, by what products multiply

    def since(self, result: StageResult) -> list[StageResult]:
        """The results of this compile for the stage, the oldest first. If the stage was not
        measured yet, this is its current result.
        """
        told = [r for r in (*self.earlier.get(result.stage.key, ()), result) if r.measured]
        return told or [result]

    def stage(self, result: StageResult) -> tuple[float, float]:
        """Seconds of a run of the stage, with its first pick in this compile and with its pick now.
        The gains of rounds are multiplied, because their seconds were read at different times.
        """
        told = self.since(result)
        now = told[-1].seconds
        return now * prod(r.first_seconds / r.seconds for r in told), now

    def share(self, result: StageResult, seconds: float) -> float | None:
        """The share of the machine's peak, which every command shows. None if the peak was not read
        or the stage has no products. For another machine the peak comes from its table.
        """
        operand = multiplied(result.stage)
        if operand is None or operand not in (*PRECISIONS.values(), "int8"):
            return None
        if self.policy.target.name != "native":
            return peak_seconds(result, self.policy) / seconds
        if operand not in self.peaks:
            machine = detect()
            if not kinds(machine, operand):
                return None
            threads = self.threads or machine.cores
            if self.reads_peak:
                read = machine_peak(threads, operand, machine)
                self.peaks[operand] = read if read.held >= LEAST_HELD else None
            else:
                self.peaks[operand] = known_peak(threads, operand, machine)
        peak = self.peaks[operand]
        return result.flops / seconds / peak.flops if peak else None

    def model(self, number: int) -> tuple[float, float]:
        """Seconds of a run of one model, with its first picks and with its picks now."""
        rest = self.rest(number)
        tuned = [(r.weights[number], self.stage(r)) for r in self.results.values()]
        return (
            rest + sum(n * first for n, (first, _) in tuned),
            rest + sum(n * now for n, (_, now) in tuned),
        )

    def rest(self, number: int) -> float:
        """Predicted seconds of those stages of a model that are not tuned."""
        model = self.models[number]
        left = (stage.key for stage in model.stages if stage.key not in self.results)
        return model.times * sum(model.choices[key].seconds for key in left)


def peak_seconds(result: StageResult, policy: Policy) -> float:
    """Seconds that the stage's products take at the machine's peak; 0 if it has no products."""
    operand = multiplied(result.stage)
    return result.flops / policy.peak(operand) if operand else 0.0
