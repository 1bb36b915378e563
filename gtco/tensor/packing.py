"""How constants are laid out at compile time, as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gtco.tensor.stage import Stage, TensorType


@dataclass(frozen=True)
class Packing:
    """How a constant input is laid out before it is stored in the artifact.

    The array is viewed as ``shape``, transposed by ``axes``, zero-padded at the end of each axis by
    ``pad``, viewed as ``split`` and transposed by ``order``; then packed once more where ``then``
    says so. Before all that its last two axes are multiplied by the matrix ``both`` from both
    sides, w -> both w both^T, where there is one: in float64, and rounded once. Every field is
    data, so a packing crosses processes and goes to JSON.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    pad: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    then: Packing | None = None
    both: tuple[tuple[float, ...], ...] = ()

    def apply(self, array: np.ndarray) -> np.ndarray:
        if self.both:
            matrix = np.array(self.both)
            array = (matrix @ array.astype(np.float64) @ matrix.T).astype(array.dtype)
        view = array.reshape(self.shape).transpose(self.axes)
        if any(self.pad):
            view = np.pad(view, [(0, p) for p in self.pad])
        packed = np.ascontiguousarray(view.reshape(self.split).transpose(self.order))
        return self.then.apply(packed) if self.then else packed

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return self.then.packed_shape if self.then else tuple(self.split[i] for i in self.order)


def packed_types(stage: Stage, packings: Mapping[str, Packing]) -> dict[str, TensorType]:
    """Types of a stage's inputs as its kernel sees them."""
    return {
        i.name: TensorType(packings[i.name].packed_shape, i.type.dtype)
        if i.name in packings
        else i.type
        for i in stage.inputs
    }
