"""Demonstrations: for each stage and machine the config that a language model should write (TLM,
Sections 5.1 and 5.3).

They come from two sources:

- measurements: the fastest config of a stage, among its records under one set of circumstances or
  among its readings;
- expert knowledge, which the paper allows: the analytic policy's pick for a stage that nobody
  measured, on drawn machines.

Only the first source can teach more than the policy knows.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gtco.machine.gpu import GpuTarget
from gtco.machine.target import TARGETS, cpu_target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.profile import machine_key
from gtco.search.calibration.rates import RateTable
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.language.sentence import Grammar
from gtco.search.policy import Policy
from gtco.search.recorded import by_stage
from gtco.search.records.records import Record
from gtco.search.records.standing import relative, standing
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Space
from gtco.tensor.stage import Stage

from ...harness import readings
from .machines import Place
from .rankings import Ranking, ranking_of


@dataclass(frozen=True)
class Demonstration:
    """``times`` are seconds of all configs that were measured, in any unit, if there are any;
    ``source`` is the file that they come from.
    """

    stage: Stage
    place: Place
    config: Config
    source: str
    times: Mapping[Config, float]

    @property
    def space(self) -> Space:
        return space_of(self.stage, self.place.machine)


def ranking(grammar: Grammar, shown: Demonstration, hardware: bool = True) -> Ranking | None:
    """All measured configs as a ranking; None where there are too few."""
    return ranking_of(grammar, shown.stage, shown.space, shown.place, shown.times, hardware)


# what was measured --------------------------------------------------------------------------------
def of_readings(file: Path) -> list[Demonstration]:
    """The stages of a file of ``bench readings``, each with its fastest config."""
    found = readings.load(file)
    place = Place(found.table.target, found.table)
    shown = []
    for name, seconds in found.seconds.items():
        stage = readings.STAGES[name].canonical
        space = space_of(stage, place.machine)
        times = {c: t for c, t in seconds.items() if space.check(c) is None}
        if times:
            best = min(times, key=times.__getitem__)
            shown.append(Demonstration(stage, place, best, file.name, times))
    return shown


def tables(files: Iterable[Path], own: RateTable | None = None) -> dict[str, RateTable]:
    """The tables of rates of files of readings, and of this machine, by the CPU."""
    known = {_identity(machine_key(own.target)["cpu"]): own} if own is not None else {}
    for file in files:
        known[_identity(_cpu_of(file))] = readings.load(file).table
    return known


def _cpu_of(file: Path) -> Any:
    with gzip.open(file, "rt") as lines:
        return json.loads(lines.readline())["table"]["key"]["cpu"]


def _identity(cpu: Any) -> str:
    return json.dumps(cpu, sort_keys=True)


def place_of(circumstances: Mapping[str, Any], known: Mapping[str, RateTable]) -> Place | None:
    """The machine of a record, with its table if there is one. None for a GPU, and for a CPU that
    no target describes.
    """
    table = known.get(_identity(circumstances.get("cpu")))
    threads = circumstances.get("threads")
    if not isinstance(threads, int):
        return None
    if table is not None:
        machine = replace(table.target, cores=threads)
        return Place(machine, replace(table, target=machine))
    target = TARGETS.get(str(circumstances.get("mcpu")))
    if target is None:
        return None
    features = tuple(circumstances["features"])
    return Place(replace(target, cores=threads, features=features))


def of_records(
    rows: Iterable[Record],
    stages: Mapping[str, Stage],
    known: Mapping[str, RateTable],
    source: str,
) -> tuple[list[Demonstration], int]:
    """The measured stages of records, each with the fastest config that its space contains; and the
    number of stages that nothing was learned from, because no program is known for their key or
    because their space contains none of their configs any more.
    """
    here: dict[str, list[Record]] = {}
    for row in rows:
        here.setdefault(row.circumstances, []).append(row)
    found, lost = [], 0
    for circumstances, of_place in here.items():
        place = place_of(json.loads(circumstances), known)
        for key, mine in by_stage(of_place).items():
            shown = None
            if place is not None and key in stages:
                shown = _fastest(stages[key], place, mine, source)
            found += [shown] if shown else []
            lost += shown is None
    return found, lost


def _fastest(
    stage: Stage, place: Place, rows: Sequence[Record], source: str
) -> Demonstration | None:
    space = space_of(stage, place.machine)
    spelled = {c: space.spelled_out(c) for c in {row.parsed for row in rows}}
    legal = {c for c, now in spelled.items() if space.check(now) is None}
    times = {spelled[c]: t for c, t in relative(rows).items() if c in legal}
    stands = standing(rows)
    best = min(times, key=times.__getitem__) if times else None
    if stands in legal:  # two that are equal within noise: the one that stood
        now = spelled[stands]
        best = now if best is None or times.get(now, 9.0) <= 1.01 * times[best] else best
    return Demonstration(stage, place, best, source, times) if best is not None else None


# expert knowledge ---------------------------------------------------------------------------------
def policy_of(place: Place) -> Policy:
    if isinstance(place.machine, GpuTarget):
        return GpuPolicy(place.machine)
    return AnalyticPolicy(cpu_target(place.machine), place.rates)
