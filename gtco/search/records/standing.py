"""What stands in records. For a stage it is the newest config that its trials left standing; for a
model, the stages that its last finished tuning cut it into. ``records.py`` defines the words.
"""

from __future__ import annotations

from collections.abc import Iterable

from gtco.search.records.records import STANDING, Record
from gtco.tensor.space import Config


def all_standing(records: Iterable[Record]) -> list[Record]:
    """The records of a stage that stand: their outcome says so, and their config was never
    wrong.
    """
    told = [record for record in records if record.outcome in (*STANDING, "wrong")]
    wrong = {record.parsed for record in told if record.outcome == "wrong"}
    return [r for r in told if r.outcome in STANDING and r.parsed not in wrong]


def stood(records: Iterable[Record]) -> Record | None:
    """The newest record of a stage that stands."""
    return next(reversed(all_standing(records)), None)


def standing(records: Iterable[Record]) -> Config | None:
    """The config of the newest record of a stage that stands."""
    newest = stood(records)
    return newest.parsed if newest else None


def last_ends(records: Iterable[Record]) -> list[Record]:
    """What models were cut into when their last tuning ended, for each circumstances: the newest
    rows ``chosen`` of each model. Rows that were measured later do not change it.
    """
    ends = [record for record in records if record.outcome == "chosen" and record.reason]
    times: dict[tuple[str, str], str] = {}
    for record in ends:
        of = record.circumstances, record.reason
        times[of] = max(record.time, times.get(of, ""))
    return [r for r in ends if r.time == times[r.circumstances, r.reason]]


def only_standing(records: Iterable[Record]) -> list[Record]:
    """For each stage and circumstances, the records by which models are cut into the stage and then
    the newest record that stands; sorted by operators and stage.
    """
    trials: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.time):  # equal times keep their order
        trials.setdefault((record.label, record.stage, record.circumstances), []).append(record)
    ends = set(last_ends(record for rows in trials.values() for record in rows))
    found: list[Record] = []
    for key in sorted(trials):
        rows = all_standing(trials[key])
        found += dict.fromkeys([*(r for r in rows if r in ends), *rows[-1:]])
    return found


def relative(records: Iterable[Record]) -> dict[Config, float]:
    """The time of each config over that of the very first pick, from the trials of one stage in
    order. A trial begins with its pick. Unless it is the first trial, an earlier one has read that
    pick's time, and the others are as much slower or faster than it as this trial says.
    """
    found: dict[Config, float] = {}
    scale = 1.0
    for record in records:
        if record.ratio is None or record.outcome in ("wrong", "noisy"):
            continue
        config = record.parsed
        if record.outcome in ("kept", "beaten") and config in found:
            scale = found[config]
        found.setdefault(config, scale * record.ratio)
    return found
