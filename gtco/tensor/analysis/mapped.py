"""A contraction under a mapping: the loops that become a row's m, n and k, and the loops outside.

Outside, loops of the output are batches. Loops that are added up are cuts of k: each step has its
own run of k, with its own padding. Every legal mapping has its product, and all products have the
same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from gtco.tensor.analysis.contraction import Contraction, ConvView
from gtco.tensor.analysis.indices import flatten, split_flat
from gtco.tensor.analysis.loop_nest import loop_nest
from gtco.tensor.analysis.mapping import LoopNest, Mapping, mappings, widest
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.packing import Packing

OTHER = "batch of B"  # loops that stay batches of the view: see contraction()


@dataclass(frozen=True)
class MappedProduct:
    """C[b, m, n] += A[b, m, k] * B[b, k, n] with ``outer`` runs of ``depth`` steps of k. k counts
    through all of them, 0 <= k < outer * depth.
    """

    view: Contraction
    mapping: Mapping

    @cached_property
    def nest(self) -> LoopNest:
        return _nest(self.view)

    @cached_property
    def _m_loops(self) -> tuple[str, ...]:
        """The loops of the view's m, in its order."""
        return _loops_of(self.view)[0]

    @cached_property
    def _k_loops(self) -> tuple[str, ...]:
        return _loops_of(self.view)[1]

    @cached_property
    def _m_outside(self) -> tuple[str, ...]:
        return tuple(x for x in self._m_loops if x not in self.mapping.m)

    @cached_property
    def _k_order(self) -> tuple[str, ...]:
        """The loops of k in the order in which this product counts through them: those outside
        first.
        """
        return (*(x for x in self._k_loops if x not in self.mapping.k), *self.inside)

    @cached_property
    def inside(self) -> tuple[str, ...]:
        """The loops of one run of k, in order."""
        return tuple(x for x in self._k_loops if x in self.mapping.k)

    def _sizes(self, loops: Sequence[str]) -> list[int]:
        return [self.nest.extent((x,)) for x in loops]

    @cached_property
    def batch(self) -> int:
        return self.view.batch * self.nest.extent(self._m_outside)

    @cached_property
    def m(self) -> int:
        return self.nest.extent(self.mapping.m)

    @property
    def n(self) -> int:
        return self.view.n

    @cached_property
    def depth(self) -> int:
        """The steps of one run of k."""
        return self.nest.extent(self.mapping.k)

    @cached_property
    def outer(self) -> int:
        """The number of runs of k."""
        return self.view.k // self.depth

    @property
    def k(self) -> int:
        return self.view.k

    @property
    def extents(self) -> tuple[int, int, int, int, int]:
        """batch, m, n, outer, depth."""
        return self.batch, self.m, self.n, self.outer, self.depth

    def waste(self, rows: tuple[int, int, int]) -> float:
        """The products that a row of these extents computes, divided by the products that are
        needed.
        """
        sizes = zip((self.m, self.n, self.depth), rows, strict=True)
        return prod(ceil(size / row) * row / size for size, row in sizes)

    # where elements are ---------------------------------------------------------------------------
    def parts(self, b: Expr, m: Expr) -> tuple[Expr, Expr]:
        """The view's batch and m."""
        if not self._m_outside:
            return b, m
        outside = self._m_outside
        batch, *others = split_flat(b, [self.view.batch, *self._sizes(outside)])
        inside = [x for x in self._m_loops if x in self.mapping.m]
        known = dict(zip(inside, split_flat(m, self._sizes(inside)), strict=True))
        known |= dict(zip(outside, others, strict=True))
        return batch, flatten([known[x] for x in self._m_loops], self._sizes(self._m_loops))

    def step(self, k: Expr) -> Expr:
        """The view's k."""
        if self._k_order == self._k_loops:
            return k
        order = self._k_order
        known = dict(zip(order, split_flat(k, self._sizes(order)), strict=True))
        return flatten([known[x] for x in self._k_loops], self._sizes(self._k_loops))

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        return self.view.c_index(*self.parts(b, m), n)

    def a_index(self, b: Expr, m: Expr, k: Expr) -> list[Expr]:
        return self.view.a_index(*self.parts(b, m), self.step(k))

    def b_index(self, b: Expr, k: Expr, n: Expr) -> list[Expr]:
        return self.view.b_index(self.parts(b, 0)[0], self.step(k), n)

    def packed_batch(self, b: Expr) -> Expr:
        """The batch of the packed B that a batch reads."""
        return self.view.packed_batch(self.parts(b, 0)[0])

    def source(self, b: Expr, m: Expr, k: Expr) -> tuple[Expr, Expr]:
        """For a convolution, the row and column of the input; under padding they may lie outside of
        it.
        """
        view = self.view
        assert isinstance(view, ConvView)
        batch, place = self.parts(b, m)
        kh, kw, _ = view.taps(self.step(k))
        return view.source(batch, view.pixel(place), kh, kw)

    def packing(self, columns: int, steps: int) -> Packing:
        """Constant B in tiles of ``columns`` by ``steps`` of k, with zeros at the ends:
        [batches, tiles of columns, runs and slices of k, columns, steps].
        """
        rows = self.view.row_packing()
        batches = prod(rows.packed_shape) // (self.n * self.k)
        tiles, slices = ceil(self.n / columns), ceil(self.depth / steps)
        pad = (0, tiles * columns - self.n, 0, slices * steps - self.depth)
        laid = Packing(
            (batches, self.n, self.outer, self.depth),
            (0, 1, 2, 3),
            pad,
            (batches, tiles, columns, self.outer, slices, steps),
            (0, 1, 3, 4, 2, 5),
        )
        if self._k_order != self._k_loops:
            sizes = self._sizes(self._k_loops)
            axes = (0, 1, *(2 + self._k_loops.index(x) for x in self._k_order))
            shape = (batches, self.n, *sizes)
            moved = tuple(shape[a] for a in axes)
            same = tuple(range(len(shape)))
            laid = Packing(shape, axes, (0,) * len(shape), moved, same, then=laid)
        return replace(rows, then=laid)


def _nest(view: Contraction) -> LoopNest:
    return loop_nest(view.op, view.a_shape, view.b_shape)


def _loops_of(view: Contraction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The loops of the view's m and k, in the orders in which it counts through them."""
    most = widest(_nest(view), _others(view))
    assert most is not None
    taps = tuple(x for x in most.k if x != "channel")
    if isinstance(view, ConvView) and view.channels_first:
        return most.m, ("channel", *taps)
    return most.m, most.k


def _others(view: Contraction) -> frozenset[str]:
    return frozenset(x for x in _nest(view).loops if x.startswith(OTHER))


def mapped_products(view: Contraction) -> list[MappedProduct]:
    """The product of every legal mapping, the widest first: step one of GTCO's hierarchical
    mapping, without any limit. Loops of one iteration are in the place that the widest mapping
    gives them, so mappings that differ only in those count as one.
    """
    nest = _nest(view)
    most = widest(nest, _others(view))
    assert most is not None
    single = {name for name, extent in nest.extents if extent == 1}
    kept = single & most.mapped
    found = [
        mapping
        for mapping in mappings(nest)
        if mapping.mapped <= most.mapped and kept <= mapping.mapped
    ]
    found.sort(key=lambda mapping: -len(mapping.mapped))
    return [MappedProduct(view, mapping) for mapping in found]
