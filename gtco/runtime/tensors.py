"""The way of a user's tensors to a kernel and back: numpy or anything with DLPack in, the same kind
out.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gtco.runtime.plan import ALIGNMENT, TensorSpec
from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import InputError


def aligned_empty(spec: TensorSpec) -> np.ndarray:
    """An uninitialized array of that shape and dtype whose data begins at a multiple of 64, so that
    no copy is made.
    """
    buffer = np.empty(spec.nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    data = buffer[start : start + spec.nbytes].view(numpy_dtype(spec.dtype))
    return data.reshape([int(d) for d in spec.shape])


def as_stored(value: Any) -> Any:
    """A torch tensor that stands for the negative of its memory (as the imaginary part of a
    conjugate does) as one that is its memory: DLPack knows nothing of that, and would give it
    with the wrong sign. Anything else as it is.
    """
    return value.resolve_neg() if _is_torch(value) and value.is_neg() else value


def to_numpy(spec: TensorSpec, value: Any) -> np.ndarray:
    """The value as a C-contiguous array of the input's dtype and shape; no copy where it already is
    one.

    Raises :class:`InputError`, which names the input, what was expected and what came.
    """
    if isinstance(value, np.generic):  # numpy's own form of a tensor without axes
        value = np.asarray(value)
    array = value if isinstance(value, np.ndarray) else _from_dlpack(spec, value)
    if str(array.dtype) != spec.dtype:
        raise InputError(
            f"input '{spec.name}' has dtype {array.dtype}, expected {spec.dtype}; convert it with "
            f'x.astype("{spec.dtype}")'
        )
    if array.shape != spec.shape:
        raise InputError(
            f"input '{spec.name}' has shape {array.shape}, expected {spec.shape}; this model was "
            "compiled for that shape alone: resize or batch the input accordingly, or compile it "
            "for yours"
        )
    return np.ascontiguousarray(array) if array.ndim else array


def _from_dlpack(spec: TensorSpec, value: Any) -> np.ndarray:
    if not hasattr(value, "__dlpack__"):
        raise InputError(
            f"input '{spec.name}' is a {type(value).__name__}, expected a numpy array or a tensor "
            f'with DLPack; make one with np.asarray(x, dtype="{spec.dtype}")'
        )
    if _is_torch(value) and str(value.dtype) != f"torch.{spec.dtype}":  # numpy may not know it
        raise InputError(
            f"input '{spec.name}' has dtype {str(value.dtype)[6:]}, expected {spec.dtype}; convert "
            f"it with x.to(torch.{spec.dtype})"
        )
    try:
        if spec.dtype == "bfloat16" and _is_torch(value) and not value.requires_grad:
            torch = sys.modules["torch"]
            if value.dtype == torch.bfloat16:  # which numpy's DLPack does not know
                return np.from_dlpack(value.view(torch.int16)).view(numpy_dtype("bfloat16"))
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        fix = (
            "use x.detach()"
            if getattr(value, "requires_grad", False)
            else f"it must be a dense {spec.dtype} tensor on the CPU, such as x.cpu()"
        )
        raise InputError(
            f"input '{spec.name}' ({type(value).__module__}.{type(value).__name__}) cannot be "
            f"read: {error}; {fix}"
        ) from error


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def like(example: Any, array: np.ndarray) -> Any:
    """The array as a tensor of the library that the example comes from; no copy, and nothing is
    imported.
    """
    if isinstance(example, np.ndarray):
        return array
    module = sys.modules.get(type(example).__module__.partition(".")[0])
    if module is not None and module.__name__ == "torch":
        if array.dtype.name == "bfloat16":
            return module.from_numpy(array.view(np.int16)).view(module.bfloat16)
        return module.from_numpy(array)
    for owner in (module, getattr(module, "dlpack", None)):
        convert = getattr(owner, "from_dlpack", None)
        if convert is not None:
            return convert(array)
    return array
