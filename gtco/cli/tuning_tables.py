"""What tuning changed, and the sizes of the stages' spaces, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from gtco.cli.console import text


def changed(stages: Sequence[dict[str, Any]]) -> Table:
    """What tuning changed: the schedules before and after, and the seconds of each."""
    table = Table(title="changed by measuring", title_justify="left")
    table.add_column("stage", max_width=40)
    table.add_column("runs", justify="right")
    for title in ("before", "after"):
        table.add_column(f"{title}, us", justify="right")
        table.add_column(f"schedule {title}")
    for stage in stages:
        row = [escape(stage["stage"]), str(stage["occurrences"])]
        for seconds, config in (("first_seconds", "first"), ("seconds", "last")):
            row += [f"{stage[seconds] * 1e6:.1f}", escape(text(stage[config]))]
        table.add_row(*row)
    return table


def spaces(found: Sequence[Any]) -> Table:
    """Of each :class:`~gtco.tuning.census.Census`: how many configs, and what gave no kernel."""
    table = Table(title="spaces of the stages", title_justify="left")
    table.add_column("stage", max_width=60)
    table.add_column("runs", justify="right")
    table.add_column("configs", justify="right")
    table.add_column("of them")
    table.add_column("rejected of those drawn")
    for one in found:
        sizes = ", ".join(f"{name} {number(size)}" for name, size in one.sizes.items())
        reasons = ", ".join(f"{n} {reason}" for reason, n in one.rejections.items())
        table.add_row(
            escape(f"{one.stage.label} -> {one.stage.output.type}"),
            str(one.occurrences),
            number(one.size),
            sizes,
            f"{sum(one.rejections.values())} of {one.drawn}" + (f": {reasons}" if reasons else ""),
        )
    return table


def number(size: Any) -> str:
    """``1234``, or ``~1.2e+06`` where it is estimated."""
    return str(size.configs) if size.exact else f"~{size.configs:.1e}"
