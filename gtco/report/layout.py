"""Where the boxes of a graph stand: layers and the order in each by fast-sugiyama, then places in
pixels for boxes and lines of different widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPACING = 60.0  # between two nodes, in the units of fast-sugiyama
GAP_X, LANE = 32, 14  # pixels between two boxes, and between a line and what is beside it
SWEEPS = 24
Point = tuple[float, int]  # a middle, and the number of the layer


@dataclass(frozen=True)
class Layout:
    """The middle and the layer of each node; for each edge the middles and layers where it crosses
    what is between.
    """

    places: Mapping[int, Point]
    routes: Mapping[tuple[int, int], Sequence[Point]]

    @property
    def crossings(self) -> list[float]:
        return [x for route in self.routes.values() for x, _ in route]


def layout(nodes: Iterable[int], pairs: Sequence[tuple[int, int]]) -> Layout:
    """The layers, and the order in each. Parts that are not connected stand beside each other."""
    from fast_sugiyama import from_edges

    places: dict[int, Point] = {}
    routes: dict[tuple[int, int], Sequence[Point]] = {}
    right = 0.0
    every = list(nodes)
    # numbered without gaps: what has a higher number is where a long edge crosses a layer
    names = sorted({node for pair in pairs for node in pair})
    numbers = {node: number for number, node in enumerate(names)}
    wired = [(numbers[source], numbers[sink]) for source, sink in pairs]
    parts: Any = (
        from_edges(
            wired,
            vertex_spacing=SPACING,
            dummy_vertices=True,
            check_layout=False,
            ranking_type="down",  # what reads a tensor of long ago stands beside its own readers
        )
        if wired
        else []
    )
    for positions, width, _, edges in parts:
        rows = sorted({y for _, (_, y) in positions}, reverse=True)
        layer_of = {y: n for n, y in enumerate(rows)}
        at = {number: (right + x, layer_of[y]) for number, (x, y) in positions}
        after: dict[int, list[int]] = {}
        for source, sink in edges or ():
            after.setdefault(source, []).append(sink)
        for number, place in at.items():
            if number >= len(names):
                continue
            places[names[number]] = place
            for first in after.get(number, ()):
                crossed, node = [], first
                while node >= len(names):
                    crossed.append(at[node])
                    node = after[node][0]
                routes[names[number], names[node]] = crossed
        right += width + SPACING
    for node in every:
        if node not in places:
            places[node] = (right, 0)
            right += SPACING
    return Layout(places, dict(sorted(routes.items())))


Node = tuple[int, int, int]  # (number, -1, layer), or where the edge of two numbers crosses it


def spread(found: Layout, halves: Sequence[float]) -> Layout:
    """The layout in pixels. Layers keep their order. Each node goes as close to the middle of its
    neighbours as those beside it let it, layer by layer, down and up and down again; what is long
    pulls most, so that long edges are straight. ``halves``: half of each node's width.
    """
    layers: dict[int, list[tuple[float, Node]]] = {}
    for number, (x, layer) in found.places.items():
        layers.setdefault(layer, []).append((x, (number, -1, layer)))
    above: dict[Node, list[Node]] = {}
    below: dict[Node, list[Node]] = {}
    for (source, sink), route in found.routes.items():
        last = (source, -1, found.places[source][1])
        chain: list[Node] = [(source, sink, layer) for _, layer in route]
        for (x, layer), node in zip(route, chain, strict=True):
            layers.setdefault(layer, []).append((x, node))
        for node in [*chain, (sink, -1, found.places[sink][1])]:
            below.setdefault(last, []).append(node)
            above.setdefault(node, []).append(last)
            last = node
    orders = [[node for _, node in sorted(layers[n])] for n in sorted(layers)]
    scale = (2 * max(halves) + GAP_X) / SPACING
    at = {node: scale * x for items in layers.values() for x, node in items}
    half = {node: 0.0 if node[1] >= 0 else halves[node[0]] for node in at}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for order in orders if down else reversed(orders):
            wanted, weights = [], []
            for node in order:
                near = (above if down else below).get(node) or (below if down else above).get(node)
                pulls = [(_pull(node, other), at[other]) for other in near or ()]
                weight = sum(pull for pull, _ in pulls)
                wanted.append(sum(p * x for p, x in pulls) / weight if pulls else at[node])
                weights.append(weight or 0.1)
            at |= zip(order, apart(wanted, weights, [half[n] for n in order]), strict=True)
    left = min(x - half[node] for node, x in at.items())
    return Layout(
        {one: (round(at[one, -1, n] - left), n) for one, (_, n) in found.places.items()},
        {
            (source, sink): [(round(at[source, sink, n] - left), n) for _, n in route]
            for (source, sink), route in found.routes.items()
        },
    )


def _pull(node: Node, other: Node) -> int:
    """dot's weights: 1 between two boxes, 2 between a box and a crossing, 8 between crossings."""
    return (1, 2, 8)[(node[1] >= 0) + (other[1] >= 0)]


def apart(
    wanted: Sequence[float], weights: Sequence[float], halves: Sequence[float]
) -> list[float]:
    """The places nearest to the wanted ones (least squares) at which neighbours do not overlap:
    isotonic regression, by pooling adjacent violators.
    """
    offsets, at = [], 0.0
    for n, half in enumerate(halves):
        if n:
            gap = GAP_X if half and halves[n - 1] else LANE
            at += halves[n - 1] + half + gap
        offsets.append(at)
    pools: list[list[float]] = []  # place, weight, length
    for place, weight, offset in zip(wanted, weights, offsets, strict=True):
        pools.append([place - offset, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            x, w, length = pools.pop()
            other = pools[-1]
            other[0] = (other[0] * other[1] + x * w) / (other[1] + w)
            other[1], other[2] = other[1] + w, other[2] + length
    flat = [x for x, _, length in pools for _ in range(int(length))]
    return [place + offset for place, offset in zip(flat, offsets, strict=True)]
