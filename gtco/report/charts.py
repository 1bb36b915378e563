"""The charts of a report as Vega-Lite's specifications: where the time goes, the arena over
time, errors, what layers lose, and the times of two libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gtco.report.drawing import LABELS, WIDTH, colour, time_text
from gtco.report.facts import ModelFacts, StageFacts
from gtco.report.families import family
from gtco.report.text import TIMES, error_text, middle, milliseconds, nbytes
from gtco.tensor.operators import INJECTIVE, OPERATORS

MOST_BARS = 14
LEAST_ERROR = 1e-12  # smaller errors share its place on a logarithmic axis
HEAT = 6  # colours of a heat map
SIDES = ["before", "after"]


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
                "label": f"{middle(kinds, 34 - len(times))}{times}",
                "shape": first.output.type.partition("[")[2].rstrip("]"),
                "ms": 1e3 * seconds,
                "predicted": 1e3 * sum(s.predicted_seconds or 0 for s in group),
                "family": family(first),
                "href": f"#stage-{first.number}",
                "text": f"{kinds}{times}: {time_text(seconds, whole)}",
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
                "text": f"{len(others)} other stages: {time_text(seconds, whole)}",
            }
        )
    if model.measurement:
        seconds = model.measurement.unattributed_seconds
        rows.append(
            {
                "label": "unattributed",
                "ms": max(0.0, 1e3 * seconds),
                "family": "unattributed",
                "text": f"unattributed: {time_text(seconds, whole)}",
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
        "axis": {"tickCount": 8, "labelOverlap": True},
        "scale": {"domain": [0, 1.35 * most]},
    }
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "bar", "cornerRadiusEnd": 2, "height": {"band": 0.72}},
            "encoding": {
                "x": x,
                "color": colour(rows),
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
                "text": f"{stage.number} {middle(stage.name, 60)}: "
                f"{time_text(stage.seconds, model.seconds)}",
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
                "text": f"unattributed: {time_text(seconds, model.seconds)}",
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
                "axis": {"grid": False, "tickCount": 8, "labelOverlap": True},
            },
            "x2": {"field": "to"},
            "color": colour(rows),
            "href": {"field": "href"},
            "description": {"field": "text"},
        },
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
            "text": f"{middle(name, 60)}: {nbytes(place.nbytes)} at {nbytes(place.offset)}, "
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
            "color": colour(rows),
            "href": {"field": "href"},
            "description": {"field": "text"},
        },
    }


def errors(verification: Mapping[str, Any]) -> dict[str, Any]:
    """The relative error of every output in every case, beside the tolerance."""
    rows = [
        {
            "output": middle(d["output"], 34),
            "error": max(d["relative"], LEAST_ERROR),
            "case": d["case"],
            "text": f"{d['output']} on {d['case']} inputs: {d['relative']:.2e}, {d['verdict']}",
            "state": "wrong" if d["verdict"] == "wrong" else "right",
        }
        for d in verification["differences"]
        if d["relative"] is not None
    ]
    edge = any(row["error"] == LEAST_ERROR for row in rows)
    x = {
        "field": "error",
        "type": "quantitative",
        "title": f"largest relative error{' (10⁻¹² or less at the left edge)' if edge else ''}",
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
            {
                "data": {"values": [{"error": verification["tolerance"], "text": "tolerance"}]},
                "mark": {
                    "type": "text",
                    "align": "right",
                    "baseline": "bottom",
                    "dx": -4,
                    "fontSize": 10.5,
                    "fill": "var(--muted)",
                },
                "encoding": {"x": x, "y": {"value": 12}, "text": {"field": "text"}},
            },
        ],
    }


def losses(found: Mapping[str, Any]) -> dict[str, Any]:
    """What each layer loses, as a heat map: a column for each layer, a row for each measure."""
    numbered = all(layer["stage"] is not None for layer in found["layers"])
    steps = heat_steps(e for layer in found["layers"] for e in layer["errors"] if e)
    labels = [error_text(high) for high in steps]
    rows = []
    for place, layer in enumerate(found["layers"]):
        for measure, error in zip(found["measures"], layer["errors"], strict=True):
            known = next((n for n, high in enumerate(steps) if error and error <= high), 0)
            rows.append(
                {
                    "place": layer["stage"] if numbered else place,
                    "measure": measure["name"],
                    "most": "not known" if error is None else labels[known],
                    "text": f"{middle(layer['name'], 60)}, {measure['name']}: {error_text(error)}",
                    **({"href": f"#stage-{layer['stage']}"} if layer["stage"] is not None else {}),
                }
            )
    colours = [f"var(--heat{n})" for n in range(HEAT)]
    if any(row["most"] == "not known" for row in rows):
        labels, colours = [*labels, "not known"], [*colours, "var(--grid)"]
    places = [row["place"] for row in rows]
    least, most = min(places, default=0), max(places, default=0)
    for row in rows:
        row["from"], row["to"] = row["place"] - 0.5, row["place"] + 0.5
    return {
        "width": WIDTH - 130,
        "height": {"step": 40},
        "data": {"values": rows},
        "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 0.6},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": f"{'stages' if numbered else 'products'} in the order in which they run",
                "scale": {"domain": [least - 0.5, most + 0.5], "nice": False},
                "axis": {"grid": False, "format": "d", "tickMinStep": 1},
            },
            "x2": {"field": "to"},
            "y": {
                "field": "measure",
                "type": "nominal",
                "sort": [measure["name"] for measure in found["measures"]],
                "axis": LABELS,
            },
            "color": {
                "field": "most",
                "type": "nominal",
                "scale": {"domain": labels, "range": colours},
                "legend": {"symbolStrokeWidth": 0, "title": "error, at most"},
            },
            "href": {"field": "href"},
            "description": {"field": "text"},
        },
    }


def heat_steps(errors: Iterable[float]) -> list[float]:
    """The upper ends of the colours of a heat map, each so many times the one before. The lowest
    colour has the smallest quarter of the errors, and whatever is far below the largest.
    """
    ranked = sorted(errors) or [1.0]
    most, low = ranked[-1], ranked[len(ranked) // 4]
    ratio = min(max((most / low) ** (1 / (HEAT - 1)), 1.25), 3.0)
    return [most / ratio**n for n in reversed(range(HEAT))]


def compared(rows: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Two bars for each (label, seconds before, seconds after)."""
    values = [
        {
            "row": f"{number:02}{middle(label, 34)}",
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
