"""The candidates of one sink: every stage inside its cone, or, if there are too many, those that a
descent prices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from gtco.graph.fusion.patterns import anchors_allowed
from gtco.tensor.operators import is_anchor
from gtco.tensor.stage import Operator, Stage

Members = tuple[int, ...]  # positions in a cone, ascending; the last is the sink


class Cone:
    """All stages with one sink inside its cone, as positions in the cone.

    A stage that holds an operator holds all its readers. So the paths from the sink to the operator
    are the same in every stage that holds it, and they were checked against the tables when the
    cone was made. It remains to check which anchors may be together.

    Sets are bit masks. ``given`` has, for each operator but the sink, the stage that was found for
    it as a sink; -1 is an operator outside this cone.
    """

    def __init__(
        self,
        whole: Stage,
        paths: Sequence[set[str]],
        given: Sequence[Sequence[int]],
        total: Callable[[Members], float],
        possible: Callable[[tuple[str, ...]], bool],
        max_operators: int,
        max_candidates: int,
    ):
        self.ops: tuple[Operator, ...] = whole.operators
        self.total, self.possible = total, possible
        self.limit, self.most = max_operators, max_candidates
        self.paths = {op.output: p for op, p in zip(self.ops, paths, strict=True)}
        position = {op.output: n for n, op in enumerate(self.ops)}
        self.users = [0 for _ in self.ops]
        for n, op in enumerate(self.ops):
            for source in op.inputs:
                if source in position:
                    self.users[position[source]] |= 1 << n
        self.given = [0 if -1 in stage else sum(1 << m for m in stage) for stage in given]
        self.anchors = sum(1 << n for n, op in enumerate(self.ops) if is_anchor(op.kind))
        self.allowed: dict[int, bool] = {}
        self.cuts: set[str] = set()  # what the limits left out, in words

    def stages(self) -> list[Members]:
        """All stages, or, if there are too many, those of a descent."""
        found: list[int] = []
        for members in self._grow(len(self.ops) - 1, 1 << (len(self.ops) - 1)):
            found.append(members)
            if len(found) > self.most:
                return [_members(inside) for inside in self._descend()]
        return [_members(inside) for inside in found]

    def _grow(self, below: int, inside: int) -> Iterator[int]:
        """Yields each closed set once. It goes through the operators above ``below``, the last
        first, and leaves each out or takes it in. It takes in only operators whose readers are all
        inside and that the patterns allow.
        """
        yield inside
        if inside.bit_count() >= self.limit:
            if any(self._fits(n, inside) for n in range(below)):
                self.cuts.add(f"stages are limited to {self.limit} operators")
            return
        for n in range(below - 1, -1, -1):
            if self._fits(n, inside):
                yield from self._grow(n, inside | 1 << n)

    def _fits(self, n: int, inside: int) -> bool:
        if self.users[n] & ~inside:
            return False
        return not self.anchors >> n & 1 or self._anchored((inside | 1 << n) & self.anchors)

    def _anchored(self, anchors: int) -> bool:
        """True if one stage may hold these anchors."""
        if anchors not in self.allowed:
            chosen = [self.ops[m] for m in _members(anchors)]
            self.allowed[anchors] = anchors_allowed(chosen, self.paths) and self.possible(
                tuple(op.kind for op in chosen)
            )
        return self.allowed[anchors]

    def _descend(self) -> list[int]:
        """The stages that were priced on the way: the greedy stages and those of two descents; at
        most ``most``.

        A greedy stage takes in everything that fits, the nearest first. One descent begins at the
        best greedy stage, the other at the sink alone.
        """
        self.cuts.add(
            f"more than {self.most} stages are possible; a descent compared at most so many, "
            "so the partition may not be the optimum"
        )
        alone = 1 << (len(self.ops) - 1)
        greedy = [alone]
        for n in range(len(self.ops) - 2, -1, -1):
            if greedy[-1].bit_count() < self.limit and self._fits(n, greedy[-1]):
                greedy.append(greedy[-1] | 1 << n)
        weighed: dict[int, float] = {}

        def weigh(insides: Iterable[int]) -> tuple[float, int]:
            """The least total among these stages, and its stage; of equal ones the first."""
            best, least = math.inf, 0
            for inside in insides:
                if inside not in weighed and len(weighed) < self.most:
                    weighed[inside] = self.total(_members(inside))
                if weighed.get(inside, math.inf) < best:
                    best, least = weighed[inside], inside
            return best, least

        for start in (weigh(greedy), weigh([alone])):
            best, here = start
            while here:
                found, there = weigh(self._neighbours(here))
                best, here = (found, there) if found < best else (best, 0)
        return list(weighed)

    def _neighbours(self, inside: int) -> Iterator[int]:
        """The stages that are one step away, those that differ nearest to the sink first.

        A step takes in one operator with its readers, alone or with its own stage, or it leaves out
        one operator with everything that it reads.
        """
        for n in range(len(self.ops) - 2, -1, -1):
            change = 1 << n
            if inside >> n & 1:
                for m in range(n - 1, -1, -1):
                    if inside >> m & 1 and self.users[m] & change:
                        change |= 1 << m
                yield inside & ~change
                continue
            for m in range(n, len(self.ops)):
                if change >> m & 1:
                    change |= self.users[m] & ~inside
            for grown in dict.fromkeys((inside | change | self.given[n], inside | change)):
                if grown.bit_count() <= self.limit and self._anchored(grown & self.anchors):
                    yield grown


def _members(inside: int) -> Members:
    return tuple(n for n in range(inside.bit_length()) if inside >> n & 1)
