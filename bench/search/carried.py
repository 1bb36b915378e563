"""Whether the analytic price carries over to other machines: it is compared with files of readings
(:mod:`bench.harness.readings`), each with the target and the table of the machine that was read.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from gtco.search.analytic import AnalyticPolicy
from gtco.search.learning.cost_model import spearman
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config
from gtco.tuning.proposals import AnalyticProposals
from gtco.tuning.result import StageResult

from ..harness.readings import STAGES, Readings
from ..harness.suite import console

EVERY = 1 << 10  # proposals, many of which no file has
TRIALS = 8  # of them; a compile measures 3 to 11 of a heavy stage in its ten seconds


@dataclass(frozen=True)
class Priced:
    """One stage of a file.

    - ``configs``: how many measured configs the space of today contains;
    - ``gone``: how many it no longer contains;
    - ``of_best``: the best measured time over that of the config with the least price among those
      that were measured;
    - ``picked``: the same share for the policy's own pick out of the whole space. None if that was
      not measured; then ``of_best`` says only how the measured ones are ranked;
    - ``tried``: the share after the first :data:`TRIALS` proposals that were measured;
    - ``rank``: Spearman's correlation between price and time;
    - ``ratio``: price over time, the median.
    """

    stage: str
    configs: int
    gone: int
    of_best: float
    picked: float | None
    tried: float
    rank: float
    ratio: float
    chosen: Config
    best: Config


def priced_stages(readings: Readings) -> list[Priced]:
    """Every stage of a file, in its order."""
    policy = AnalyticPolicy(readings.table.target, readings.table)
    rows = []
    for name, seconds in readings.seconds.items():
        stage = STAGES[name].canonical
        space = space_of(stage, policy.target)
        known = {c: t for c, t in seconds.items() if space.check(c) is None}
        sketches = {sketch.name: sketch for sketch in space.sketches}
        prices = {c: policy.price(sketches[c.sketch], c) for c in known}
        chosen, best = min(prices, key=prices.__getitem__), min(known, key=known.__getitem__)
        pick = policy.choose(stage)
        assert pick is not None
        proposed = AnalyticProposals(policy).propose(StageResult(stage, (1,), pick, pick), EVERY)
        measured = [one.config for one in proposed if one.config in known][:TRIALS]
        tried = [pick.config if pick.config in known else chosen, *measured]
        rows.append(
            Priced(
                name,
                len(known),
                len(seconds) - len(known),
                known[best] / known[chosen],
                known[best] / known[pick.config] if pick.config in known else None,
                known[best] / min(known[c] for c in tried),
                spearman(list(prices.values()), list(known.values())),
                statistics.median(prices[c] / t for c, t in known.items()),
                chosen,
                best,
            )
        )
    return rows


def mean(rows: Sequence[Priced]) -> float:
    """The geometric mean of ``of_best``."""
    return statistics.geometric_mean(r.of_best for r in rows)


def show(file: Path, rows: Sequence[Priced]) -> None:
    table = Table(title=f"prices beside {file.name}", title_justify="left")
    table.add_column("stage")
    for heading in ("configs", "of the best", "pick", f"{TRIALS} tried", "rank", "price / time"):
        table.add_column(heading, justify="right")
    table.add_column("least price, and the best", max_width=70)
    for r in rows:
        table.add_row(
            r.stage,
            str(r.configs),
            f"{r.of_best:.3f}",
            "not measured" if r.picked is None else f"{r.picked:.3f}",
            f"{r.tried:.3f}",
            f"{r.rank:.2f}",
            f"{r.ratio:.2f}",
            f"{_short(r.chosen)}\n{_short(r.best)}",
        )
    out = console()
    out.print(table)
    worst = min(rows, key=lambda r: r.of_best)
    unmeasured = sum(r.picked is None for r in rows)
    out.print(
        f"of the best, the least price among the measured configs: {mean(rows):.3f} in the "
        f"geometric mean, worst {worst.of_best:.3f} ({worst.stage}), "
        f"{statistics.geometric_mean(r.tried for r in rows):.3f} and worst "
        f"{min(r.tried for r in rows):.3f} after {TRIALS} proposals; rank "
        f"{statistics.mean(r.rank for r in rows):.2f}; {len(rows) - unmeasured} of {len(rows)} are "
        f"the policy's own picks, of the other {unmeasured} the pick was not measured"
        + (
            f"; {gone} configs are no longer in the space"
            if (gone := sum(r.gone for r in rows))
            else ""
        ),
        highlight=False,
        markup=False,
    )


def _short(config: Config) -> str:
    return " ".join([config.sketch, *(str(option) for _, option in config.choices)])
