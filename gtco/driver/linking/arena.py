"""Where the tensors between stages lie in one arena: tensors of disjoint lifetimes share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gtco.runtime.plan import ALIGNMENT, round_up

Lifetime = tuple[int, int, int]  # bytes, first step, last step; both steps inclusive
Gap = tuple[int, int]  # the begin and the end of memory that is free at all steps of a lifetime
# Returns the offset of a tensor: its index, its bytes, the gaps that it fits in, and the bytes of
# the arena so far. The last gap has no end.
Choose = Callable[[int, int, Sequence[Gap], int], int]

ENDLESS = 1 << 62
GROWTH = 4 / 3  # the arena that keeps owners is at most so many times as large as the tightest one
KEPT = 0.3  # what a byte counts that stays with its thread, whose caches may still have it
PARTS = 8  # of a tensor that are told apart; threads side by side often share a cache
NEIGHBOURS = 32  # tensors nearest in time that a place is compared with


def plan_arena(lifetimes: Sequence[Lifetime], threads: int = 1) -> tuple[list[int], int]:
    """The offset of each tensor in the arena, and the arena's bytes.

    Greedy by size: the largest tensor first, each into a gap between the tensors placed before it
    that live at the same time (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
    Inference", 2020, Section 5.2). For one thread it is the smallest gap: best fit. Offsets and the
    total are multiples of 64; tensors that live at once never overlap.

    A thread of several has the same part of each step's tasks, so it writes the same part of each
    tensor. Where this part covers memory that was another thread's part of an earlier tensor, each
    line comes from the cache of another core first, which takes long if the cores share no cache.
    So a place is taken where parts meet those of the same thread.
    """
    tightest = _placed(lifetimes, lambda _, __, gaps, ___: _smallest(gaps))
    if threads == 1:
        return tightest
    most = GROWTH * tightest[1]
    for room in most, tightest[1]:
        kept = _placed(lifetimes, _Owners(lifetimes, min(threads, PARTS), room).choose)
        if kept[1] <= most:
            return kept
    return tightest


def _placed(lifetimes: Sequence[Lifetime], choose: Choose) -> tuple[list[int], int]:
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last; sorted by offset
    total = 0
    for index in sorted(
        range(len(lifetimes)), key=lambda i: (-lifetimes[i][0], lifetimes[i][1], i)
    ):
        nbytes, first, last = lifetimes[index]
        size = round_up(nbytes)
        if size == 0:
            continue
        gaps: list[Gap] = []
        end = 0
        for other_offset, other_end, other_first, other_last in placed:
            if other_last < first or last < other_first:
                continue
            if other_offset - end >= size:
                gaps.append((end, other_offset))
            end = max(end, other_end)
        gaps.append((end, ENDLESS))
        offset = offsets[index] = choose(index, size, gaps, total)
        placed.append((offset, offset + size, first, last))
        placed.sort()
        total = max(total, offset + size)
    return offsets, total


def _smallest(gaps: Sequence[Gap]) -> int:
    return min(gaps, key=lambda gap: gap[1] - gap[0])[0]


class _Owners:
    """Chooses the place where the fewest bytes change their owner, within ``room`` bytes if there
    is one.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], parts: int, room: float) -> None:
        self.size = np.array([round_up(nbytes) for nbytes, _, _ in lifetimes], np.int64)
        self.first = np.array([first for _, first, _ in lifetimes], np.int64)
        self.last = np.array([last for _, _, last in lifetimes], np.int64)
        self.offset = np.full(len(lifetimes), -1)  # -1: not placed yet
        self.room, self.cuts = room, np.arange(parts + 1) / parts

    def choose(self, index: int, size: int, gaps: Sequence[Gap], total: int) -> int:
        others, between = self.neighbours(index)
        begin, end = self.offset[others], self.offset[others] + self.size[others]
        places = {gap for gap, _ in gaps} | {last - size for _, last in gaps[:-1]}
        middle = ((begin + end) // 2 - size // 2) // ALIGNMENT * ALIGNMENT
        places.update(np.concatenate([begin, end - size, middle, begin - size, end]).tolist())
        fit = [
            at
            for at in sorted(places)
            if at + size <= max(total, self.room)
            and any(first <= at and at + size <= last for first, last in gaps)
        ]
        if fit:
            cost = self.handed(np.array(fit), size, begin, end) @ (1.0 / (1.0 + between))
            chosen = fit[int(np.argmin(cost))]
        else:
            chosen = _smallest(gaps)
        self.offset[index] = chosen
        return chosen

    def neighbours(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The placed tensors nearest in time that do not live at once with this one, and the steps
        between.
        """
        before, behind = self.first[index] - self.last, self.first - self.last[index]
        between = np.maximum(before, behind)
        others = np.flatnonzero((self.offset >= 0) & (between > 0))
        others = others[np.argsort(between[others], kind="stable")[:NEIGHBOURS]]
        return others, between[others]

    def handed(
        self, places: np.ndarray, size: int, begin: np.ndarray, end: np.ndarray
    ) -> np.ndarray:
        """The bytes of each place [p] that are another thread's part of each tensor [n], less a
        share of those that are the same thread's. -> [p, n]
        """
        shared = np.minimum(places[:, None] + size, end) - np.maximum(places[:, None], begin)
        ours = places[:, None, None] + size * self.cuts
        theirs = begin[:, None] + (end - begin)[:, None] * self.cuts
        low = np.maximum(ours[..., :-1], theirs[:, :-1])
        high = np.minimum(ours[..., 1:], theirs[:, 1:])
        same = np.maximum(0.0, high - low).sum(-1)
        return np.maximum(0, shared) - (1.0 + KEPT) * same
