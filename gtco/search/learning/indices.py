"""Indices of TIR programs as affine functions of the loops around, and how often conditions on them
hold: by value at the middle of all ranges, which is exact where sketches write sums of products and
an average elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

# What is true or false, or one of two values.
CONDITIONS = (
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
    *(tirx.And, tirx.Or, tirx.Not),
)


@dataclass(frozen=True)
class Affine:
    """An integer at the middle of all loops, and what one step of each loop adds to it, by the
    number of the loop.
    """

    value: float = 0.0
    steps: Mapping[int, float] = field(default_factory=dict)

    def plus(self, other: Affine, sign: float = 1.0) -> Affine:
        if not other.steps:
            return Affine(self.value + sign * other.value, self.steps)
        steps = dict(self.steps)
        for loop, step in other.steps.items():
            steps[loop] = steps.get(loop, 0.0) + sign * step
        return Affine(self.value + sign * other.value, steps)

    def times(self, factor: float) -> Affine:
        return Affine(self.value * factor, {n: s * factor for n, s in self.steps.items()})


class Indices:
    """The integers of a program while it is read: what is known of its variables, by their hash.
    ``loaded`` is told of integers that are read from memory, whose values are not known.
    """

    def __init__(self, loaded: Callable[[Any], None]) -> None:
        self.loaded = loaded
        self.values: dict[int, Affine] = {}
        self.extents: dict[int, float] = {}  # extents of the loops, by their numbers
        self.asked: set[int] = set()  # variables that were read

    def enter(self, variable: Any, low: Affine, extent: float) -> int:
        """The number of a new loop of this variable."""
        number = len(self.extents) + 1
        self.extents[number] = extent
        self.values[hash(variable)] = low.plus(Affine((extent - 1) / 2, {number: 1.0}))
        return number

    def affine(self, node: Any) -> Affine:
        """The integer as an affine function of the loops around it. For an integer that is not
        affine, its value at the middle.
        """
        match node:
            case int() | float():
                return Affine(float(node))
            case tirx.IntImm():
                return Affine(float(node.value))
            case tirx.Var():
                self.asked.add(hash(node))
                return self.values.get(hash(node), _ZERO)
            case tirx.Cast() | tirx.Broadcast():
                return self.affine(node.value)
            case tirx.Ramp():
                return self.affine(node.base)
            case tirx.Add():
                return self.affine(node.a).plus(self.affine(node.b))
            case tirx.Sub():
                return self.affine(node.a).plus(self.affine(node.b), -1.0)
            case tirx.Mul():
                a, b = self.affine(node.a), self.affine(node.b)
                return a.times(b.value) if not b.steps else b.times(a.value)
            case tirx.FloorDiv() | tirx.Div():
                return self.affine(node.a).times(1.0 / (self.affine(node.b).value or 1.0))
            case tirx.FloorMod() | tirx.Mod():
                whole, period = self.affine(node.a), self.affine(node.b).value or 1.0
                steps = {n: s for n, s in whole.steps.items() if abs(s) < period}
                return Affine(min(whole.value, (period - 1) / 2), steps)
            case tirx.Min() | tirx.Max():
                a, b = self.affine(node.a), self.affine(node.b)
                return a if (a.value <= b.value) == isinstance(node, tirx.Min) else b
            case tirx.Select():
                share = self.share(node.condition)
                rest = self.affine(node.false_value).times(1 - share)
                return self.affine(node.true_value).times(share).plus(rest)
        if isinstance(node, CONDITIONS):
            return Affine(self.share(node))
        if hasattr(node, "source"):  # a table of indices
            self.loaded(node)
        return _ZERO

    def share(self, condition: Any) -> float:
        """How often the condition holds, of all iterations of the loops around."""
        match condition:
            case tirx.Not():
                return 1 - self.share(condition.a)
            case tirx.And():
                return self.share(condition.a) * self.share(condition.b)
            case tirx.Or():
                neither = (1 - self.share(condition.a)) * (1 - self.share(condition.b))
                return 1 - neither
            case tirx.GT() | tirx.GE():
                return self.below(condition.b, condition.a, isinstance(condition, tirx.GE))
            case tirx.LT() | tirx.LE():
                return self.below(condition.a, condition.b, isinstance(condition, tirx.LE))
            case tirx.EQ() | tirx.NE():
                low, high = self.range(condition.a, condition.b)
                equal = 1 / (high - low + 1) if low <= 0 <= high else 0.0
                return equal if isinstance(condition, tirx.EQ) else 1 - equal
        return 0.5

    def below(self, a: Any, b: Any, or_equal: bool) -> float:
        low, high = self.range(a, b)
        inside = (0.0 - low + or_equal) / (high - low + 1)
        return min(max(inside, 0.0), 1.0)

    def range(self, a: Any, b: Any) -> tuple[float, float]:
        """The least and the largest ``a - b``."""
        if not (is_integer(a) and is_integer(b)):
            return -1.0, 1.0
        apart = self.affine(a).plus(self.affine(b), -1.0)
        reach = sum(abs(s) * (self.extents[n] - 1) for n, s in apart.steps.items()) / 2
        return apart.value - max(reach, 0.0), apart.value + max(reach, 0.0)


_ZERO = Affine()


def is_integer(value: Any) -> bool:
    return isinstance(value, int) or str(value.ty).startswith(("int", "uint", "bool"))
