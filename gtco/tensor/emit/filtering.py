"""The transforms of Winograd's minimal filtering F(m x m, r x r), as matrices and as code.

They follow Lavin and Gray 2016 (eq. 8), with the matrices that Cook and Toom's interpolation gives
for a set of points:  y = A^T [ (G w G^T) * (B^T x B) ] A, for a tile of m + r - 1 inputs along
either axis. The product in the middle is element by element. The points decide the cost and the
rounding. Tiles of six inputs have 0, +-3/4, +-3/2 and infinity. On random data the error of
F(4 x 4, 3 x 3) was measured at a third to a half of that with the usual 0, +-1, +-2. All its
coefficients are multiples of a power of two, so A and B hold them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple

from gtco.tensor.analysis.filtering import SIZES, TAPS
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.emit.vector_math import constant

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Transform:
    """F(size x size, taps x taps). The finite points are 0 and those of ``pairs`` with either sign;
    the last point is infinity. Positions of a tile are numbered row by row.
    """

    size: int
    pairs: tuple[Fraction, ...]
    taps: int = TAPS

    def __post_init__(self) -> None:
        assert self.width == 2 + 2 * len(self.pairs), "one point for each input"

    @property
    def width(self) -> int:
        """The inputs of a tile along an axis."""
        return self.size + self.taps - 1

    @property
    def positions(self) -> int:
        """The products of a tile for a channel."""
        return self.width**2

    @cached_property
    def points(self) -> tuple[Fraction, ...]:
        """The finite points."""
        return Fraction(0), *(s for p in self.pairs for s in (p, -p))

    @cached_property
    def inputs(self) -> Matrix:
        """B^T [width, width]. Row i holds the coefficients of the polynomial that is zero at all
        finite points but the i-th. The last row holds those of the polynomial that is zero at all
        of them.
        """
        return tuple(self._vanishing(skipped) for skipped in (*self.points, None))

    @cached_property
    def weights(self) -> Matrix:
        """G [width, taps]: powers of the points, divided by the values of the polynomials of B^T
        there.
        """
        rows = zip(self.powers, self.divisors, strict=True)
        return tuple(tuple(power / divisor for power in row) for row, divisor in rows)

    @cached_property
    def outputs(self) -> Matrix:
        """A^T [size, width]."""
        last = self.size - 1
        return tuple(
            (*(p**i for p in self.points), Fraction(int(i == last))) for i in range(self.size)
        )

    @cached_property
    def powers(self) -> Matrix:
        """The rows of G without the divisors: powers of the points, which float32 holds exactly."""
        rows = [tuple(p**k for k in range(self.taps)) for p in self.points]
        return (*rows, (*[Fraction(0)] * (self.taps - 1), Fraction(1)))

    @cached_property
    def divisors(self) -> tuple[Fraction, ...]:
        """What the rows of G are divided by."""
        return (
            *(prod((p - q for q in self.points if q != p), start=Fraction(1)) for p in self.points),
            Fraction(1),
        )

    @property
    def weight_matrix(self) -> tuple[tuple[float, ...], ...]:
        """G in double precision, for a packing."""
        return tuple(tuple(float(x) for x in row) for row in self.weights)

    def _vanishing(self, skipped: Fraction | None) -> tuple[Fraction, ...]:
        """Coefficients, lowest first, of the product of (x - p) over the other finite points."""
        found = [Fraction(1)]
        for p in self.points:
            if p != skipped:
                shifted, scaled = [Fraction(0), *found], [-p * x for x in found] + [Fraction(0)]
                found = [a + b for a, b in zip(shifted, scaled, strict=True)]
        return (*found, *[Fraction(0)] * (self.width - len(found)))

    # as code --------------------------------------------------------------------------------------
    def transformed(self, em: Emitter, x: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
        """B^T x B of a tile of inputs, [row][column]."""
        columns = [_transformed(em, self._inputs, column) for column in zip(*x, strict=True)]
        return [_transformed(em, self._inputs, row) for row in zip(*columns, strict=True)]

    def filtered(self, em: Emitter, w: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
        """G w G^T of the taps of a window, [row][column]. The divisors come last: sums of integers
        of 8 bits by powers of the points are exact in float32.
        """
        columns = [_transformed(em, self._powers, column) for column in zip(*w, strict=True)]
        rows = [_transformed(em, self._powers, row) for row in zip(*columns, strict=True)]
        return [
            [
                value * constant(value, float(1 / (a * b))) if a * b != 1 else value
                for value, b in zip(row, self.divisors, strict=True)
            ]
            for row, a in zip(rows, self.divisors, strict=True)
        ]

    def gathered(self, em: Emitter, m: Sequence[Sequence[Expr]]) -> list[list[Expr]]:
        """A^T m A of a tile of products, [row][column]."""
        columns = [self._gathered(em, column) for column in zip(*m, strict=True)]
        return [self._gathered(em, row) for row in zip(*columns, strict=True)]

    @cached_property
    def _inputs(self) -> Rows:
        return _rows(self.inputs)

    @cached_property
    def _powers(self) -> Rows:
        return _rows(self.powers)

    def _gathered(self, em: Emitter, m: Sequence[Expr]) -> list[Expr]:
        """A^T m. The two columns of a pair of points are equal or differ in sign, row by row."""
        folded: list[list[Expr]] = [[], []]
        for i in range(1, self.width - 1, 2):
            folded[0].append(em.let(m[i] + m[i + 1]))
            folded[1].append(em.let(m[i] - m[i + 1]))
        made = []
        for i, row in enumerate(self.outputs):
            taken = [float(x) for x in (row[0], *row[1:-1:2], row[-1])]
            made.append(_sum(em, taken, [m[0], *folded[i % 2], m[-1]]))
        return made


class Rows(NamedTuple):
    """The rows of B^T, or of the powers of the points, as code computes them. The two rows of a
    pair of points differ in the sign of every second coefficient: they are ``even`` plus and minus
    ``scale`` times ``odd``.
    """

    first: Sequence[float]
    pairs: Sequence[tuple[Sequence[float], float, Sequence[float]]]  # even, scale, odd
    last: Sequence[float]


def _rows(matrix: Matrix) -> Rows:
    pairs = []
    for one, other in zip(matrix[1:-1:2], matrix[2:-1:2], strict=True):
        even = [float((a + b) / 2) for a, b in zip(one, other, strict=True)]
        odd = [(a - b) / 2 for a, b in zip(one, other, strict=True)]
        scale = max(odd, key=abs)
        pairs.append((even, float(scale), [float(a / scale) for a in odd]))
    return Rows([*map(float, matrix[0])], pairs, [*map(float, matrix[-1])])


def _transformed(em: Emitter, rows: Rows, x: Sequence[Expr]) -> list[Expr]:
    """B^T x, or the powers of the points by x."""
    made = [_sum(em, rows.first, x)]
    for even, scale, odd in rows.pairs:
        common, different = _sum(em, even, x), _sum(em, odd, x)
        made += [em.let(_plus(common, factor, different)) for factor in (scale, -scale)]
    return [*made, _sum(em, rows.last, x)]


def _sum(em: Emitter, factors: Sequence[float], values: Sequence[Expr]) -> Expr:
    """The sum of products. Those with a factor of 1 come first, and each of the others is a
    multiply-add.
    """
    parts = [(f, x) for f, x in zip(factors, values, strict=True) if f]
    parts.sort(key=lambda part: part[0] != 1)
    (first, value), *rest = parts
    total = value if first == 1 else value * constant(value, first)
    for factor, x in rest:
        total = _plus(total, factor, x)
    return em.let(total)


def _plus(total: Expr, factor: float, x: Expr) -> Expr:
    if abs(factor) == 1:
        return total + x if factor > 0 else total - x
    return total + x * constant(x, factor)


TRANSFORMS: Mapping[int, Transform] = {
    2: Transform(2, (Fraction(1),)),
    4: Transform(4, (Fraction(3, 4), Fraction(3, 2))),
}
assert tuple(TRANSFORMS) == SIZES
