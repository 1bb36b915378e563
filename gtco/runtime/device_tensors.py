"""Tensors on a GPU, in and out without a copy: anything with DLPack, on the caller's stream."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

from gtco.errors import InputError
from gtco.runtime.plan import TensorSpec

CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}  # DLDataTypeCode; 6 is bool
_LEGACY_STREAM = 1  # DLPack's number of the legacy default stream, which is 0 elsewhere


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c_void_p, (ctypes.py_object, ctypes.c_char_p)


def device_of(value: Any) -> int | None:
    """Number of the GPU that a tensor lies on; None for all else."""
    ask = getattr(value, "__dlpack_device__", None)
    if ask is None:
        return None
    kind, ordinal = ask()
    return int(ordinal) if int(kind) in (CUDA, CUDA_MANAGED) else None


class Borrowed:
    """The memory of a device tensor that fits ``spec``; it is held for as long as this is.

    ``role``: "input" or "output". The tensor's owner makes what it has under way on its own stream
    come before what is put into ``stream`` from now on. Raises :class:`InputError` where it is on
    another device, not dense, or of another dtype or shape.
    """

    def __init__(self, role: str, spec: TensorSpec, value: Any, ordinal: int, stream: int) -> None:
        what = f"{role} '{spec.name}'"
        where = device_of(value)
        if where != ordinal:
            place = "not on a GPU" if where is None else f"on cuda:{where}"
            raise InputError(
                f"{what} is {place}, and this model runs on cuda:{ordinal}; copy it there, such as "
                f"x.to('cuda:{ordinal}'), or open the model with gtco.load(path, device=...)"
            )
        try:
            with _current_device(value):
                self._capsule = value.__dlpack__(stream=stream or _LEGACY_STREAM)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            needs = getattr(value, "requires_grad", False)
            fix = "; use x.detach()" if needs else ""
            raise InputError(f"{what} cannot be read: {error}{fix}") from error
        tensor = _DLTensor.from_address(_capsule_pointer(self._capsule, b"dltensor"))
        self.pointer = (tensor.data or 0) + tensor.byte_offset
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        dtype = "bool" if tensor.code == 6 else f"{_KINDS.get(tensor.code, '?')}{tensor.bits}"
        if dtype != spec.dtype or tensor.lanes != 1:
            raise InputError(
                f"{what} has dtype {dtype}, expected {spec.dtype}; convert it, with torch by "
                f"x.to(torch.{spec.dtype})"
            )
        if shape != spec.shape:
            raise InputError(
                f"{what} has shape {shape}, expected {spec.shape}; this model was compiled for "
                "that shape alone: resize or batch it accordingly, or compile the model for yours"
            )
        if tensor.strides:
            strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
            if not _dense(shape, strides):
                raise InputError(
                    f"{what} is not dense and row-major (strides {strides}, in elements, of the "
                    f"shape {shape}); use x.contiguous()"
                )


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def stream_handle(stream: Any, values: Sequence[Any]) -> int:
    """The driver's handle of ``stream``: a number, a stream of torch or cupy, or anything with
    ``__cuda_stream__``. None is torch's current stream where a value is torch's, else the legacy
    default stream (0).
    """
    if stream is None:
        torch = _torch(values)
        if torch is None:
            return 0
        on = next(v for v in values if _is_torch(v) and device_of(v) is not None)
        stream = torch.cuda.current_stream(on.device)
    if isinstance(stream, int):
        if stream < 0:
            raise InputError(
                f"stream is {stream}; give the number of a CUstream, 0 for the legacy default one"
            )
        return 0 if stream == _LEGACY_STREAM else stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise InputError(
        f"stream is a {type(stream).__name__}; give a torch.cuda.Stream, an object with "
        "__cuda_stream__, or the number of a CUstream"
    )


def empty_outputs(
    specs: Sequence[TensorSpec], values: Sequence[Any], ordinal: int, stream: int
) -> list[Any]:
    """New tensors for the outputs, of torch, as memory of that stream. Raises :class:`InputError`
    where the inputs are of another library.
    """
    torch = _torch(values)
    if torch is None:
        raise InputError(
            f"the inputs are of {type(values[0]).__module__}, and gtco makes outputs for torch "
            "alone: pass tensors of your own in out=, one or a sequence of "
            f"{', '.join(map(str, specs))}"
        )
    device = torch.device("cuda", ordinal)
    current = torch.cuda.current_stream(device).cuda_stream == stream
    inside: AbstractContextManager[Any] = (
        nullcontext()
        if current
        else torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))
    )
    with inside:
        return [
            torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in specs
        ]


def held_for(values: Sequence[Any], ordinal: int, stream: int) -> list[Any]:
    """Those of ``values`` that have to be held until what ``stream`` has been given is over, lest
    their memory be given out again before: torch's allocator knows how to wait, and is told.
    """
    torch = _torch(values)
    if torch is not None:
        device = torch.device("cuda", ordinal)
        if torch.cuda.current_stream(device).cuda_stream != stream:
            external = torch.cuda.ExternalStream(stream, device=device)
            for value in filter(_is_torch, values):
                value.record_stream(external)
    return [value for value in values if not _is_torch(value)]


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _torch(values: Sequence[Any]) -> Any:
    """torch, where a value is its tensor on a GPU; nothing is imported."""
    found = any(_is_torch(value) and device_of(value) is not None for value in values)
    return sys.modules.get("torch") if found else None


def _current_device(value: Any) -> AbstractContextManager[Any]:
    """Makes a torch tensor's device torch's current one: tensors of others it does not export."""
    torch = _torch([value])
    if torch is None:
        return nullcontext()
    inside: AbstractContextManager[Any] = torch.cuda.device(value.device)
    return inside
