"""The layout of constants, which is made at compile time for the kernels that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gtco.tensor.stage import Stage, TensorType


@dataclass(frozen=True)
class Packing:
    """The way a constant input is laid out before it is stored in the artifact.

    The array is viewed as ``shape``, transposed by ``axes``, zero-padded at the end of each axis by
    ``pad``, viewed as ``split`` and transposed by ``order``. If ``then`` is given, the result is
    packed once more by it. If ``both`` is given, the last two axes are first multiplied by this
    matrix from both sides, w -> both w both^T, in float64 and rounded once. If ``quarters`` is
    given, the array is a matrix, and becomes sums of its four quarters (upper left, upper right,
    lower left, lower right): one for each row of factors, as a new first axis. With ``pairs``, two
    neighbours of 4 bits along the last axis become a byte, whose low bits are the first. Every
    field is data, so a packing can go to other processes and to JSON.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    pad: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    then: Packing | None = None
    both: tuple[tuple[float, ...], ...] = ()
    quarters: tuple[tuple[int, ...], ...] = ()
    pairs: bool = False

    def apply(self, array: np.ndarray) -> np.ndarray:
        if self.both:
            matrix = np.array(self.both)
            array = (matrix @ array.astype(np.float64) @ matrix.T).astype(array.dtype)
        if self.quarters:
            array = _sums_of_quarters(array, self.quarters)
        view = array.reshape(self.shape).transpose(self.axes)
        if any(self.pad):
            view = np.pad(view, [(0, p) for p in self.pad])
        packed = np.ascontiguousarray(view.reshape(self.split).transpose(self.order))
        if self.pairs:
            bits = packed.astype(np.int8)
            packed = (bits[..., 1::2] << 4) | (bits[..., ::2] & 15)
        return self.then.apply(packed) if self.then else packed

    @property
    def packed_shape(self) -> tuple[int, ...]:
        if self.then:
            return self.then.packed_shape
        *rest, last = (self.split[i] for i in self.order)
        return (*rest, last // 2 if self.pairs else last)

    def packed_dtype(self, dtype: str) -> str:
        """The dtype of what :meth:`apply` makes of an array of ``dtype``."""
        if self.then:
            return self.then.packed_dtype(dtype)
        return "int8" if self.pairs else dtype


def _sums_of_quarters(array: np.ndarray, factors: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """[sums, rows / 2, columns / 2] of a matrix. Each is rounded once, if it has two quarters."""
    rows, columns = array.shape[-2:]
    halves = array.reshape(2, rows // 2, 2, columns // 2)
    quarters = [halves[i, :, j] for i in (0, 1) for j in (0, 1)]
    found = np.empty((len(factors), rows // 2, columns // 2), array.dtype)
    for made, row in zip(found, factors, strict=True):
        made[...] = signed_sum(row, quarters)
    return found


def signed_sum(factors: Sequence[int], terms: Sequence[Any]) -> Any:
    """The sum of the terms, which are added, subtracted or left out by factors of 1, -1 and 0. It
    begins with one that is added.
    """
    used = [(f, x) for f, x in zip(factors, terms, strict=True) if f]
    (_, total), *rest = sorted(used, key=lambda pair: -pair[0])
    for factor, x in rest:
        total = total + x if factor > 0 else total - x
    return total


def packed_types(stage: Stage, packings: Mapping[str, Packing]) -> dict[str, TensorType]:
    """The types of a stage's inputs that its kernel sees."""
    return {
        i.name: TensorType(packing.packed_shape, packing.packed_dtype(i.type.dtype))
        if (packing := packings.get(i.name)) is not None
        else i.type
        for i in stage.inputs
    }
