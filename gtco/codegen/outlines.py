"""Kernels without their numbers, and which of these become arguments
(:mod:`gtco.codegen.generalize`). This module does not import TVM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIMIT = 2**31  # of int32


@dataclass(frozen=True)
class Outline:
    """A kernel without its numbers, and these numbers.

    - ``key``: two kernels have the same key if they differ in their numbers alone
    - ``numbers``: in the order in which the walk meets them; of a float32 the bits
    """

    key: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Arguments:
    """Which numbers of an outline become arguments.

    - ``columns``: by the place of a number, the argument's place in the array
    - ``least``: of each argument, the smallest value, as far as it is known (1, 0 or -1)
    - ``dtype``: of the array
    """

    columns: Mapping[int, int]
    least: tuple[int, ...]
    dtype: str

    def values(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The arguments of the kernel with these numbers."""
        found = [0] * len(self.least)
        for place, column in self.columns.items():
            found[column] = numbers[place]
        return tuple(found)


def arguments(outlines: Sequence[Outline]) -> Arguments:
    """The arguments of one kernel for all of these, which have one key."""
    columns: dict[int, int] = {}
    rows: dict[tuple[int, ...], int] = {}  # the numbers of an argument, one for each kernel
    for place, row in enumerate(zip(*(each.numbers for each in outlines), strict=True)):
        if len(set(row)) > 1:
            columns[place] = rows.setdefault(row, len(rows))
    least = tuple(max(-1, min(1, *row)) for row in rows)
    narrow = all(-LIMIT <= n < LIMIT for row in rows for n in row)
    return Arguments(columns, least, "int32" if narrow else "int64")
