"""Every legal assignment of the loops of a contraction to the loops of a row (GTCO, Section V).

A row multiplies matrices: ``C[m, n] += A[m, k] * B[k, n]``. A loop of the contraction can become m
if it indexes only C and A, n if it indexes only C and B, and k if it indexes only A and B. A loop
that indexes all three stays outside of the row, and any other may. Several loops become one if they
are counted through one after the other.

The operands must be matrices, though. Two loops, one for an operand's rows and one for its columns,
span a matrix if each has an index of its own there. If one index is their sum, like ``p + r`` of a
convolution's input, they reach only a vector, which is read again and again. So the least mapping
is a pair of loops that spans a matrix. A mapping is a union of such pairs: every loop in it needs a
partner on the operand's other side. Of the seven loops of a 2-D convolution 35 mappings are legal,
as the paper says, of a 1-D one 6, of a 3-D one 180.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, product
from math import prod

Axis = frozenset[str]  # the loops that are added up in one index of a tensor
Index = tuple[Axis, ...]


def axis(*loops: str) -> Axis:
    return frozenset(loops)


@dataclass(frozen=True)
class LoopNest:
    """A contraction's loops with their extents, in order, and the indices of C, A and B in them."""

    extents: tuple[tuple[str, int], ...]
    c: Index
    a: Index
    b: Index

    @cached_property
    def loops(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.extents)

    def extent(self, loops: Iterable[str]) -> int:
        """The number of steps that these loops make together."""
        known = dict(self.extents)
        return prod(known[name] for name in loops)

    def shared(self, first: Index, second: Index, third: Index) -> tuple[str, ...]:
        """The loops that index the first two tensors and not the third."""
        return tuple(
            x for x in self.loops if _in(x, first) and _in(x, second) and not _in(x, third)
        )


@dataclass(frozen=True)
class Mapping:
    """The loops that become a row's m, n and k, each in the nest's order. The others stay
    outside.
    """

    m: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]

    @property
    def mapped(self) -> frozenset[str]:
        return frozenset((*self.m, *self.n, *self.k))


def _in(loop: str, index: Index) -> bool:
    return any(loop in part for part in index)


def spans(index: Index, x: str, y: str) -> bool:
    """True if two loops reach a matrix of the tensor: each of them has an index without the
    other.
    """
    return not any(x in part and y in part for part in index)


def legal(nest: LoopNest, mapping: Mapping) -> bool:
    """True if the mapping is a union of pairs that span matrices of all three operands, and if its
    groups are those that the row's loops stand for, none of them empty.
    """
    groups = (mapping.m, mapping.n, mapping.k)
    if not all(x and set(x) <= set(fit) for x, fit in zip(groups, _candidates(nest), strict=True)):
        return False
    sides = (
        (nest.a, mapping.m, mapping.k),
        (nest.b, mapping.k, mapping.n),
        (nest.c, mapping.m, mapping.n),
    )
    return all(
        all(_partner(index, x, right) for x in left)
        and all(_partner(index, y, left) for y in right)
        for index, left, right in sides
    )


def _candidates(nest: LoopNest) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The loops that may become m, n and k, by the operands that they index."""
    return (
        nest.shared(nest.c, nest.a, nest.b),
        nest.shared(nest.c, nest.b, nest.a),
        nest.shared(nest.a, nest.b, nest.c),
    )


@lru_cache(maxsize=256)
def mappings(nest: LoopNest) -> tuple[Mapping, ...]:
    """Every legal mapping, each once."""
    found = (Mapping(*groups) for groups in product(*map(_subsets, _candidates(nest))))
    return tuple(mapping for mapping in found if legal(nest, mapping))


def _subsets(loops: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The subsets that are not empty."""
    sizes = range(1, len(loops) + 1)
    return list(chain.from_iterable(combinations(loops, size) for size in sizes))


@lru_cache(maxsize=1024)
def widest(nest: LoopNest, outside: frozenset[str] = frozenset()) -> Mapping | None:
    """The legal mapping that contains all others, without the loops that must stay ``outside``;
    None if there is none. The union of two legal mappings is legal, so the widest is found by
    removing from all loops those without a partner.
    """
    m, n, k = (tuple(x for x in group if x not in outside) for group in _candidates(nest))
    while True:
        mapping = Mapping(m, n, k)
        if legal(nest, mapping):
            return mapping
        if not (m and n and k):
            return None
        m = tuple(x for x in m if _partner(nest.a, x, k) and _partner(nest.c, x, n))
        n = tuple(x for x in n if _partner(nest.b, x, k) and _partner(nest.c, x, m))
        k = tuple(x for x in k if _partner(nest.a, x, m) and _partner(nest.b, x, n))


def _partner(index: Index, x: str, others: tuple[str, ...]) -> bool:
    return any(spans(index, x, y) for y in others)
