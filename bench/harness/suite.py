"""Benchmarks several models one after the other and shows the results, for ``gtco bench`` and
``end_to_end``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from gtco.cli import console as output
from gtco.cli.console import say, status
from gtco.cli.tables import Table
from gtco.frontend.dimensions import Shapes
from gtco.frontend.quantized import is_quantized
from gtco.machine.cores import allowed_cores
from gtco.runtime.publish import write_whole
from gtco.verification.outputs import OutputJudge

from . import machine
from .build import Build, Tuning, build
from .peers import peer_of
from .rounds import Comparison, Contender, Measurement, compare
from .workload import Workload, candidates, prepare

if TYPE_CHECKING:
    from rich.console import Console

# by precision: how far engines that compute one model may differ, over an output's largest value
TOLERANCES = {"fp32": 1e-3, "bf16": 6e-2}
# A quantized file: a step of one activation that falls the other way goes through all layers behind
# it, so two engines that are both right differ by some steps.
QUANTIZED = 0.2


@dataclass(frozen=True)
class Result:
    """One model's workload and comparison. Systems that could not run are included, with their
    reasons.
    """

    workload: Workload
    comparison: Comparison
    tuned: Mapping[str, Build] = field(default_factory=dict)  # by effort; "gtco:quick" is timed

    def ratio(self, peer: str) -> float | None:
        """The peer's time over gtco's: above 1, gtco is faster. None if either has no time."""
        found = {m.system: m for m in self.comparison.measurements}
        ours, theirs = found.get("gtco"), found.get(peer)
        if ours is None or theirs is None or not ours.rounds or not theirs.rounds:
            return None
        return theirs.median / ours.median

    def share_of_peak(self, system: Measurement) -> float | None:
        if not system.rounds or not self.workload.flops or not self.comparison.peak:
            return None
        return self.workload.flops / system.median / self.comparison.peak

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.workload.name,
            "onnx": str(self.workload.onnx) if self.workload.onnx else None,
            "precision": self.workload.precision,
            "flops": self.workload.flops,
            "compile": self.workload.build.to_json(),
            "tuned": {effort: build.to_json() for effort, build in self.tuned.items()},
            "notes": list(self.workload.notes),
            "peak_flops_per_second": self.comparison.peak,
            "peak_readings": list(self.comparison.peaks),
            "peak_error": self.comparison.peak_error,
            "systems": [
                {
                    **m.to_json(),
                    "ratio_to_gtco": self.ratio(m.system),
                    "share_of_peak": self.share_of_peak(m),
                }
                for m in self.comparison.measurements
            ],
        }


def tolerance(workload: Workload) -> float:
    """How far the engines that compute the workload may differ."""
    if workload.onnx is not None:
        if is_quantized(onnx.load(workload.onnx, load_external_data=False)):
            return QUANTIZED
    return TOLERANCES[workload.precision]


def judge(workload: Workload) -> OutputJudge | None:
    """What decides where the engines that compute the workload differ; None if only its library is
    known.
    """
    if workload.onnx is None:
        return None
    with np.load(workload.inputs) as file:
        inputs = {name: file[name] for name in file.files}
    return OutputJudge(workload.onnx, inputs, workload.precision)


def console() -> Console:
    """Standard output. A pipe has no width; it gets one that is wide enough for the tables."""
    from rich.console import Console  # of benchmarks of gtco's own; gtco bench does without

    return Console() if sys.stdout.isatty() else Console(width=160)


def available_threads() -> int:
    """The number of cores that this process may use, by which a library counts its threads too."""
    return allowed_cores()


def run_model(
    source: str,
    peers: Sequence[str],
    folder: Path,
    threads: int,
    rounds: int,
    shapes: Shapes | None,
    library: Path | None = None,
    precision: str = "fp32",
    tunings: Sequence[Tuning] = (),
) -> Result:
    """Prepares and compares one model; progress is shown on a terminal. For each of the
    ``tunings``, whose records are a folder with a file for each model and precision, the model is
    compiled once more and timed beside the others as ``gtco:EFFORT``.
    """
    with status() as update:
        update(f"{source}: prepare")
        workload = prepare(
            source,
            folder,
            threads,
            shapes,
            library,
            lambda text: update(f"{source}: {text}"),
            precision,
        )
        if workload.onnx is None:
            precision = workload.precision
        chosen, skipped = candidates(workload, peers, threads)
        tuned: dict[str, Build] = {}
        for tuning in tunings:
            effort = tuning.effort
            update(f"{source}: compile, tune {effort}")
            path = folder / f"{workload.name}.{precision}.{effort}.so"
            if tuning.records is not None:
                file = tuning.records / f"{workload.name}.{precision}.records"
                tuning = replace(tuning, records=file)
            assert workload.onnx is not None  # a library by itself is not tuned
            made = build(workload.onnx, path, threads, shapes, precision, tuning=tuning)
            tuned[effort] = made
            if made.error:
                skipped[f"gtco:{effort}"] = made.error
            elif chosen[0].name == "gtco":
                job = {**chosen[0].job, "library": made.library}
                chosen.insert(len(tuned), Contender(f"gtco:{effort}", job))
        peak = Contender("peak", {"system": "peak", "threads": threads, "precision": precision})
        comparison = compare(
            chosen,
            rounds,
            peak=peak,
            tolerance=tolerance(workload),
            judge=judge(workload),
            progress=lambda text: update(f"{source}: {text}"),
        )
    missing = tuple(Measurement(name, error=reason) for name, reason in skipped.items())
    order = ("gtco", *(f"gtco:{tuning.effort}" for tuning in tunings), *peers)
    ordered = sorted((*comparison.measurements, *missing), key=lambda m: order.index(m.system))
    found = Comparison(tuple(ordered), comparison.peaks, comparison.peak_error)
    return Result(workload, found, tuned)


def show(result: Result) -> None:
    """Prints the table of one model, then every reason and note in full."""
    work, comparison = result.workload, result.comparison
    title = work.name + ("" if work.precision == "fp32" else f" · {work.precision}")
    title += f" · {work.flops / 1e9:.2f} GFLOP" if work.flops else ""
    if comparison.peak:
        title += f" · peak {comparison.peak / 1e9:.0f} GFLOP/s"
    table = Table(title)
    table.column("system", least=18)
    table.column("median ms", right=True)
    table.column("p90 ms", right=True, rank=2)
    table.column("GFLOP/s", right=True, rank=3)
    table.column("% of peak", right=True, rank=1)
    table.column("time / gtco's", right=True)
    table.column("max difference", right=True)
    for m in comparison.measurements:
        name = f"{m.system} {m.version}".strip()
        if not m.rounds:
            table.row(name, "failed", "", "", "", "", "")
            continue
        share, ratio = result.share_of_peak(m), result.ratio(m.system)
        table.row(
            name,
            _milliseconds(m.median),
            _milliseconds(m.p90),
            f"{work.flops / m.median / 1e9:.1f}" if work.flops else "-",
            f"{share:.1%}" if share else "-",
            f"{ratio:.2f}" if ratio else "-",
            "-" if m.difference is None else f"{m.difference:.1e}" + (" !" if m.disagrees else ""),
        )
    output.show(table)
    for m in comparison.measurements:
        if m.error:
            say(f"  {m.system} failed: {m.error}")
        if m.disagrees:
            say(f"  {m.system} disagrees: {m.disagrees}")
        if m.judged:
            say(f"  {m.system} differs and is right: {m.judged}")
    if comparison.peak_error:
        say(f"  the machine's peak could not be measured: {comparison.peak_error}")
    if work.build.seconds and not work.build.error:
        say(
            f"  compiled in {work.build.seconds:.1f} s, {work.build.stages} stages, peak memory "
            f"{work.build.peak_memory_bytes / 1e9:.2f} GB, "
            f"weights {work.build.weights_bytes / 1e9:.2f} GB"
        )
    for effort, made in result.tuned.items():
        if not made.error:
            say(f"  compiled and tuned ({effort}) in {made.seconds:.1f} s")
            told = {"partition": made.fusion, "in the model": made.settled}
            for name, words in told.items():
                if words:
                    say(f"    {name}: {words}")
    for note in (*work.notes, *work.build.notes):
        say(f"  note: {note}")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{2 if seconds >= 1e-3 else 3}f}"


def write_json(
    path: Path,
    results: Sequence[Result],
    threads: int,
    rounds: int,
    about: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the machine, the versions and all raw rounds; the file is written completely or not at
    all.
    """
    write_report(path, threads, rounds, {**about, "models": [r.to_json() for r in results]})


def write_report(path: Path, threads: int, rounds: int, found: Mapping[str, Any]) -> None:
    """Writes the machine, the versions and a benchmark's results as JSON. The file is written
    completely or not at all; then a ``GtcoError`` says why.
    """
    about = {"machine": machine.describe(threads), "rounds": rounds}
    write_value(path, {**about, **found})


def write_value(path: Path, value: Any) -> None:
    """Writes a value as JSON, completely or not at all: a kill or a full disk leaves the file that
    was there, with what an earlier call kept. Numbers that JSON does not have become null.
    """
    text = json.dumps(_finite(value), indent=1, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def sound(results: Sequence[Result]) -> bool:
    """True if gtco ran every model, with outputs that agree."""
    return all(
        m.error is None and m.disagrees is None
        for r in results
        for m in r.comparison.measurements
        if peer_of(m.system) == "gtco"
    )


def failed_peers(result: Result, peers: Sequence[str]) -> list[str]:
    """The peers among these systems of which no setting has a time, or whose outputs disagree, each
    with the reason.
    """
    seen = [m for m in result.comparison.measurements if m.system in peers]
    timed = {peer_of(m.system) for m in seen if m.rounds}
    reasons = {
        m.system: m.disagrees or m.error or "no reason was given"
        for m in seen
        if m.disagrees or peer_of(m.system) not in timed
    }
    return [f"{name} with {result.workload.name} ({why})" for name, why in reasons.items()]


def header(threads: int) -> None:
    about = machine.describe(threads)
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    say(
        f"{about['cpu']}, {about['cores']} cores, {threads} threads, "
        f"Python {about['python']}, {about['date']}"
    )
    say(versions)
