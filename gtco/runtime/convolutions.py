"""Convolutions of any size by a library of products (csrc/products/): numpy in and out."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gtco.runtime.products import OpenedKernels, ProductConfig, aligned, written
from gtco.support.errors import ShapeError


class _Fields(ctypes.Structure):
    """gtco_convolution"""

    _fields_ = tuple(
        (name, c_int64)
        for name in "batch height width channels kernel_h kernel_w stride padding".split()
    )


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution: its images [batch, height, width, channels], its window, and
    stride and padding (zeros on all four sides), which are the same along both axes.
    """

    batch: int
    height: int
    width: int
    channels: int
    kernel_h: int
    kernel_w: int
    stride: int = 1
    padding: int = 0

    @cached_property
    def fields(self) -> Any:
        """As C takes it."""
        return byref(
            _Fields(
                self.batch,
                self.height,
                self.width,
                self.channels,
                self.kernel_h,
                self.kernel_w,
                self.stride,
                self.padding,
            )
        )

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the output's images."""
        high, wide = (
            (size + 2 * self.padding - kernel) // self.stride + 1
            for size, kernel in ((self.height, self.kernel_h), (self.width, self.kernel_w))
        )
        return high, wide


@dataclass(frozen=True)
class PackedFilter:
    """A filter [kernel_h, kernel_w, channels, n] in the library's panels, for images of any size
    and padding.
    """

    shape: tuple[int, ...]
    stride: int
    data: np.ndarray


class Convolutions(OpenedKernels):
    """An open library, for convolutions of float32 images whose channels are innermost::

        convolutions = Convolutions("products.so")
        filter = convolutions.pack(w)              # [kernel_h, kernel_w, channels, n]
        y = convolutions(x, filter, padding=1)     # x: [batch, height, width, channels]

    With stride 1, windows of 3 x 3 and 5 x 5 may be computed by Winograd's minimal filtering, whose
    error is some ten times that of a sum of products.
    """

    def pack(self, w: np.ndarray, stride: int = 1) -> PackedFilter:
        """A filter packed once for all images. Raises :class:`ShapeError` unless it has four axes
        of float32 with elements.
        """
        _check("the filter", w)
        kernel_h, kernel_w, channels, n = w.shape
        # a filter does not depend on its images: these have one window
        sizes = byref(_Fields(1, kernel_h, kernel_w, channels, kernel_h, kernel_w, stride, 0))
        nbytes = self._library.gtco_convolutions_packed_bytes(sizes, n)
        if nbytes < 0:
            raise ShapeError(f"stride={stride}, and a stride is 1 or more")
        packed = aligned(nbytes)
        w = np.ascontiguousarray(w)
        self._library.gtco_convolutions_pack(w.ctypes.data, sizes, n, packed.ctypes.data)
        return PackedFilter(w.shape, stride, packed)

    def set(self, sizes: Convolution, n: int, config: ProductConfig | None = None) -> None:
        """The sizes of the next runs. ``config``: how they are run, instead of the config of least
        price. Raises :class:`ShapeError` for sizes or a config of which there is no convolution.
        """
        self._use("convolutions", (sizes, n), config, sizes.fields, n)

    def __call__(
        self,
        x: np.ndarray,
        weights: PackedFilter,
        *,
        padding: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The convolution of images. ``out`` is a float32 array [batch, out_h, out_w, n] that is
        written. Raises :class:`ShapeError` if the arrays do not fit.
        """
        _check("the images", x)
        kernel_h, kernel_w, channels, n = weights.shape
        if x.shape[3] != channels:
            raise ShapeError(
                f"the images have {x.shape[3]} channels, and the filter was packed with {channels}"
            )
        batch, height, width, _ = x.shape
        window = kernel_h, kernel_w, weights.stride, padding
        sizes = Convolution(batch, height, width, channels, *window)
        if self._set != (sizes, n):
            self.set(sizes, n)
        shape = (x.shape[0], *sizes.output, n)
        x = np.ascontiguousarray(x)
        out = written(out, shape, x)
        self.runner(x, weights.data, out)()
        return out

    def choose(self, sizes: Convolution, n: int) -> tuple[ProductConfig, float]:
        """The config of least price for these sizes, and its predicted seconds."""
        fields = sizes.fields
        if (found := self._chosen("gtco_convolutions_choose", fields, n)) is None:
            raise ShapeError(f"there is no convolution of {sizes} with {n} filters")
        return found

    def candidates(self, sizes: Convolution, n: int) -> list[tuple[ProductConfig, float]]:
        """The configs among which :meth:`choose` chooses, with their predicted seconds."""
        fields = sizes.fields
        if (found := self._listed("gtco_convolutions_candidates", fields, n)) is None:
            raise ShapeError(f"there is no convolution of {sizes} with {n} filters")
        return found


def _check(name: str, array: np.ndarray) -> None:
    if array.ndim != 4 or array.dtype != np.float32 or array.size == 0:
        raise ShapeError(
            f"{name}: {array.dtype}{list(array.shape)}; a convolution needs float32 of four axes, "
            "each with one element or more"
        )
