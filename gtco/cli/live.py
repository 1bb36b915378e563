"""The live view of tuning, on a terminal."""

from __future__ import annotations

from gtco.cli.tables import Table
from gtco.tuning.view import View

ROWS = 12  # the heaviest stages


def live(view: View) -> Table:
    """The table of a tuning under way: the heaviest stages, and below them the models' times and
    the predicted end.
    """
    table = Table(f"tune: {view.doing}")
    table.column("stage", least=12, shorten=True)
    table.column("runs", right=True, rank=3)
    table.column("best us", right=True)
    table.column("gain", right=True)
    table.column("% of peak", right=True, rank=2)
    table.column("trials", right=True)
    table.column("", rank=1)
    for stage in view.stages[:ROWS]:
        table.row(
            stage.label,
            str(stage.runs),
            f"{1e6 * stage.seconds:.1f}",
            ratio(stage.first_seconds, stage.seconds),
            "-" if stage.share is None else f"{stage.share:.0%}",
            str(stage.trials),
            stage.state,
        )
    if more := view.stages[ROWS:]:
        total = 1e6 * sum(stage.total for stage in more)
        table.row(f"{len(more)} more, together", "", f"{total:.1f}", "", "", "", "")
    table.rule()
    table.row(
        "model, so far, ms",
        "",
        f"{1e3 * view.now:.2f}",
        ratio(view.before, view.now),
        "",
        str(view.trials),
        "",
    )
    table.title += f", {view.elapsed:.0f} s, about {view.remaining:.0f} s to go"
    return table


def ratio(before: float, now: float) -> str:
    return f"{before / now:.3f}" if now else "-"
