"""Tensors on a GPU without copies: anything with DLPack, on the caller's stream."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

from gtco.runtime.plan import TensorSpec
from gtco.support.errors import InputError

CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
_NO_STREAM = -1  # the owner of a tensor makes nothing wait
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
    """The number of the GPU that a tensor is on; None for any other value."""
    if is_torch(value):
        return int(value.get_device()) if value.is_cuda else None
    ask = getattr(value, "__dlpack_device__", None)
    if ask is None:
        return None
    kind, ordinal = ask()
    return int(ordinal) if int(kind) in (CUDA, CUDA_MANAGED) else None


def shape_on_device(value: Any) -> tuple[int, ...]:
    """The shape of a tensor on a GPU as DLPack says it, for one that says nothing else of it."""
    capsule = value.__dlpack__(stream=_NO_STREAM)
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    return tuple(tensor.shape[axis] for axis in range(tensor.ndim))


class Borrowed:
    """The memory of a device tensor that fits ``spec``. The memory is held for as long as this
    object lives.

    ``role``: "input" or "output". The tensor's owner makes ``stream`` wait for the work that it has
    under way on its own stream. Raises :class:`InputError` if the tensor is on another device, is
    not dense, or has another dtype or shape.
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


def stream_handle(stream: Any) -> int:
    """The driver's handle of ``stream``, which is a number, a stream of torch or cupy, or any
    object with ``__cuda_stream__``.
    """
    if isinstance(stream, int):
        if stream < 0:
            raise InputError(
                f"stream is {stream}; give the number of a CUstream, 0 for the legacy default one"
            )
        return 0 if stream == _LEGACY_STREAM else stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return stream_handle(int((protocol() if callable(protocol) else protocol)[1]))
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return stream_handle(handle)
    raise InputError(
        f"stream is a {type(stream).__name__}; give a torch.cuda.Stream, an object with "
        "__cuda_stream__, or the number of a CUstream"
    )


class Caller:
    """The caller of a model on tensors of the GPU ``ordinal``, with the stream that the run is put
    into.

    ``stream`` is what :func:`stream_handle` takes. None means torch's current stream if a value is
    torch's, else the legacy default stream (0).
    """

    def __init__(self, values: Sequence[Any], ordinal: int, stream: Any) -> None:
        self.ordinal = ordinal
        self._given = values[0]
        self._torch = _torch(values)
        current = self._torch.cuda.current_stream(ordinal).cuda_stream if self._torch else 0
        self.stream: int = current if stream is None else stream_handle(stream)
        # True if torch keeps the memory of its tensors until the stream is done with it.
        self._at_home = self._torch is not None and self.stream == current

    def borrow(self, role: str, spec: TensorSpec, value: Any) -> tuple[int, Any]:
        """The pointer to a tensor that fits ``spec``, and the object that holds its memory. Raises
        as :class:`Borrowed` does.
        """
        if self._at_home and type(value) is self._torch.Tensor and self._fits(spec, value):
            with suppress(RuntimeError):  # a wrapper of vmap's has no memory, as DLPack will say
                return int(value.data_ptr()), value
        borrowed = Borrowed(role, spec, value, self.ordinal, self.stream)
        return borrowed.pointer, borrowed

    def _fits(self, spec: TensorSpec, value: Any) -> bool:
        """True for a torch tensor that DLPack would accept and not wait for. Asking DLPack itself
        takes the host longer than a small model takes to start on a GPU.
        """
        return (
            device_of(value) == self.ordinal
            and value.dtype is getattr(self._torch, spec.dtype, None)
            and tuple(value.shape) == spec.shape
            and value.layout is self._torch.strided
            and value.is_contiguous()
            and not (value.requires_grad or value.is_neg())
        )

    def outputs(self, specs: Sequence[TensorSpec]) -> list[Any]:
        """New tensors of torch, allocated as memory of the stream. Raises :class:`InputError` if
        the inputs are of another library.
        """
        torch = self._torch
        if torch is None:
            raise InputError(
                f"the inputs are of {type(self._given).__module__}, and gtco makes outputs for "
                "torch alone: pass tensors of your own in out=, one or a sequence of "
                f"{', '.join(map(str, specs))}"
            )
        device = torch.device("cuda", self.ordinal)
        inside: AbstractContextManager[Any] = (
            nullcontext() if self._at_home else torch.cuda.stream(self._external())
        )
        with inside:
            return [
                torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
                for spec in specs
            ]

    def held(self, values: Sequence[Any]) -> list[Any]:
        """Those of ``values`` that must be held until the work in the stream is over, so that
        nobody else gets their memory before. torch's tensors are not among them: its allocator is
        told to wait.
        """
        if self._torch is not None and not self._at_home:
            external = self._external()
            for value in filter(is_torch, values):
                value.record_stream(external)
        return [value for value in values if not is_torch(value)]

    def _external(self) -> Any:
        device = self._torch.device("cuda", self.ordinal)
        if not self.stream:  # torch takes 0 for none, and gives a stream of its own
            return self._torch.cuda.default_stream(device)
        return self._torch.cuda.ExternalStream(self.stream, device=device)


def is_torch(value: Any) -> bool:
    """True for torch's tensors, and for those of classes that others made of it. Imports nothing.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _torch(values: Sequence[Any]) -> Any:
    """torch, if a value is its tensor on a GPU, else None. Imports nothing."""
    found = any(is_torch(value) and device_of(value) is not None for value in values)
    return sys.modules.get("torch") if found else None


def _current_device(value: Any) -> AbstractContextManager[Any]:
    """Makes the device of a torch tensor torch's current one, because torch exports only tensors of
    its current device.
    """
    torch = _torch([value])
    if torch is None:
        return nullcontext()
    inside: AbstractContextManager[Any] = torch.cuda.device(value.device)
    return inside
