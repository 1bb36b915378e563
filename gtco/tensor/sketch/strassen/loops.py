"""The loops of a product by Strassen's algorithm; the picture is in
:mod:`gtco.tensor.sketch.strassen.cpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx

from gtco.tensor.emit.emitter import Expr
from gtco.tensor.nest.emission import At, NestLoops
from gtco.tensor.packing import signed_sum
from gtco.tensor.sketch.strassen.facts import OF_A, OF_C, PRODUCTS, StrassenFacts
from gtco.tensor.space import Config


class StrassenLoops(NestLoops):
    """The emitter of one config of one stage. Rows of its nest are pairs of rows of C."""

    def __init__(self, sketch: StrassenFacts, config: Config) -> None:
        self.sketch, self.depth = sketch, sketch.depth
        product, nest = sketch.product, sketch.nest(config)
        super().__init__(nest, sketch.stage, sketch.view, product.tail, product.stores_columns)

    # pairs ----------------------------------------------------------------------------------------
    def upper(self, pair: Expr) -> Expr:
        """The first row of a pair."""
        sketch = self.sketch
        if sketch.sample % 2 == 0 or sketch.rows == sketch.pairs:
            return 2 * pair
        return 2 * pair - pair // sketch.pairs  # samples end with a row that is alone

    def alone(self, pair: Expr) -> Expr:
        """True if the pair has one row. Only an odd number of rows has such pairs."""
        return pair % self.sketch.pairs == self.sketch.pairs - 1

    # A --------------------------------------------------------------------------------------------
    def feed(self, at: At) -> None:
        """rows[p, t, k] = the sums of A's quarters, of the part's pairs. A row that is alone is its
        own neighbour.
        """
        em, view, planes, depth = self.em, self.view, self.arrays["rows"], self.depth
        with em.loop(self.height_of(at), "t") as t:
            pair = em.let_index(at.row0 + t, "pair")
            upper = em.let_index(self.upper(pair), "upper")
            odd = self.sketch.sample % 2
            lower = tirx.Select(self.alone(pair), upper, upper + 1) if odd else upper + 1
            lower = em.let_index(lower, "lower")
            with em.loop(depth // em.lanes, "v") as v, em.vector(em.lanes) as lane:
                k = v * em.lanes + lane
                quarters = [
                    em.let(self.reader.value(view.op.inputs[0], view.a_index(0, m, k + half)), "a")
                    for m in (upper, lower)
                    for half in (0, depth)
                ]
                for p, factors in enumerate(OF_A):
                    value = signed_sum(factors, quarters)
                    em.store(planes, [p, t * self.nest.lda + k], value)

    # C --------------------------------------------------------------------------------------------
    def _block(self, at: At) -> None:
        """Before the last product of a block, its lines of C are prefetched."""
        if self.nest.prefetch != "none":
            here, height = self.block_of(at)
            with self.em.when(at.position == PRODUCTS - 1):
                for below in (0, 1):
                    for aside in (0, self.sketch.columns):
                        heights = self.shape.finished_heights
                        store = self.store(self._moved(at, below, aside), heights)
                        store.prefetch(at.whole_panel, here.start, height)
        super()._block(at)

    def _moved(self, at: At, below: int, aside: int) -> Callable[[Expr, Expr], list[Expr]]:
        """The output's index of an element of a quarter of C, by its pair and column."""
        index = self.index(at)
        return lambda pair, n: index(self.upper(pair) + below, n + aside)

    def finish_panel(self, at: At) -> None:
        """Adds the products of a block, and writes four elements of C for one of theirs."""
        em = self.em
        at, height = self.block_of(at)
        with em.loop(height, "t", rolled=not isinstance(height, int)) as t:
            pair = em.let_index(at.start + t, "pair")
            upper = em.let_index(self.upper(pair), "upper")
            both = partial(self._write, at, t, (upper, upper + 1))
            if self.sketch.sample % 2:
                em.branch(self.alone(pair), partial(self._write, at, t, (upper,)), both)
            else:
                both()

    def _write(self, at: At, t: Expr, rows: tuple[Expr, ...]) -> None:
        """The elements of ``rows`` of C in a panel's columns, of the pair ``t``."""
        em, products, lanes = self.em, self.arrays["sums"], self.row.lanes
        index, width = self.index(at), self.row.columns
        rows = tuple(em.let_index(m, "m") for m in rows)
        with em.loop(self.row.vectors, "v") as v, em.vector(lanes) as lane:
            place = em.let_index(t * width + v * lanes, "at")
            m = [em.let(em.load(products, [p, place + lane]), "p") for p in range(PRODUCTS)]
            for quarter, factors in enumerate(OF_C[: 2 * len(rows)]):
                row, aside = rows[quarter // 2], quarter % 2 * self.sketch.columns
                n = at.whole_panel * width + (aside + v * lanes) + lane
                value = signed_sum(factors, m)
                self.reader.finish(self.tail, index(row, n), value, self.args.output)
