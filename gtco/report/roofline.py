"""The roofline of a machine with the stages of a model under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtco.report.drawing import WIDTH, colour, time_text
from gtco.report.facts import Facts, ModelFacts
from gtco.report.families import family
from gtco.report.text import flops, middle, nbytes, percent

Domain = tuple[float, float]  # the least and the greatest value of an axis


def roofline(facts: Facts, model: ModelFacts) -> dict[str, Any]:
    """Every stage by its FLOPs a byte and its FLOP/s, under the machine's peaks and bandwidths. A
    stage without FLOPs stands at the left edge.
    """
    machine = facts.machine
    formats = {stage.number_format for stage in model.stages}
    peaks = {n: v for n, v in machine.peaks.items() if n in formats} or dict(machine.peaks)
    bandwidths = {n: v for n, v in machine.bandwidths.items() if n != "L1"}
    known = [s for s in model.stages if s.seconds and s.nbytes]
    intensities = [s.flops / s.nbytes for s in known if s.flops] or [1.0]
    rates = [s.flops / s.seconds for s in known if s.flops] or [1e9]
    x = min(0.5 * min(intensities), 0.1), 2 * max([*intensities, 100.0])
    y = 0.4 * min(rates), 2 * max([*rates, *peaks.values()])
    points = [
        {
            "x": max(s.flops / s.nbytes, x[0]),
            "y": max(s.flops / s.seconds, y[0]) / 1e9,
            "ms": 1e3 * s.seconds,
            "family": family(s),
            "href": f"#stage-{s.number}",
            "text": f"{s.number} {middle(s.name, 60)}: {flops(s.flops / s.seconds)}/s, "
            f"{s.flops / s.nbytes:.3g} FLOP a byte, {time_text(s.seconds, model.seconds)}, "
            f"{percent(s.roofline)} of the roofline",
        }
        for s in known
    ]
    lines, labels = _roofs(peaks, bandwidths, x, y)
    return _picture(points, lines, labels, x, y)


def _roofs(
    peaks: Mapping[str, float], bandwidths: Mapping[str, float], x: Domain, y: Domain
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The ends of a line for each bandwidth and each peak, and their labels."""
    top = max(peaks.values(), default=y[1])
    lines, labels = [], []
    for number, (name, rate) in enumerate(bandwidths.items()):
        # from where the line enters the picture to where it meets the highest peak
        start, end = max(x[0], y[0] / rate), top / rate
        lines += [
            {"x": start, "y": rate * start / 1e9, "line": name},
            {"x": end, "y": top / 1e9, "line": name},
        ]
        at = start * (end / start) ** (0.08 + 0.24 * number)  # bandwidths may be close
        labels.append({"x": at, "y": rate * at / 1e9, "text": f"{name} {nbytes(rate)}/s"})
    left = min([top / rate for rate in bandwidths.values()], default=x[0])
    for name, rate in peaks.items():
        begin = min([rate / r for r in bandwidths.values()], default=left)
        lines += [
            {"x": begin, "y": rate / 1e9, "line": name},
            {"x": x[1], "y": rate / 1e9, "line": name},
        ]
        label = {"x": x[1], "y": rate / 1e9, "text": f"{name} {flops(rate)}/s", "right": True}
        labels.append(label)
    return lines, labels


def _picture(
    points: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    labels: Sequence[Mapping[str, Any]],
    x: Domain,
    y: Domain,
) -> dict[str, Any]:
    """The picture in Vega-Lite."""
    across = _axis("x", "FLOP a byte of inputs and output", x)
    up = _axis("y", "GFLOP/s", (y[0] / 1e9, y[1] / 1e9))
    size = {
        "field": "ms",
        "type": "quantitative",
        "scale": {"range": [28, 420]},
        "legend": None,
    }
    text = {"type": "text", "fontSize": 10.5, "fill": "var(--muted)", "dy": -6}
    return {
        "width": WIDTH - 50,
        "height": 380,
        "layer": [
            {
                "data": {"values": lines},
                "mark": {"type": "line", "color": "var(--roof)", "strokeWidth": 1.3, "clip": True},
                "encoding": {"x": across, "y": up, "detail": {"field": "line"}},
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
                    "x": across,
                    "y": up,
                    "size": size,
                    "color": colour(points),
                    "href": {"field": "href"},
                    "description": {"field": "text"},
                },
            },
            *(
                {
                    "data": {"values": [v for v in labels if bool(v.get("right")) is right]},
                    "mark": {**text, **halo, "align": "right" if right else "left"},
                    "encoding": {"x": across, "y": up, "text": {"field": "text"}},
                }
                for right in (False, True)
                # first what keeps a line from crossing out the letters
                for halo in ({"stroke": "var(--paper)", "strokeWidth": 4}, {})
            ),
        ],
    }


def _axis(field: str, title: str, domain: Domain) -> dict[str, Any]:
    """A logarithmic axis."""
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "domain": [*domain], "nice": False},
        "axis": {"format": "~g", "labelOverlap": True, "tickCount": 6},
    }
