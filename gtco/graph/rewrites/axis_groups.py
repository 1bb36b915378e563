"""Which axes of a reshape belong together."""

from __future__ import annotations

from math import prod


def axis_groups(
    source: tuple[int, ...], target: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of axes of a reshape with equal products: ([axes of source], [axes of
    target])."""
    if 0 in source or 0 in target:
        return [(list(range(len(source))), list(range(len(target))))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [i] if i < len(source) else [], [j] if j < len(target) else []
        i, j = i + len(left), j + len(right)
        while prod(source[a] for a in left) != prod(target[a] for a in right):
            if prod(source[a] for a in left) < prod(target[a] for a in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups
