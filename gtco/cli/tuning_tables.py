"""Tables of what tuning changed, and of the sizes of the stages' spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gtco.cli.console import text
from gtco.cli.tables import Table


def changed(stages: Sequence[dict[str, Any]]) -> Table:
    """What tuning changed: the schedules and the seconds before and after."""
    table = Table("changed by measuring")
    table.column("stage", least=16)
    table.column("runs", right=True)
    for title in ("before", "after"):
        table.column(f"{title}, us", right=True)
        table.column(f"schedule {title}", least=14, rank=1)
    for stage in stages:
        row = [stage["stage"], str(stage["occurrences"])]
        for seconds, config in (("first_seconds", "first"), ("seconds", "last")):
            row += [f"{stage[seconds] * 1e6:.1f}", text(stage[config])]
        table.row(*row)
    return table


def spaces(found: Sequence[Any]) -> Table:
    """For each :class:`~gtco.tuning.census.Census` the number of configs, and the reasons why some
    gave no kernel.
    """
    table = Table("spaces of the stages")
    table.column("stage", least=20)
    table.column("runs", right=True)
    table.column("configs", right=True)
    table.column("of them", least=14)
    table.column("rejected of those drawn", least=16, rank=1)
    for one in found:
        sizes = ", ".join(f"{name} {number(size)}" for name, size in one.sizes.items())
        reasons = ", ".join(f"{n} {reason}" for reason, n in one.rejections.items())
        table.row(
            f"{one.stage.label} -> {one.stage.output.type}",
            str(one.occurrences),
            number(one.size),
            sizes,
            f"{sum(one.rejections.values())} of {one.drawn}" + (f": {reasons}" if reasons else ""),
        )
    return table


def number(size: Any) -> str:
    """``1234``, or ``~1.2e+06`` if it is an estimate."""
    return str(size.configs) if size.exact else f"~{size.configs:.1e}"
