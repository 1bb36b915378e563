"""The variants of a library, by one of the ways to read its sizes (:mod:`gtco.driver.sizes.ways`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtco.driver.sizes import parts
from gtco.driver.sizes.ways import Dims
from gtco.support.sizes import (
    Range,
    by_other_sizes,
    fixed_sizes,
    names_of,
    names_of_dimensions,
    range_of,
    sizes_of_variants,
)

Sizes = Mapping[str, int]  # sizes of one variant, by the dimensions' names for readers


@dataclass(frozen=True)
class Plan:
    """What the variants of a library have. Without a range in parts there is one for each choice of
    sizes, and one alone for most models. With such a range they are its parts, those of one choice
    of the other sizes behind each other.

    - ``dims``: the sizes of each dimension, read in this way;
    - ``range``: the dimension whose range is made in parts, as the options name it, and its sizes;
    - ``sizes``: of each variant, or candidate for one.
    """

    dims: Dims
    range: tuple[str, Range] | None
    sizes: tuple[Sizes, ...]

    @staticmethod
    def of(dims: Dims, cores: int) -> Plan:
        """``cores``: of a run, on which it depends which parts are tried."""
        plan = Plan(dims, range_of(dims), tuple(sizes_of_variants(dims)))
        if plan.range is None:
            return plan
        tried = parts.candidates(plan.range[1], cores, len(plan.sizes))
        sizes = tuple({plan.symbol: n, **others} for others in plan.sizes for n in tried)
        return Plan(dims, plan.range, sizes)

    @property
    def several(self) -> bool:
        """False for a library that has its one variant as if there were no others."""
        return len(self.sizes) > 1 or self.range is not None

    @property
    def symbol(self) -> str:
        """The name of the dimension whose range is made in parts; empty without one."""
        if self.range is None:
            return ""
        key, sizes = self.range
        return sizes.symbol or names_of(key)[0]

    def places(self, sizes: Sizes) -> dict[str, int]:
        """All sizes of a variant, as the model's dimensions are named."""
        names = names_of_dimensions(self.dims)
        varying = {place: size for name, size in sizes.items() for place in names[name]}
        return {**fixed_sizes(self.dims), **varying}

    def choices(self) -> list[tuple[dict[str, int], list[int]]]:
        """The choices of the sizes beside the range, and the numbers of the parts at each."""
        return by_other_sizes(self.sizes, self.symbol)

    def samples(self, number: int) -> int:
        """The samples of a part."""
        return self.sizes[number][self.symbol]

    def kept_anyway(self, number: int) -> bool:
        """True for a part that the library gets whatever the others cost: the smallest of a range.
        """
        if self.range is None:
            return False
        return self.samples(number) == min(map(self.samples, range(len(self.sizes))))

    def cheapest(self, seconds: Mapping[int, float]) -> list[int]:
        """Those of the parts at one choice of the other sizes that the library gets, by the seconds
        of each.
        """
        assert self.range is not None
        prices = {self.samples(number): seconds[number] for number in seconds}
        chosen = parts.kept(self.range[1], prices)
        return [number for number in seconds if self.samples(number) in chosen]

    def only(self, numbers: Sequence[int]) -> Plan:
        """With these variants alone."""
        return Plan(self.dims, self.range, tuple(self.sizes[number] for number in numbers))

    def sums(self) -> list[Sizes]:
        """For each part the sizes at which it is compared: its own, and, instead of the largest's
        own, a sum of all parts.
        """
        assert self.range is not None
        every = [*self.range[1]]
        found: list[Sizes] = []
        for others, numbers in self.choices():
            own = [self.samples(number) for number in numbers]
            # a part that its own size does not run in is used by no size
            found += [{self.symbol: part, **others} for part in own[:-1]]
            least = sum(own) if len(own) > 1 else 3 * own[0]
            size = next((n for n in every if n >= least), every[-1])
            found.append({self.symbol: size, **others})
        return found
