"""A library of products of any size (csrc/products/) as a Python object: numpy in and out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtco.support.errors import ArtifactError, ShapeError
from gtco.support.options import MOST_THREADS, check_whole

if TYPE_CHECKING:
    from typing_extensions import Self

ALIGNMENT = 64  # bytes, of packed weights and of large results
SMALL = 1 << 14  # bytes of a result that may lie anywhere
MOST = 512  # candidates of a product


class ConfigFields(ctypes.Structure):
    """gtco_product_config"""

    _fields_ = tuple((name, c_int64) for name in ("kernel", "chunks_m", "chunks_n", "kc", "held"))


class ProductConfig(NamedTuple):
    """How a product is run: the kernel's name and number, the chunks of rows and of columns, the
    block of k, and the row blocks that are worked on at once.
    """

    name: str
    kernel: int
    chunks_m: int
    chunks_n: int
    kc: int
    held: int


_CHOICE = POINTER(ConfigFields), POINTER(c_double)
_SIZES = c_int64, c_int64, c_int64
_IMAGES = c_void_p, c_int64  # gtco_convolution, and the output's channels
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "products_open": (c_void_p, (c_int,)),
    "products_close": (None, (c_void_p,)),
    "products_packed_bytes": (c_int64, (c_int64, c_int64)),
    "products_pack": (c_int, (c_void_p, c_int64, c_int64, c_void_p)),
    "products_workspace_bytes": (c_int64, (c_void_p, *_SIZES)),
    "products_set": (c_int, (c_void_p, *_SIZES)),
    "products_set_config": (c_int, (c_void_p, *_SIZES, POINTER(ConfigFields))),
    "products_run": (c_int, (c_void_p,) * 4),
    "products_choose": (c_int, (c_void_p, *_SIZES, *_CHOICE)),
    "products_candidates": (c_int, (c_void_p, *_SIZES, c_int, *_CHOICE)),
    "products_kernel_name": (c_char_p, (c_int64,)),
    "products_error": (c_char_p, (c_void_p,)),
    "convolutions_packed_bytes": (c_int64, _IMAGES),
    "convolutions_pack": (c_int, (c_void_p, *_IMAGES, c_void_p)),
    "convolutions_set": (c_int, (c_void_p, *_IMAGES)),
    "convolutions_set_config": (c_int, (c_void_p, *_IMAGES, POINTER(ConfigFields))),
    "convolutions_choose": (c_int, (c_void_p, *_IMAGES, *_CHOICE)),
    "convolutions_candidates": (c_int, (c_void_p, *_IMAGES, c_int, *_CHOICE)),
}


@dataclass(frozen=True)
class PackedWeights:
    """B[k, n] in the library's panels, for products with any number of rows."""

    k: int
    n: int
    data: np.ndarray


def fields_of(config: ProductConfig) -> ConfigFields:
    """The config as C has it."""
    return ConfigFields(config.kernel, config.chunks_m, config.chunks_n, config.kc, config.held)


def aligned(nbytes: int) -> np.ndarray:
    """So many bytes of float32 at a multiple of :data:`ALIGNMENT`."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : nbytes + start].view(np.float32)


def written(out: np.ndarray | None, shape: tuple[int, ...], read: np.ndarray) -> np.ndarray:
    """The array for a result of this shape: ``out``, or a new one. Raises :class:`ShapeError` if
    ``out`` does not fit, is read-only, or may overlap what is ``read``.
    """
    if out is None:
        nbytes = 4 * prod(shape)
        # numpy's own large arrays begin 16 bytes behind a line, so that each vector is in two lines
        return aligned(nbytes).reshape(shape) if nbytes > SMALL else np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ShapeError(f"out must be a dense float32 array of shape {shape}")
    if not out.flags.writeable:
        raise ShapeError("out is read-only; give an array that can be written to")
    if np.may_share_memory(out, read):
        raise ShapeError("out overlaps an array that is read; give another one")
    return out


class OpenedKernels:
    """An open library and its threads: what :class:`Products` and
    :class:`gtco.runtime.convolutions.Convolutions` share. Calls must not overlap; open the library
    once for each thread that calls it.

    ``threads``: None means as many as the process has cores. Raises :class:`ArtifactError` if the
    file cannot be opened here.
    """

    def __init__(self, path: str | os.PathLike[str], threads: int | None = None) -> None:
        self._handle: int | None = None
        check_whole("threads", threads or 0, 0, MOST_THREADS)
        try:
            self._library = ctypes.CDLL(str(Path(path).absolute()))
            for name, (result, arguments) in PROTOTYPES.items():
                function = getattr(self._library, f"gtco_{name}")
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise ArtifactError(
                f"{path} cannot be opened as a library of products: {error}. Write it with "
                "gtco.driver.products.compile_products"
            ) from error
        self._handle = self._library.gtco_products_open(threads or 0)
        if not self._handle:
            raise ArtifactError(
                f"{path} was compiled for instructions that this CPU lacks, or there is no memory "
                "for its threads; compile it on this machine"
            )
        self._set: object = None  # the sizes of the next run
        self._names: list[str] = []
        while name := self._library.gtco_products_kernel_name(len(self._names)):
            self._names.append(name.decode())
        # What a choice is written to: making it anew would take longer than many a choice.
        self._config_fields, self._seconds = ConfigFields(), c_double()
        self._answer = byref(self._config_fields), byref(self._seconds)

    def close(self) -> None:
        """Ends the threads. The object cannot be called any more."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.gtco_products_close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def runner(self, a: np.ndarray, packed: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        """A call of the library on these arrays and nothing else, for timing. They fit the sizes
        that are set; ``packed`` is the data of packed weights.
        """
        run, handle = self._library.gtco_products_run, self._open
        places = a.ctypes.data, packed.ctypes.data, out.ctypes.data

        def call(held: tuple[np.ndarray, ...] = (a, packed, out)) -> None:
            """``held`` keeps the arrays alive, since C has their addresses alone."""
            if run(handle, *places):
                raise ArtifactError(self._error())

        return call

    def _use(self, kind: str, key: object, config: ProductConfig | None, *sizes: Any) -> None:
        """Sets the sizes of the next runs by the functions of a kind; ``key`` stands for them.
        Raises :class:`ShapeError` if there is no such product.
        """
        if config is None:
            answer = getattr(self._library, f"gtco_{kind}_set")(self._open, *sizes)
        else:
            chosen = byref(fields_of(config))
            answer = getattr(self._library, f"gtco_{kind}_set_config")(self._open, *sizes, chosen)
        self._set = None if answer else key
        if answer:
            raise ShapeError(self._error())

    def _listed(self, name: str, *sizes: Any) -> list[tuple[ProductConfig, float]] | None:
        """The candidates by a function of the library; None where there is no such product."""
        configs, seconds = (ConfigFields * MOST)(), (c_double * MOST)()
        count = getattr(self._library, name)(self._open, *sizes, MOST, configs, seconds)
        if count < 0:
            return None
        assert count <= MOST, f"{count} candidates"
        return [(self._config(configs[i]), seconds[i]) for i in range(count)]

    def _chosen(self, name: str, *sizes: Any) -> tuple[ProductConfig, float] | None:
        """The choice by a function of the library; None where there is no such product."""
        if getattr(self._library, name)(self._open, *sizes, *self._answer):
            return None
        return self._config(self._config_fields), self._seconds.value

    @property
    def _open(self) -> int:
        if not self._handle:
            raise ArtifactError("the library of products is closed")
        return self._handle

    def _error(self) -> str:
        return str(self._library.gtco_products_error(self._open).decode())

    def _config(self, c: ConfigFields) -> ProductConfig:
        kernel = c.kernel
        return ProductConfig(self._names[kernel], kernel, c.chunks_m, c.chunks_n, c.kc, c.held)


class Products(OpenedKernels):
    """An open library. C[m, n] = A[m, k] x B[k, n] in float32, for any sizes::

        products = Products("products.so")
        weights = products.pack(b)
        c = products(a, weights)
    """

    def pack(self, b: np.ndarray) -> PackedWeights:
        """B[k, n] packed once for all m. Raises :class:`ShapeError` unless it is a matrix of
        float32 that has elements.
        """
        _check("B", b)
        k, n = b.shape
        packed = aligned(self._library.gtco_products_packed_bytes(n, k))
        b = np.ascontiguousarray(b)
        self._library.gtco_products_pack(b.ctypes.data, n, k, packed.ctypes.data)
        return PackedWeights(k, n, packed)

    def set(self, m: int, n: int, k: int, config: ProductConfig | None = None) -> None:
        """The sizes of the next runs. ``config``: how they are run, instead of the config of least
        price. Raises :class:`ShapeError` for sizes or a config of which there is no product.
        """
        self._use("products", (m, n, k), config, m, n, k)

    def __call__(
        self, a: np.ndarray, weights: PackedWeights, out: np.ndarray | None = None
    ) -> np.ndarray:
        """A[m, k] x B. ``out`` is a float32 array [m, n] that is written. Raises
        :class:`ShapeError` if the arrays do not fit.
        """
        _check("A", a)
        a = np.ascontiguousarray(a)
        m, k = a.shape
        if k != weights.k:
            raise ShapeError(f"A has {k} columns, and B was packed with {weights.k} rows")
        out = written(out, (m, weights.n), a)
        if self._set != (m, weights.n, k):
            self.set(m, weights.n, k)
        self.runner(a, weights.data, out)()
        return out

    def choose(self, m: int, n: int, k: int) -> tuple[ProductConfig, float]:
        """The config of least price for these sizes, and its predicted seconds."""
        if (found := self._chosen("gtco_products_choose", m, n, k)) is None:
            raise ShapeError(f"there is no product of m={m}, n={n}, k={k}")
        return found

    def candidates(self, m: int, n: int, k: int) -> list[tuple[ProductConfig, float]]:
        """The configs among which :meth:`choose` chooses, with their predicted seconds."""
        if (found := self._listed("gtco_products_candidates", m, n, k)) is None:
            raise ShapeError(f"there is no product of m={m}, n={n}, k={k}")
        return found

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """Bytes of scratch that a product of these sizes takes, on all threads."""
        found = int(self._library.gtco_products_workspace_bytes(self._open, m, n, k))
        if found < 0:
            raise ShapeError(self._error())
        return found


def _check(name: str, array: np.ndarray) -> None:
    if array.ndim != 2 or array.dtype != np.float32 or array.size == 0:
        raise ShapeError(
            f"{name} is {array.dtype}{list(array.shape)}; a product needs a float32 matrix of at "
            "least one row and one column"
        )
