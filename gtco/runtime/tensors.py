"""Converts a user's tensors for the kernels and back: numpy or anything with DLPack in, the same
kind out.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from gtco.runtime.gpu.tensors import device_of, is_torch, shape_on_device
from gtco.runtime.plan import ALIGNMENT, TensorSpec
from gtco.support.dtypes import is_float, numpy_dtype
from gtco.support.errors import InputError

_address_of: Any = ctypes.addressof
_first_byte: Any = ctypes.c_char.from_buffer
_empty, _array, _bytes = np.empty, np.ndarray, np.dtype(np.uint8)


class Place:
    """An input or an output as a call sees it. Everything that is the same for all calls is
    computed here, once, because a small model runs for only a few microseconds.
    """

    __slots__ = ("_bytes", "dtype", "shape", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.dtype = numpy_dtype(spec.dtype)
        self.shape = tuple(int(size) for size in spec.shape)
        self._bytes = spec.nbytes + ALIGNMENT

    def fits(self, value: Any) -> bool:
        """True for an array that a kernel can read as it is."""
        return (
            type(value) is _array
            and value.dtype == self.dtype
            and value.shape == self.shape
            and value.flags.c_contiguous
        )

    def to_write(self, value: Any) -> np.ndarray:
        """A tensor of ``out=`` as an array that a run writes into. Raises :class:`InputError` if it
        has another dtype or shape, is not dense, or is read-only.
        """
        array = value if self.fits(value) else to_numpy(self.spec, value, "output")
        if not array.flags.c_contiguous:
            raise InputError(
                f"output '{self.spec.name}' is not dense and row-major (strides {array.strides}, "
                f"in bytes, of the shape {self.shape}); give a dense array and copy from it"
            )
        if not array.flags.writeable:
            raise InputError(
                f"output '{self.spec.name}' is read-only; give an array that can be written to"
            )
        return array

    def new(self) -> tuple[np.ndarray, int]:
        """An uninitialized array and the address of its data. The address is a multiple of 64, so
        that no copy is made.
        """
        buffer = _empty(self._bytes, _bytes)
        address = _address_of(_first_byte(buffer))
        start = -address % ALIGNMENT
        return _array(self.shape, self.dtype, buffer, start), address + start


def address_of(array: np.ndarray) -> int:
    """The address of the array's data."""
    try:
        address: int = _address_of(_first_byte(array))  # a third of the time of what follows
    except (TypeError, ValueError):  # read-only, empty, or of a dtype without a buffer
        address = array.ctypes.data
    return address


def aligned_empty(spec: TensorSpec) -> np.ndarray:
    """An uninitialized array of that shape and dtype whose data begins at a multiple of 64."""
    return Place(spec).new()[0]


def as_stored(value: Any) -> Any:
    """Resolves a torch tensor that represents the negative of its memory (as the imaginary part of
    a conjugate does): DLPack does not know this property and would give the wrong sign. Any other
    value is returned as it is.
    """
    return value.resolve_neg() if is_torch(value) and value.is_neg() else value


def shape_of(spec: TensorSpec, value: Any) -> tuple[int, ...]:
    """The shape of an input. Raises :class:`InputError` for a value that is not a tensor."""
    shape = getattr(value, "shape", None)
    if shape is None and device_of(value) is not None:
        return shape_on_device(value)
    if shape is None or not (hasattr(value, "__dlpack__") or isinstance(value, np.generic)):
        shape = _from_dlpack(spec, value, "input").shape
    return tuple(map(int, shape))


def to_numpy(spec: TensorSpec, value: Any, role: str = "input") -> np.ndarray:
    """The value as an array of the tensor's dtype and shape, on the same memory. ``role``: "input"
    or "output".

    Raises :class:`InputError`, which names the tensor, what was expected and what came.
    """
    if isinstance(value, np.generic) and role == "input":  # numpy's tensor without axes
        value = np.asarray(value)
    array = value if isinstance(value, np.ndarray) else _from_dlpack(spec, value, role)
    if str(array.dtype) != spec.dtype:
        raise InputError(
            f"{role} '{spec.name}' has dtype {array.dtype}, expected {spec.dtype}; "
            + (
                f'convert it with x.astype("{spec.dtype}")'
                if role == "input"
                else f'make it with np.empty({spec.shape}, "{spec.dtype}")'
            )
        )
    if array.shape != spec.shape:
        raise InputError(
            f"{role} '{spec.name}' has shape {array.shape}, expected {spec.shape}; "
            + (
                "this model accepts that shape alone: resize the input, or compile the model for "
                "your shape"
                if role == "input"
                else f'make it with np.empty({spec.shape}, "{spec.dtype}")'
            )
        )
    return array


def dense(array: np.ndarray) -> np.ndarray:
    """The array itself if it is row-major without gaps, else a copy that is."""
    return np.ascontiguousarray(array) if array.ndim else array


def random_inputs(specs: Sequence[TensorSpec], seed: int = 0) -> dict[str, np.ndarray]:
    """An array for each input, by name: normal floats, integers in [0, 4), booleans."""
    random = np.random.default_rng(seed)
    found = {}
    for spec in specs:
        dtype, shape = numpy_dtype(spec.dtype), [int(size) for size in spec.shape]
        values = (
            random.standard_normal(shape)
            if is_float(dtype)
            else random.integers(0, 2 if dtype.kind == "b" else 4, shape)
        )
        found[spec.name] = np.asarray(values).astype(dtype)
    return found


def _from_dlpack(spec: TensorSpec, value: Any, role: str) -> np.ndarray:
    if not hasattr(value, "__dlpack__"):
        raise InputError(
            f"{role} '{spec.name}' is a {type(value).__name__}, expected a numpy array or a tensor "
            f'with DLPack; make one with np.asarray(x, dtype="{spec.dtype}")'
        )
    if is_torch(value) and str(value.dtype) != f"torch.{spec.dtype}":  # numpy may not know it
        raise InputError(
            f"{role} '{spec.name}' has dtype {str(value.dtype)[6:]}, expected {spec.dtype}; "
            f"convert it with x.to(torch.{spec.dtype})"
        )
    try:
        if is_torch(value) and not value.requires_grad and value.device.type == "cpu":
            torch = sys.modules["torch"]
            if value.dtype == torch.bfloat16:  # numpy does not know bfloat16
                return value.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
            return value.numpy()  # numpy makes what it takes by DLPack read-only
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        fix = (
            "use x.detach()"
            if getattr(value, "requires_grad", False)
            else f"it must be a dense {spec.dtype} tensor on the CPU, such as x.cpu()"
        )
        raise InputError(
            f"{role} '{spec.name}' ({type(value).__module__}.{type(value).__name__}) cannot be "
            f"read: {error}; {fix}"
        ) from error


def like(example: Any, array: np.ndarray) -> Any:
    """The array as a tensor of the library that the example comes from; the array itself if that
    library does not take it by DLPack. Copies nothing and imports nothing.
    """
    if isinstance(example, np.ndarray):
        return array
    if is_torch(example):
        torch = sys.modules["torch"]
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    module = sys.modules.get(type(example).__module__.partition(".")[0])
    # the array API's way comes first: the class of jax's arrays is jaxlib's, which converts nothing
    space = getattr(example, "__array_namespace__", lambda: None)()
    for owner in (space, module, getattr(module, "dlpack", None)):
        convert = getattr(owner, "from_dlpack", None)
        if convert is not None:
            with suppress(BufferError):  # a dtype that numpy does not export, as bfloat16
                return convert(array)
    return array
