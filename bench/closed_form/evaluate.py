"""DyGen's Table III here: the closed form beside the analytic policy, the best candidate, oneDNN,
from files that ``closed_form time`` wrote of what ``build --judge`` made.

The best of many readings is partly luck, so shares of the best are lower bounds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median

from gtco.search.closed_form.products import Product
from gtco.support.errors import OptionError

from .shapes import flops, named

GROUPS = ((1, "1 to 4 rows"), (5, "5 to 64 rows"), (65, "more rows"))  # the first number of rows
WORST = 5  # products that are named


@dataclass(frozen=True)
class Row:
    """Seconds of one product: of each closed form by name, of the analytic policy's pick, of the
    best of all candidates, and of oneDNN if it was timed.
    """

    product: str
    candidates: int
    closed: dict[str, float]
    analytic: float
    best: float
    onednn: float | None


def evaluate(files: Sequence[Path], out: Path | None, say: Callable[[str], None]) -> int:
    """The step ``evaluate``: prints the table, and writes the rows as JSON if asked for."""
    rows = [row for file in files for row in rows_of(file)]
    if not rows:
        raise OptionError(
            "these files have no product with its roles: time what build --judge made"
        )
    for kind in dict.fromkeys(named(row.product).kind for row in rows):
        say(table(kind, [row for row in rows if named(row.product).kind == kind]))
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def rows_of(file: Path) -> list[Row]:
    """The rows of a file; products without roles are left out."""
    try:
        with gzip.open(file, "rt") as lines:
            said = [json.loads(line) for line in lines]
    except (OSError, EOFError, ValueError) as error:
        raise OptionError(f"{file} is not a file of readings ({error})") from error
    return [_row(line) for line in said if "roles" in line]


def _row(line: dict[str, object]) -> Row:
    standing, ratios, roles = line["standing"], line["ratios"], line["roles"]
    assert isinstance(standing, float) and isinstance(ratios, list) and isinstance(roles, list)
    seconds = [standing * ratio for _, ratio in ratios]
    by_role: dict[str, float] = {}
    for one, role in zip(seconds, roles, strict=True):
        for name in _names(role):
            by_role.setdefault(name, one)
    analytic = by_role.pop("analytic")
    by_role.pop("candidate", None)
    peer = line.get("onednn")
    onednn = median(peer) if isinstance(peer, list) else None
    return Row(str(line["stage"]), len(seconds), by_role, analytic, min(seconds), onednn)


def _names(role: str) -> list[str]:
    """One config may be the pick of several policies."""
    return role.split("+")


def table(kind: str, rows: Sequence[Row]) -> str:
    """The table of one operator class in words and numbers."""
    forms = list(rows[0].closed)
    lines = [f"{kind}: {len(rows)} products", _head(forms)]
    for row in sorted(rows, key=lambda r: flops(named(r.product))):
        lines.append(_line(row, forms))
    for first, what in GROUPS:
        later = [start for start, _ in GROUPS if start > first]
        some = [r for r in rows if first <= _rows(r) < min(later, default=1 << 60)]
        if some and len(some) < len(rows):
            lines.append(_means(f"{what}, {len(some)}", some, forms))
    lines.append(_means("all", rows, forms))
    for name in forms:
        worst = sorted(rows, key=lambda r: r.best / r.closed[name])[:WORST]
        said = ", ".join(f"{_size(r)} {r.best / r.closed[name]:.3f}" for r in worst)
        below = sum(r.best / r.closed[name] < 0.95 for r in rows)
        lines.append(f"{name}: {below} under 0.95 of the best; worst {said}")
    return "\n".join(lines)


def _head(forms: Sequence[str]) -> str:
    names = "".join(f"{name + ' us':>17}" for name in forms)
    shares = "".join(f"{name + ' / best':>20}" for name in forms)
    return (
        f"{'rows x columns x depth':24}{'tried':>6}{names}{'analytic us':>13}{'best us':>10}"
        f"{'oneDNN us':>11}{shares}{'analytic / best':>17}{'oneDNN / ' + forms[0]:>21}"
    )


def _line(row: Row, forms: Sequence[str]) -> str:
    times = "".join(f"{row.closed[name] * 1e6:17.1f}" for name in forms)
    shares = "".join(f"{row.best / row.closed[name]:20.3f}" for name in forms)
    peer = f"{row.onednn * 1e6:11.1f}" if row.onednn else f"{'':11}"
    beside = f"{row.onednn / row.closed[forms[0]]:21.2f}" if row.onednn else ""
    return (
        f"{_size(row):24}{row.candidates:6}{times}{row.analytic * 1e6:13.1f}{row.best * 1e6:10.1f}"
        f"{peer}{shares}{row.best / row.analytic:17.3f}{beside}"
    )


def _means(what: str, rows: Sequence[Row], forms: Sequence[str]) -> str:
    parts = [
        f"{name} / best {geometric_mean(r.best / r.closed[name] for r in rows):.3f}"
        for name in forms
    ]
    parts.append(f"analytic / best {geometric_mean(r.best / r.analytic for r in rows):.3f}")
    some = [(r.onednn, r) for r in rows if r.onednn]
    if some:
        for name in forms:
            mean = geometric_mean(peer / r.closed[name] for peer, r in some)
            ahead = sum(peer > r.closed[name] for peer, r in some)
            parts.append(f"oneDNN / {name} {mean:.2f} ({ahead} of {len(some)} ahead)")
        best = geometric_mean(peer / r.best for peer, r in some)
        parts.append(f"oneDNN / best {best:.2f}")
    return f"{what}: " + "; ".join(parts)


def _rows(row: Row) -> int:
    product: Product = named(row.product)
    return product.m


def _size(row: Row) -> str:
    product = named(row.product)
    return f"{product.m} x {product.n} x {product.k}"
