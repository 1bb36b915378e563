"""The fused graph as a picture: a box for each stage with its operators inside, laid out in layers
from the inputs at the top to the outputs at the bottom. Positions are in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtco.report.facts import ModelFacts, StageFacts
from gtco.report.layout import layout, spread
from gtco.report.text import middle

WIDTH, PILL_WIDTH, PILL_HEIGHT = 300, 220, 26  # sizes of a stage's box, of an input or an output
HEADER, ROW, FOOT = 30, 16, 10  # heights in a box: its name, an operator, what is below
GAP_Y, MARGIN = 28, 12
MOST_ROWS = 8  # operators that a box shows


@dataclass(frozen=True)
class Box:
    """A stage, or an input or an output of the model (``stage`` is None). ``rows``: the operators'
    kinds and nodes, shortened to fit.
    """

    stage: StageFacts | None
    label: str
    x: float
    y: float
    width: float
    height: float
    rows: tuple[tuple[str, str], ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Edge:
    """A tensor: an SVG path, the stage that wrote it (-1: an input of the model) and the stage that
    reads it (-1: an output of the model).
    """

    path: str
    source: int
    sink: int


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Wiring:
    """The boxes and the edges of the graph: stages by their numbers, then the model's inputs and
    outputs.
    """

    inputs: Mapping[int, str]
    outputs: Mapping[int, str]
    pairs: tuple[tuple[int, int], ...]


def wiring(model: ModelFacts) -> Wiring:
    stages = len(model.stages)
    inputs: dict[str, int] = {}
    pairs: dict[tuple[int, int], None] = {}
    for stage in model.stages:
        pairs |= {(source, stage.number): None for source in stage.reads}
        for tensor in stage.inputs:
            if tensor.place == "input":
                node = inputs.setdefault(tensor.name, stages + len(inputs))
                pairs[node, stage.number] = None
    outputs: dict[int, str] = {}
    for stage in model.stages:
        if stage.output.place == "output":
            outputs[stages + len(inputs) + len(outputs)] = stage.output.name
            pairs[stage.number, max(outputs)] = None
    return Wiring({node: name for name, node in inputs.items()}, outputs, tuple(pairs))


def picture(model: ModelFacts) -> Picture:
    """The picture of a model."""
    wired, stages = wiring(model), len(model.stages)
    labels = {**wired.inputs, **wired.outputs}
    shown = range(stages + len(labels))
    found = spread(layout(shown, wired.pairs), [_half(node, stages) for node in shown])
    places = found.places
    heights = [0.0] * (1 + max(layer for _, layer in places.values()))
    for node in shown:
        layer = places[node][1]
        heights[layer] = max(heights[layer], _height(model, node))
    tops = [MARGIN + sum(heights[:n]) + n * GAP_Y for n in range(len(heights))]
    boxes = []
    for node in shown:
        x, layer = places[node]
        stage = model.stages[node] if node < stages else None
        height = _height(model, node)
        boxes.append(
            Box(
                stage,
                middle(stage.name, 26) if stage else middle(labels[node], 26),
                MARGIN + x - _half(node, stages),
                # inputs hang at the bottom of their layer, close to who reads them
                tops[layer] + (heights[layer] - height if node in wired.inputs else 0.0),
                2 * _half(node, stages),
                height,
                _rows(stage) if stage else (),
                max(0, len(stage.operators) - MOST_ROWS) if stage else 0,
            )
        )
    edges = []
    for (source, sink), route in found.routes.items():
        begin, end = boxes[source], boxes[sink]
        points = [(begin.x + begin.width / 2, begin.y + begin.height, begin.y + begin.height)]
        for x, layer in route:
            points.append((MARGIN + x, tops[layer], tops[layer] + heights[layer]))
        points.append((end.x + end.width / 2, end.y, end.y))
        known = [node if node < stages else -1 for node in (source, sink)]
        edges.append(Edge(_path(points), *known))
    right = max([*(box.x + box.width for box in boxes), *(MARGIN + x for x in found.crossings)])
    bottom = max(box.y + box.height for box in boxes)
    return Picture(right + MARGIN, bottom + MARGIN, tuple(boxes), tuple(edges))


def _half(node: int, stages: int) -> float:
    return (WIDTH if node < stages else PILL_WIDTH) / 2


def _height(model: ModelFacts, node: int) -> float:
    if node >= len(model.stages):
        return PILL_HEIGHT
    operators = len(model.stages[node].operators)
    return HEADER + ROW * (min(operators, MOST_ROWS) + (operators > MOST_ROWS)) + FOOT


def _rows(stage: StageFacts) -> tuple[tuple[str, str], ...]:
    return tuple((middle(op.kind, 16), middle(op.node, 22)) for op in stage.operators[:MOST_ROWS])


def _path(points: Sequence[tuple[float, float, float]]) -> str:
    """A smooth line through points (x, top, bottom): straight down across a layer, and an S from
    one to the next.
    """
    x, _, y = points[0]
    parts = [f"M{x:g} {y:g}"]
    for x1, top, bottom in points[1:]:
        between = (y + top) / 2
        parts.append(f"C{x:g} {between:g} {x1:g} {between:g} {x1:g} {top:g}")
        if bottom != top:
            parts.append(f"V{bottom:g}")
        x, y = x1, bottom
    return "".join(parts)
