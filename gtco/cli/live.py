"""The live view of tuning, on a terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from gtco.tuning.view import View

ROWS = 12  # the heaviest stages


def live(view: View) -> Table:
    """How it goes: the heaviest stages, and below them the models' times and the predicted end."""
    table = Table(title=f"tune: {escape(view.doing)}", title_justify="left", show_footer=True)
    table.add_column("stage", max_width=44, no_wrap=True, footer="model, so far")
    table.add_column("runs", justify="right")
    table.add_column("best us", justify="right", footer=f"{1e3 * view.now:.2f} ms")
    table.add_column("gain", justify="right", footer=ratio(view.before, view.now))
    table.add_column("% of peak", justify="right")
    table.add_column("trials", justify="right", footer=str(view.trials))
    table.add_column(
        "", footer=f"{view.elapsed:.0f} s, about {view.remaining:.0f} s to go", no_wrap=True
    )
    for stage in view.stages[:ROWS]:
        table.add_row(
            escape(stage.label),
            str(stage.runs),
            f"{1e6 * stage.seconds:.1f}",
            ratio(stage.first_seconds, stage.seconds),
            "-" if stage.share is None else f"{stage.share:.0%}",
            str(stage.trials),
            stage.state,
        )
    if more := view.stages[ROWS:]:
        total = 1e6 * sum(stage.total for stage in more)
        table.add_row(f"{len(more)} more, {total:.0f} us together", "", "", "", "", "", "")
    return table


def ratio(before: float, now: float) -> str:
    return f"{before / now:.3f}" if now else "-"
