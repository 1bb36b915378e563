"""How good the prices of kernels for GPUs are, beside kernels that a GPU timed: ``python -m bench
gpu policy [--readings bench/gpu/readings/h200.jsonl.gz] [--json FILE]``. Nothing is measured.

A file of readings has what ``gtco candidates`` and ``gtco measure`` gave for some models: a line
for the program of each stage, and a record for each config. ``pick`` is the time of the config with
the least price over the best config's: 1 if nothing that was timed is faster. ``error`` says how
far predicted and measured times are apart, by the unit or the sketch: the median of their ratio,
and the mean size of its logarithm. The events around a single launch take time too
(:data:`EVENTS`).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from gtco.machine.gpu import GpuTarget, gpu_target
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.policy import priced
from gtco.search.records.records import Record
from gtco.search.records.text import from_lines, programs
from gtco.support.errors import OptionError
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Space

from ..harness.suite import console

# Seconds that two events add to a launch between them: on an H200, the stages of ViT-Ti and Swin-T
# take 2.0 and 2.4 us longer each, timed one by one, than in the model's graph.
EVENTS = 2.1e-6


@dataclass(frozen=True)
class Reading:
    """A config of a stage with its predicted and measured seconds."""

    stage: str
    label: str
    unit: str
    config: Config
    predicted: float
    measured: float


def load(path: Path) -> list[Reading]:
    """The readings, priced by today's policy. A config that its space no longer has is left out."""
    text = gzip.decompress(path.read_bytes()).decode()
    records = from_lines(text, path.name)
    target = _target(records, path)
    policy = GpuPolicy(target)
    spaces = {stage.key: space_of(stage, target) for stage in programs(text, path.name)}
    return [
        Reading(r.stage, r.label, _unit(r), r.parsed, seconds, r.seconds)
        for r in records
        if r.seconds and (seconds := _price(policy, spaces[r.stage], r)) < inf
    ]


def _target(records: Sequence[Record], path: Path) -> GpuTarget:
    """The GPU that the records are from. Raises :class:`OptionError` if there are several."""
    names = {str(record.known.get("target")) for record in records}
    if len(names) != 1:
        raise OptionError(f"{path} has readings for {', '.join(sorted(names)) or 'no target'}")
    return gpu_target(names.pop())


def _unit(record: Record) -> str:
    row = record.parsed.by_name.get("row")
    return str(row).split(".")[0] if row else record.parsed.sketch


def _price(policy: GpuPolicy, space: Space, record: Record) -> float:
    pick = priced(policy, space, record.parsed)
    return pick.seconds if pick else inf


def picks(found: Sequence[Reading]) -> dict[str, float]:
    """For each stage, the measured time of its cheapest config by price over the best one's."""
    stages: dict[str, list[Reading]] = defaultdict(list)
    for one in found:
        stages[f"{one.label} {one.stage}"].append(one)
    return {
        name: min(some, key=lambda one: one.predicted).measured / min(o.measured for o in some)
        for name, some in stages.items()
    }


def errors(found: Sequence[Reading]) -> dict[str, tuple[int, float, float]]:
    """By unit: readings, the median of predicted over measured, and the mean of the logarithm's
    size.
    """
    units: dict[str, list[float]] = defaultdict(list)
    for one in found:
        units[one.unit].append((one.predicted + EVENTS) / one.measured)
    return {
        unit: (len(ratios), median(ratios), fmean(abs(log(ratio)) for ratio in ratios))
        for unit, ratios in sorted(units.items())
    }


def main(options: argparse.Namespace) -> int:
    found = load(options.readings)
    shares, units = picks(found), errors(found)
    table = Table(title="predicted times beside measured ones", title_justify="left")
    for heading in ("unit", "kernels", "predicted over measured", "error"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for unit, (count, ratio, error) in units.items():
        table.add_row(unit, str(count), f"{ratio:.2f}", f"{error:.2f}")
    output = console()
    output.print(table)
    worst = max(shares, key=lambda name: shares[name])
    output.print(
        f"picks of {len(shares)} stages take {fmean(shares.values()):.3f} of the best config's "
        f"time (median {median(shares.values()):.3f}, worst {shares[worst]:.2f}: {worst})",
        highlight=False,
    )
    if options.json:
        report: dict[str, Any] = {"picks": shares, "errors": units}
        options.json.write_text(json.dumps(report, indent=1))
    return 0
