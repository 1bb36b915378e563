"""Arrays that are computed whenever they are read, so that memory holds what they are made of.

Weights that a file keeps in 8 bits or fewer are float32 while the model is rewritten. As arrays
they would take four or eight times the memory of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy


@dataclass(frozen=True, eq=False)
class Later:
    """An array that ``make`` computes, each time again. ``numpy.asarray`` gives it."""

    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    make: Callable[[], numpy.ndarray]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def array(self) -> numpy.ndarray:
        made = self.make()
        assert made.shape == self.shape and made.dtype == self.dtype
        return made

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        made = self.array()
        return made if dtype is None else made.astype(dtype, copy=False)


def cast(array: numpy.ndarray | Later, dtype: Any) -> Later:
    """The array in another dtype, computed whenever it is read."""
    return Later(array.shape, numpy.dtype(dtype), lambda: read(array).astype(dtype))


def read(array: numpy.ndarray | Later) -> numpy.ndarray:
    """The array's values now."""
    return array.array() if isinstance(array, Later) else array
