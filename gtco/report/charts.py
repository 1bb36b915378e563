"""The charts of a report: Vega-Lite's specifications, drawn as SVG by vl-convert.

Colours are names of CSS variables (``var(--products)``), which the page defines for light, dark and
print. The pictures have titles for screen readers; links lead to the stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gtco.report.facts import Facts, ModelFacts, StageFacts
from gtco.report.families import family
from gtco.report.text import TIMES, flops, middle, milliseconds, nbytes, percent
from gtco.tensor.operators import INJECTIVE, OPERATORS

VERSION = "6.4"  # of Vega-Lite
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
MOST_BARS = 14
SIDES = ["before", "after"]
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
    drawn = re.sub(r'(id="|url\(#)', rf"\g<1>{name}-", drawn)
    # vl-convert takes a fragment for an address in the web. The table has the same links, so those
    # of pictures are not stops of the Tab key.
    drawn = re.sub(r'<a xlink:href="[^"#]*#', '<a tabindex="-1" href="#' + prefix, drawn)
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


def where_time_goes(model: ModelFacts) -> dict[str, Any]:
    """Bars: groups of equal stages, the rest, and what no stage accounts for."""
    groups: dict[tuple[object, ...], list[StageFacts]] = {}
    for stage in model.stages:
        types = tuple(t.type for t in (*stage.inputs, stage.output))
        key = (*(op.kind for op in stage.operators), types)
        groups.setdefault(key, []).append(stage)
    ranked = sorted(groups.values(), key=lambda group: -sum(s.seconds for s in group))
    shown = ranked if len(ranked) <= MOST_BARS + 1 else ranked[:MOST_BARS]
    whole = model.seconds
    rows: list[dict[str, Any]] = []
    for group in shown:
        first, seconds = max(group, key=lambda s: s.seconds), sum(s.seconds for s in group)
        times = f" {TIMES}{len(group)}" if len(group) > 1 else ""
        kinds = "+".join(telling(first))
        rows.append(
            {
                "label": f"{middle(kinds, 38 - len(times))}{times}",
                "shape": first.output.type.partition("[")[2].rstrip("]"),
                "ms": 1e3 * seconds,
                "predicted": 1e3 * sum(s.predicted_seconds or 0 for s in group),
                "family": family(first),
                "href": f"#stage-{first.number}",
                "text": f"{kinds}{times}: {_time(seconds, whole)}",
            }
        )
    if others := [stage for group in ranked[len(shown) :] for stage in group]:
        seconds = sum(s.seconds for s in others)
        rows.append(
            {
                "label": f"{len(others)} other stages",
                "ms": 1e3 * seconds,
                "predicted": 1e3 * sum(s.predicted_seconds or 0 for s in others),
                "family": "other",
                "text": f"{len(others)} other stages: {_time(seconds, whole)}",
            }
        )
    if model.measurement:
        seconds = model.measurement.unattributed_seconds
        rows.append(
            {
                "label": "unattributed",
                "ms": max(0.0, 1e3 * seconds),
                "family": "unattributed",
                "text": f"unattributed: {_time(seconds, whole)}",
            }
        )
    for number, row in enumerate(rows):
        # labels are equal where kinds are; a number that is not seen keeps their rows apart
        row["row"] = f"{number:02}{row['label']}"
        row["value"] = row["text"].rpartition(": ")[2]
        row.setdefault("shape", "")
    return rows_chart(rows, "predicted" if model.measurement else "")


def telling(stage: StageFacts) -> list[str]:
    """The kinds of the operators without those that only move elements, if there are others."""
    kinds = [op.kind for op in stage.operators]
    computing = [k for k in kinds if k not in OPERATORS or OPERATORS[k].pattern != INJECTIVE]
    return computing or kinds


def rows_chart(rows: Sequence[Mapping[str, Any]], tick: str) -> dict[str, Any]:
    """Bars of ``ms`` with their labels and values; ``tick``: the field of a mark in each row."""
    y = {
        "field": "row",
        "type": "nominal",
        "axis": {**LABELS, "labelExpr": "slice(datum.label, 2)"},
    }
    most = max([1e-9, *(max(r["ms"], r.get("predicted") or 0) for r in rows)])
    x = {
        "field": "ms",
        "type": "quantitative",
        "title": "milliseconds of a run",
        "scale": {"domain": [0, 1.35 * most]},
    }
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": {"band": 0.72}},
            "encoding": {
                "x": x,
                "color": _colour(rows),
                "href": {"field": "href"},
                "description": {"field": "text"},
            },
        },
        {
            "mark": {
                "type": "text",
                "align": "left",
                "dx": 5,
                "fontSize": 11,
                "fill": "var(--ink)",
            },
            "encoding": {"x": {**x, "field": "end"}, "text": {"field": "value"}},
        },
    ]
    if tick:
        layers.append(
            {
                "mark": {"type": "tick", "color": "var(--ink)", "thickness": 1.5, "size": 15},
                "encoding": {"x": {**x, "field": tick}},
            }
        )
    values = [{**row, "end": max(row["ms"], row.get(tick) or 0.0)} for row in rows]
    layers.append(
        {
            "mark": {"type": "text", "align": "right", "fontSize": 10, "fill": "var(--muted)"},
            "encoding": {"x": {"value": WIDTH - 282}, "text": {"field": "shape"}},
        }
    )
    return {
        "width": WIDTH - 280,
        "height": {"step": 21},
        "data": {"values": values},
        "encoding": {"y": y},
        "layer": layers,
    }


def in_order(model: ModelFacts) -> dict[str, Any]:
    """One strip: the stages in the order in which they run, each as long as its time."""
    rows, at = [], 0.0
    for stage in model.stages:
        end = at + 1e3 * stage.seconds
        rows.append(
            {
                "from": at,
                "to": end,
                "family": family(stage),
                "href": f"#stage-{stage.number}",
                "text": f"{stage.number} {stage.name}: {_time(stage.seconds, model.seconds)}",
            }
        )
        at = end
    if model.measurement and model.measurement.unattributed_seconds > 0:
        seconds = model.measurement.unattributed_seconds
        end = at + 1e3 * seconds
        rows.append(
            {
                "from": at,
                "to": end,
                "family": "unattributed",
                "text": f"unattributed: {_time(seconds, model.seconds)}",
            }
        )
        at = end
    return {
        "width": WIDTH,
        "height": 40,
        "data": {"values": rows},
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 0.3, "height": 40},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": "milliseconds since the start of a run",
                "scale": {"domain": [0, at or 1], "nice": False},
                "axis": {"grid": False},
            },
            "x2": {"field": "to"},
            "color": _colour(rows),
            "href": {"field": "href"},
            "description": {"field": "text"},
        },
    }


def roofline(facts: Facts, model: ModelFacts) -> dict[str, Any]:
    """Every stage by its FLOPs a byte and its FLOP/s, under the machine's peaks and bandwidths. A
    stage without FLOPs stands at the left edge.
    """
    machine = facts.machine
    formats = {stage.number_format for stage in model.stages}
    peaks = {n: v for n, v in machine.peaks.items() if n in formats} or dict(machine.peaks)
    roofs = {n: v for n, v in machine.bandwidths.items() if n != "L1"}
    known = [s for s in model.stages if s.seconds and s.nbytes]
    intensities = [s.flops / s.nbytes for s in known if s.flops] or [1.0]
    rates = [s.flops / s.seconds for s in known if s.flops] or [1e9]
    low_x, high_x = min(0.5 * min(intensities), 0.1), 2 * max([*intensities, 100.0])
    low_y, high_y = 0.4 * min(rates), 2 * max([*rates, *peaks.values()])
    points = [
        {
            "x": max(s.flops / s.nbytes, low_x),
            "y": max(s.flops / s.seconds, low_y) / 1e9,
            "ms": 1e3 * s.seconds,
            "family": family(s),
            "href": f"#stage-{s.number}",
            "text": f"{s.number} {s.name}: {flops(s.flops / s.seconds)}/s, "
            f"{s.flops / s.nbytes:.3g} FLOP a byte, {_time(s.seconds, model.seconds)}, "
            f"{percent(s.roofline)} of the roofline",
        }
        for s in known
    ]
    top = max(peaks.values(), default=high_y)
    lines, labels = [], []
    for number, (name, rate) in enumerate(roofs.items()):
        # from where the line enters the picture to where it meets the highest peak
        start, end = max(low_x, low_y / rate), top / rate
        lines += [
            {"x": start, "y": rate * start / 1e9, "line": name},
            {"x": end, "y": top / 1e9, "line": name},
        ]
        at = start * (end / start) ** (0.08 + 0.24 * number)  # bandwidths may be close
        labels.append({"x": at, "y": rate * at / 1e9, "text": f"{name} {nbytes(rate)}/s"})
    left = min([top / rate for rate in roofs.values()], default=low_x)
    for name, rate in peaks.items():
        begin = min([rate / r for r in roofs.values()], default=left)
        lines += [
            {"x": begin, "y": rate / 1e9, "line": name},
            {"x": high_x, "y": rate / 1e9, "line": name},
        ]
        labels.append(
            {"x": high_x, "y": rate / 1e9, "text": f"{name} {flops(rate)}/s", "right": True}
        )
    x = {
        "field": "x",
        "type": "quantitative",
        "title": "FLOP a byte of inputs and output",
        "scale": {"type": "log", "domain": [low_x, high_x], "nice": False},
        "axis": {"format": "~g", "labelOverlap": True, "tickCount": 6},
    }
    y = {
        "field": "y",
        "type": "quantitative",
        "title": "GFLOP/s",
        "scale": {"type": "log", "domain": [low_y / 1e9, high_y / 1e9], "nice": False},
        "axis": {"format": "~g", "labelOverlap": True, "tickCount": 6},
    }
    text = {"type": "text", "fontSize": 10.5, "fill": "var(--muted)", "dy": -6}
    return {
        "width": WIDTH - 50,
        "height": 380,
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line", "color": "var(--roof)", "strokeWidth": 1.3, "clip": True},
                "encoding": {"x": x, "y": y, "detail": {"field": "line"}},
            },
            {
                "data": {"values": points},
                "mark": {
                    "type": "circle",
                    "opacity": 0.75,
                    "stroke": "var(--paper)",
                    "strokeWidth": 0.7,
                },
                "encoding": {
                    "x": x,
                    "y": y,
                    "size": {
                        "field": "ms",
                        "type": "quantitative",
                        "scale": {"range": [28, 420]},
                        "legend": None,
                    },
                    "color": _colour(points),
                    "href": {"field": "href"},
                    "description": {"field": "text"},
                },
            },
            *(
                {
                    "data": {"values": [v for v in labels if bool(v.get("right")) is right]},
                    "mark": {**text, "align": "right" if right else "left"},
                    "encoding": {"x": x, "y": y, "text": {"field": "text"}},
                }
                for right in (False, True)
            ),
        ],
    }


def memory(model: ModelFacts) -> dict[str, Any]:
    """The arena over time: each stage's output as a box, from the stage that writes it to the last
    that reads it.
    """
    rows = [
        {
            "from": place.first - 0.5,
            "to": place.last + 0.5,
            "low": place.offset / 1e6,
            "high": (place.offset + place.nbytes) / 1e6,
            "family": family(model.stages[place.stage]),
            "href": f"#stage-{place.stage}",
            "text": f"{name}: {nbytes(place.nbytes)} at {nbytes(place.offset)}, "
            f"stages {place.first} to {place.last}",
        }
        for place in model.arena
        for name in [model.stages[place.stage].output.name or model.stages[place.stage].name]
    ]
    return {
        "width": WIDTH - 50,
        "height": 240,
        "data": {"values": rows},
        "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 0.6, "opacity": 0.85},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": "stages in the order in which they run",
                "scale": {"domain": [-0.5, len(model.stages) - 0.5], "nice": False},
                "axis": {"grid": False, "format": "d"},
            },
            "x2": {"field": "to"},
            "y": {
                "field": "low",
                "type": "quantitative",
                "title": "MB of the arena",
                "scale": {"domain": [0, model.arena_bytes / 1e6 or 1], "nice": False},
            },
            "y2": {"field": "high"},
            "color": _colour(rows),
            "href": {"field": "href"},
            "description": {"field": "text"},
        },
    }


def errors(verification: Mapping[str, Any]) -> dict[str, Any]:
    """The relative error of every output in every case, beside the tolerance."""
    rows = [
        {
            "output": middle(d["output"], 34),
            "error": max(d["relative"], 1e-12),
            "case": d["case"],
            "text": f"{d['output']} on {d['case']} inputs: {d['relative']:.2e}, {d['verdict']}",
            "state": "wrong" if d["verdict"] == "wrong" else "right",
        }
        for d in verification["differences"]
        if d["relative"] is not None
    ]
    x = {
        "field": "error",
        "type": "quantitative",
        "title": "largest relative error (10⁻¹² or less at the left edge)",
        "scale": {"type": "log"},
        "axis": {"format": ".0e", "labelOverlap": True, "tickCount": 6},
    }
    return {
        "width": WIDTH - 250,
        "height": {"step": 24},
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.75},
                "encoding": {
                    "x": x,
                    "y": {
                        "field": "output",
                        "type": "nominal",
                        "axis": {"title": None, "labelLimit": 240},
                    },
                    "color": {
                        "field": "state",
                        "type": "nominal",
                        "scale": {
                            "domain": ["right", "wrong"],
                            "range": ["var(--products)", "var(--fallback)"],
                        },
                        "legend": None,
                    },
                    "description": {"field": "text"},
                },
            },
            {
                "data": {"values": [{"error": verification["tolerance"]}]},
                "mark": {"type": "rule", "color": "var(--fallback)", "strokeDash": [4, 3]},
                "encoding": {"x": x},
            },
        ],
    }


def compared(rows: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Two bars for each (label, seconds before, seconds after)."""
    values = [
        {
            "row": f"{number:02}{middle(label, 38)}",
            "ms": 1e3 * seconds,
            "which": which,
            "text": f"{label}, {which}: {milliseconds(seconds)}",
        }
        for number, (label, *both) in enumerate(rows)
        for which, seconds in zip(SIDES, both, strict=True)
    ]
    return {
        "width": WIDTH - 280,
        "height": {"step": 11},
        "data": {"values": values},
        "mark": {"type": "bar", "cornerRadiusEnd": 2},
        "encoding": {
            "y": {
                "field": "row",
                "type": "nominal",
                "axis": {**LABELS, "labelExpr": "slice(datum.label, 2)"},
            },
            "yOffset": {"field": "which", "sort": SIDES},
            "x": {"field": "ms", "type": "quantitative", "title": "milliseconds of a run"},
            "color": {
                "field": "which",
                "type": "nominal",
                "scale": {"domain": SIDES, "range": ["var(--other)", "var(--products)"]},
            },
            "description": {"field": "text"},
        },
    }


def _colour(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The colour of each family that there is."""
    there = {row["family"] for row in rows}
    names = [name for name in COLOURS if name in there]
    return {
        "field": "family",
        "type": "nominal",
        "scale": {"domain": names, "range": [COLOURS[name] for name in names]},
    }


def _time(seconds: float, whole: float) -> str:
    return f"{milliseconds(seconds)}, {percent(seconds / whole if whole else None)}"
