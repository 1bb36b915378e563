"""Tables as text, for any width: columns are folded or shortened, and the least needed ones are
left out.

A table knows nothing of terminals. :meth:`Table.lines` gives its lines for a width; without a width
(a pipe, a file) every row is one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

GAP = "  "
RULE, DOTS = "─", "…"
# A long name is folded after one of these, if it has one.
BREAKS = re.compile(r".*[/.+:,;=_\- ]")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    - ``right``: aligned to the right, for numbers
    - ``least``: the number of characters that it keeps when the table is narrow; None for a column
      that is never narrowed
    - ``rank``: columns with a rank above 0 are left out if the table is too narrow, the highest
      rank first
    - ``shorten``: a text that is too long loses its middle; without it, the text is folded onto
      more lines
    """

    heading: str
    right: bool = False
    least: int | None = None
    rank: int = 0
    shorten: bool = False


@dataclass
class Table:
    """Rows of text below headings; a row without cells is a horizontal rule."""

    title: str = ""
    columns: list[Column] = field(default_factory=list)
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def column(
        self,
        heading: str,
        right: bool = False,
        least: int | None = None,
        rank: int = 0,
        shorten: bool = False,
    ) -> None:
        self.columns.append(Column(heading, right, least, rank, shorten))

    def row(self, *cells: str) -> None:
        assert len(cells) == len(self.columns), (cells, self.columns)
        self.rows.append(cells)

    def rule(self) -> None:
        self.rows.append(())

    def lines(self, width: int | None = None) -> list[str]:
        """The table in ``width`` characters a line. If all columns are needed and it still does not
        fit, the table is wider.
        """
        if width is None:
            shown = [*range(len(self.columns))]
            widths = [max(self._natural(n), len(self.columns[n].heading)) for n in shown]
        else:
            shown = self._shown(width)
            widths = self._widths(shown, width)
        laid = [(self.columns[n], w) for n, w in zip(shown, widths, strict=True)]
        out = [self.title] if self.title else []
        rule = GAP.join(RULE * w for w in widths)
        if any(column.heading for column in self.columns):
            out += _row([self.columns[n].heading for n in shown], laid, bottom=True)
            out.append(rule)
        for cells in self.rows:
            out += _row([cells[n] for n in shown], laid) if cells else [rule]
        left = [c.heading for n, c in enumerate(self.columns) if n not in shown]
        if left:
            out += fold(f"(not shown at this width: {', '.join(left)})", width or 0)
        return out

    def _natural(self, n: int) -> int:
        heading = self.columns[n].heading
        words = heading.split() if self.columns[n].right else [heading]  # headings of numbers fold
        cells = [len(cells[n]) for cells in self.rows if cells]
        return max([1, *map(len, words), *cells])

    def _least(self, n: int) -> int:
        least, natural = self.columns[n].least, self._natural(n)
        return natural if least is None else min(least, natural)

    def _shown(self, width: int) -> list[int]:
        """The columns that there is room for."""
        shown = list(range(len(self.columns)))
        while True:
            needed = sum(map(self._least, shown)) + len(GAP) * (len(shown) - 1)
            least_needed = max(shown, key=lambda n: self.columns[n].rank)
            if needed <= width or not self.columns[least_needed].rank:
                break
            shown.remove(least_needed)
        return shown

    def _widths(self, shown: Sequence[int], width: int) -> list[int]:
        """The widths of the columns. Columns that may be narrowed share one limit; the others are
        as wide as their cells.
        """
        natural = [self._natural(n) for n in shown]
        least = [self._least(n) for n in shown]
        room = width - len(GAP) * (len(shown) - 1)

        def under(limit: int) -> list[int]:
            return [min(n, max(m, limit)) for n, m in zip(natural, least, strict=True)]

        limit = max(natural, default=0)
        while limit > 1 and sum(under(limit)) > room:
            limit -= 1
        found = under(limit)
        for n, wanted in enumerate(natural):  # hands out the characters that the limit left over
            found[n] += min(wanted - found[n], max(0, room - sum(found)))
        return found


def _row(
    cells: Sequence[str], laid: Sequence[tuple[Column, int]], bottom: bool = False
) -> list[str]:
    """The lines of one row. Headings (``bottom``) are aligned to the rule below them."""
    parts = [
        [shortened(cell, width)] if column.shorten else fold(cell, width)
        for cell, (column, width) in zip(cells, laid, strict=True)
    ]
    height = max(map(len, parts), default=0)
    out = []
    for at in range(height):
        line = []
        for part, (column, width) in zip(parts, laid, strict=True):
            n = at - (height - len(part)) if bottom else at
            text = part[n] if 0 <= n < len(part) else ""
            line.append(text.rjust(width) if column.right else text.ljust(width))
        out.append(GAP.join(line).rstrip())
    return out


def fold(text: str, width: int) -> list[str]:
    """``text`` on lines of at most ``width`` characters, broken after a separator if one is in the
    second half of the line. A width of 0 gives one line.
    """
    lines = []
    while width and len(text) > width:
        head = text[: width + 1] if text[width] == " " else text[:width]
        found = BREAKS.match(head)
        end = found.end() if found and 2 * found.end() > width else width
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def shortened(text: str, width: int) -> str:
    """``text`` in ``width`` characters. A long text loses its middle, because names differ at their
    ends (``blocks.0.mlp…fc2``).
    """
    if len(text) <= width:
        return text
    if width < 2:
        return DOTS[:width]
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + DOTS + text[len(text) - tail :]
