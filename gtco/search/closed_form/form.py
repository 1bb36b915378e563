"""Polynomials that give each decision of a product from its sizes in constant time (DyGen, Fig. 3).

A decision's options have coordinates: the logarithm of a number, the logarithms of a micro-kernel's
rows and vectors, a place of its own for each word. A polynomial in log and linear sizes gives each
coordinate. Its terms are also the coordinates of the decisions before, so one choice fits the
other. The option that lies nearest is taken, as Fig. 3 does with ``min(candidates, key=...)``. The
candidates are the options that the space offers, so the result is always a config of the space.

What no polynomial of the sizes can know is arithmetic: how many lanes of the last panel are empty,
and whether tasks end together. Two rules filter the options first, as the paper's do:

- workload balance, in the place of thread occupancy (eq. 2): a number of chunks that leaves cores
  idle at the end is out (:func:`balanced`);
- throughput of the tile, in the place of operational intensity (eq. 5): a micro-kernel that is
  slower on this product's columns and rows is out (:func:`fast`).

Equations 3 and 4 need no rule here, because the space offers only micro-kernels that fit the
registers and blocks that fit the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

import numpy as np

from gtco.search.closed_form.products import Product, features
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.space import Config, Decision, Option, Sketch

FAST = 0.95  # share of the best micro-kernel's throughput that an option must have
BALANCED = 0.94  # share of the best balance that a number of chunks must have
OTHER = {"m": "n", "n": "m"}
LATER = (1, 2, 4)  # numbers of chunks for each core that the cut after this one may have


@dataclass(frozen=True)
class DecisionForm:
    """The polynomials of one decision.

    - ``weights``: [coordinates, terms], the terms as :meth:`ClassForm.choose` makes them;
    - ``words``: the words of a decision whose options are words, each with a coordinate;
    - ``axis``: the size that the decision cuts into chunks, "m" or "n"; empty for another.
    """

    name: str
    weights: np.ndarray
    words: tuple[str, ...] = ()
    axis: str = ""

    @property
    def coordinates(self) -> int:
        return len(self.weights)

    def place(self, option: Option, rows: int = 0, vectors: int = 0) -> tuple[float, ...]:
        """The coordinates of an option; a micro-kernel's are those of its rows and vectors."""
        if rows:
            return log2(rows), log2(vectors)
        if isinstance(option, str):
            return tuple(float(option == word) for word in self.words)
        return (log2(option),)


@dataclass(frozen=True)
class Machine:
    """What the rules ask of a machine: cores, the lanes of a vector, bytes a second that a core
    reads from DRAM while all cores do, and the rate of a micro-kernel in vector operations a
    second, by its name.
    """

    cores: int
    lanes: int
    bandwidth: float
    rate: Callable[[str], float]

    def demand(self, product: Product) -> float:
        """Vector operations a second that keep up with B's way from DRAM. B is read once, and each
        of its vectors is multiplied with all rows.
        """
        return product.m * self.bandwidth / (self.lanes * product.nbytes)


@dataclass(frozen=True)
class Cut:
    """The tile of a product and its pieces. ``height`` is that of the higher blocks of rows."""

    product: Product
    kernel: str
    height: int
    vectors: int
    columns: int

    @property
    def pieces(self) -> Mapping[str, int]:
        return {
            "m": ceil(self.product.m / self.height),
            "n": ceil(self.product.n / self.columns),
        }


def cut(product: Product, kernel: str, lanes: int) -> Cut:
    """The tile of a micro-kernel, named as in the table of rates ("fma:13x2"). Rows are cut into
    equal blocks, so 16 rows by at most 14 are two blocks of 8.
    """
    tile = MicroKernel.parse(kernel, lanes)
    height = ceil(product.m / ceil(product.m / tile.rows))
    if tile.kind.height > 1:  # whole blocks, but for the last one
        height = min(product.m, tile.rows)
    return Cut(product, tile.kernel_of(height), height, tile.vectors, tile.columns)


def fast(cuts: Sequence[Cut], useful: Sequence[float], machine: Machine) -> list[bool]:
    """Which micro-kernels are fast enough on this product (the counterpart of eq. 5). Where memory
    bounds the product, that is what keeps up with memory.
    """
    rates = [machine.rate(one.kernel) * share for one, share in zip(cuts, useful, strict=True)]
    least = min(FAST * max(rates), machine.demand(cuts[0].product))
    return [one >= least for one in rates]


def balanced(
    options: Sequence[int], pieces: int, tasks: int, cores: int, left: int = 1
) -> list[bool]:
    """Which numbers of chunks keep all cores busy (the counterpart of eq. 2). There are ``tasks``
    already, each of which is cut into chunks of ``pieces``. The core with the most chunks ends
    last. ``left`` pieces of the other size are still to be cut, as it is best for each number.
    """
    shares = []
    for chunks in options:
        own = ceil(pieces / chunks)
        best = 0.0
        for others in {min(left, n * cores) for n in LATER} | {1}:
            waves = ceil(tasks * chunks * others / cores)
            best = max(best, left / (waves * ceil(left / others)))
        shares.append(best / own)
    least = BALANCED * max(shares)
    return [share >= least for share in shares]


@dataclass(frozen=True)
class ClassForm:
    """The polynomials of one operator class, in the order of the sketch's decisions."""

    sketch: str
    decisions: tuple[DecisionForm, ...]

    @cached_property
    def by_name(self) -> Mapping[str, tuple[DecisionForm, int]]:
        """Each decision with the number of coordinates before its own."""
        found, begin = {}, 0
        for form in self.decisions:
            found[form.name] = form, begin
            begin += form.coordinates
        return found

    @cached_property
    def last_cut(self) -> str:
        """The name of the last decision that cuts something into chunks."""
        return next((f.name for f in reversed(self.decisions) if f.axis), "")

    def choose(self, product: Product, sketch: Sketch, machine: Machine) -> Config:
        """The config of a product. A decision that the file does not know, since it is younger,
        gets the option of configs that leave it unsaid, or its first one.
        """
        walk = Walk(self, product, machine)
        while decision := sketch.next_decision(walk.chosen):
            walk.take(decision, walk.wanted(decision))
        return Config(sketch.name, tuple(walk.chosen.items()))


class Walk:
    """The decisions of one product as they are made."""

    def __init__(self, form: ClassForm, product: Product, machine: Machine) -> None:
        self.form, self.product, self.machine = form, product, machine
        self.chosen: dict[str, Option] = {}
        first = features(product.sizes(machine.cores))
        self.begin = len(first)
        size = sum(one.coordinates for one in form.decisions)
        self.terms = np.array([*first, *[0.0] * size])
        self.tile: Cut | None = None
        self.tasks = product.batch

    def wanted(self, decision: Decision) -> Option:
        """The admitted option that lies nearest to the polynomials' point."""
        options = decision.options
        if len(options) == 1 or decision.name not in self.form.by_name:
            return options[0] if decision.unsaid is None else decision.unsaid
        admitted = self.admitted(decision)
        form, begin = self.form.by_name[decision.name]
        point = (form.weights @ self.terms[: self.begin + begin]).tolist()
        nearest, least = options[0], float("inf")
        for number, (option, good) in enumerate(zip(options, admitted, strict=True)):
            if good:
                place = self.place(decision, number)
                far = sum((a - b) ** 2 for a, b in zip(place, point, strict=True))
                if far < least:
                    nearest, least = option, far
        return nearest

    def admitted(self, decision: Decision) -> list[bool]:
        """Which options the rules leave."""
        if decision.kernels:
            cuts = [self.cut(kernel) for kernel, _ in decision.kernels]
            return fast(cuts, [useful for _, useful in decision.kernels], self.machine)
        form, _ = self.form.by_name[decision.name]
        if form.axis and self.tile is not None:
            pieces = self.tile.pieces
            left = 1 if decision.name == self.form.last_cut else pieces[OTHER[form.axis]]
            numbers = [int(option) for option in decision.options]
            return balanced(numbers, pieces[form.axis], self.tasks, self.machine.cores, left)
        return [True] * len(decision.options)

    def cut(self, kernel: str) -> Cut:
        return cut(self.product, kernel, self.machine.lanes)

    def place(self, decision: Decision, number: int) -> tuple[float, ...]:
        """The coordinates of an option of a decision that the file knows."""
        form, _ = self.form.by_name[decision.name]
        if decision.kernels:
            tile = self.cut(decision.kernels[number][0])
            return form.place(decision.options[number], tile.height, tile.vectors)
        return form.place(decision.options[number])

    def take(self, decision: Decision, option: Option) -> None:
        """Makes a decision, of which later ones depend."""
        self.chosen[decision.name] = option
        number = decision.options.index(option)
        if decision.kernels:
            self.tile = self.cut(decision.kernels[number][0])
        if decision.name not in self.form.by_name:
            return
        form, begin = self.form.by_name[decision.name]
        place = self.place(decision, number)
        self.terms[self.begin + begin : self.begin + begin + len(place)] = place
        if form.axis:
            self.tasks *= int(option)
