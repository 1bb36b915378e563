"""Of hundreds of sizes, the few at which configs are chosen as in any library of many sizes; the
others take those (:mod:`gtco.driver.sizes.forms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import dist, log

ANCHORS = 16  # in a library; one of so many sizes or fewer has anchors alone


def anchors(sizes: Sequence[Mapping[str, int]]) -> list[int]:
    """The numbers of :data:`ANCHORS` sizes that lie far apart in proportion: the smallest and the
    largest, and then again and again the one that is farthest from all so far (Gonzalez 1985). All
    numbers, where there are no more.
    """
    if len(sizes) <= ANCHORS:
        return [*range(len(sizes))]
    places = [[log(size) for size in one.values()] for one in sizes]
    by_sum = sorted(range(len(sizes)), key=lambda number: sum(places[number]))
    found = [by_sum[0], by_sum[-1]]

    # from the nearest anchor
    distances = [min(dist(place, places[anchor]) for anchor in found) for place in places]
    while len(found) < ANCHORS:
        farthest = max(range(len(sizes)), key=distances.__getitem__)
        found.append(farthest)
        distances = [
            min(far, dist(place, places[farthest]))
            for place, far in zip(places, distances, strict=True)
        ]
    return found
