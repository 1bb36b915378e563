"""What stands of what was measured: of a stage the newest config that its trials left standing, of
a model the stages that its last finished tuning cut it into.
"""

from __future__ import annotations

from collections.abc import Iterable

from gtco.search.records.records import STANDING, Record
from gtco.tensor.space import Config


def all_standing(records: Iterable[Record]) -> list[Record]:
    """Of a stage's trials those that were left standing, of configs that never computed something
    else.
    """
    told = [record for record in records if record.outcome in (*STANDING, "wrong")]
    wrong = {record.parsed for record in told if record.outcome == "wrong"}
    return [r for r in told if r.outcome in STANDING and r.parsed not in wrong]


def stood(records: Iterable[Record]) -> Record | None:
    """The newest of them."""
    return next(reversed(all_standing(records)), None)


def standing(records: Iterable[Record]) -> Config | None:
    """The config of a stage that the newest of its trials left standing."""
    newest = stood(records)
    return newest.parsed if newest else None


def last_ends(records: Iterable[Record]) -> list[Record]:
    """What models were cut into when their last tuning came to its end, under each circumstances:
    the rows ``chosen`` that name their model. What was measured since, for this model or another,
    is no such end.
    """
    ends = [record for record in records if record.outcome == "chosen" and record.reason]
    times: dict[tuple[str, str], str] = {}
    for record in ends:
        of = record.circumstances, record.reason
        times[of] = max(record.time, times.get(of, ""))
    return [r for r in ends if r.time == times[r.circumstances, r.reason]]


def only_standing(records: Iterable[Record]) -> list[Record]:
    """Of each stage and circumstances the newest record that stood, and before it those by which
    models are cut into the stage; by operators and stage.
    """
    trials: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.time):  # of one second: as they were
        trials.setdefault((record.label, record.stage, record.circumstances), []).append(record)
    ends = set(last_ends(record for rows in trials.values() for record in rows))
    found: list[Record] = []
    for key in sorted(trials):
        rows = all_standing(trials[key])
        found += dict.fromkeys([*(r for r in rows if r in ends), *rows[-1:]])
    return found


def relative(records: Iterable[Record]) -> dict[Config, float]:
    """Each config's time, over that of the first pick of all, from the trials of one stage in
    order. A trial begins with its pick, whose time was read in an earlier one where it is not the
    first; the others count as much more or less.
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
