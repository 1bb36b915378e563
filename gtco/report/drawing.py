"""Vega-Lite's specifications as SVG, drawn by vl-convert, and what all charts share.

Colours are names of CSS variables (``var(--products)``), which the page defines for light, dark and
print. A picture has a label for screen readers, a title for each mark, and links to the stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gtco.report.text import milliseconds, percent

VERSION = "6.4"  # version of Vega-Lite
WIDTH = 940
FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
COLOURS = {
    "products": "var(--products)",
    "attention": "var(--attention)",
    "convolutions": "var(--convolutions)",
    "normalisation": "var(--normalisation)",
    "element-wise": "var(--elementwise)",
    "fallback": "var(--fallback)",
    "other": "var(--other)",
    "unattributed": "var(--unattributed)",
}
# A browser's font may be wider than the one that vl-convert measures with.
PADDING = {"left": 22, "right": 22, "top": 4, "bottom": 4}
LABELS: Mapping[str, Any] = {
    "title": None,
    "labelLimit": 270,
    "labelColor": "var(--ink)",
    "ticks": False,
    "domain": False,
    "labelPadding": 8,
}
CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "gridColor": "var(--grid)",
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
    },
    "legend": {
        "labelFontSize": 11,
        "labelColor": "var(--muted)",
        "title": None,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titleColor": "var(--muted)",
        "orient": "bottom",
        "symbolType": "square",
        "symbolSize": 90,
        "columns": 8,
        "columnPadding": 26,
    },
}


def svg(chart: Mapping[str, Any], name: str, label: str, prefix: str = "") -> str:
    """The picture of a specification. ``name`` makes its ids unique in the page, and ``prefix``
    leads its links to the stages of one variant.
    """
    from vl_convert import vegalite_to_svg

    schema = "https://vega.github.io/schema/vega-lite/v6.json"
    spec = {"$schema": schema, "config": CONFIG, "padding": PADDING, **chart}
    drawn: str = vegalite_to_svg(spec, vl_version=VERSION)
    # Vega numbers clip paths through all pictures of the process, and a page has each id once.
    for number, clip in enumerate(dict.fromkeys(re.findall(r'id="(\w+)"', drawn))):
        drawn = re.sub(rf"(id=\"|url\(#){clip}\b", rf"\g<1>{name}-{number}", drawn)
    # vl-convert takes a fragment for an address in the web, and no link for one too. The table has
    # the same links, so those of pictures are not stops of the Tab key.
    drawn = re.sub(r'<a xlink:href="[^"#]*">(.*?)</a>', r"\1", drawn)
    drawn = re.sub(r'<a xlink:href="[^"#]*#', f'<a tabindex="-1" href="#{prefix}', drawn)
    drawn = re.sub(
        r'<(path|text|line) aria-label="([^"]*)"([^>]*)/>', r"<\1\3><title>\2</title></\1>", drawn
    )
    drawn = re.sub(r' (aria-[a-z]+|role|pointer-events)="[^"]*"', "", drawn)
    size = re.search(r'width="([\d.]+)" height="([\d.]+)"', drawn)
    assert size is not None
    width, height = size[1], size[2]
    head = (
        f'<svg class="chart" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    return re.sub(r'<svg [^>]*viewBox="[^"]*"', lambda _: head, drawn, count=1)


def colour(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The colour of each family that there is."""
    there = {row["family"] for row in rows}
    names = [name for name in COLOURS if name in there]
    return {
        "field": "family",
        "type": "nominal",
        "scale": {"domain": names, "range": [COLOURS[name] for name in names]},
    }


def time_text(seconds: float, whole: float) -> str:
    return f"{milliseconds(seconds)}, {percent(seconds / whole if whole else None)}"
