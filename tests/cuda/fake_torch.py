"""A torch that has the fake driver's GPUs, with the functions that a model on them calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda.device_tensor import Tensor
from tests.cuda.fake_driver import FakeDriver


class FakeTorch(ModuleType):
    """A module for ``sys.modules``. ``streams`` and ``devices`` end with the current ones. ``made``
    has the stream and the device of each shape that was made, and ``used_on`` what the allocator
    was told.
    """

    float32, int8, strided = "float32", "int8", "strided"

    def __init__(self, driver: FakeDriver, stream: int) -> None:
        super().__init__("torch")
        self.driver = driver
        self.streams, self.devices = [stream], [0]
        self.made: dict[tuple[int, ...], Any] = {}
        self.used_on: list[Any] = []
        self.Tensor = type("TorchTensor", (_Tensor,), {"__module__": "torch", "torch": self})
        self.cuda = SimpleNamespace(
            current_stream=lambda ordinal: SimpleNamespace(cuda_stream=self.streams[-1]),
            ExternalStream=_external,
            default_stream=lambda device: 0,
            stream=lambda handle: _inside(self.streams, handle),
            device=lambda device: _inside(self.devices, device[1]),
        )

    def device(self, kind: str, ordinal: int) -> tuple[str, int]:
        return kind, ordinal

    def empty(self, shape: Any, dtype: Any, device: Any) -> Any:
        self.made[shape] = (self.streams[-1], device)
        return self.Tensor(self.driver, np.empty(shape, dtype), ordinal=device[1])


def _external(handle: int, device: Any) -> int:
    """torch takes 0 for "none given", and gives another stream."""
    assert handle
    return handle


@contextmanager
def _inside(stack: list[int], number: int) -> Iterator[None]:
    stack.append(number)
    yield
    stack.pop()


class _Tensor(Tensor):
    torch: FakeTorch
    is_cuda = memory = True
    requires_grad = False
    layout = "strided"

    @property
    def device(self) -> tuple[str, int]:
        return ("cuda", self.ordinal)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return sys.intern(self.array.dtype.name)

    def get_device(self) -> int:
        return self.ordinal

    def data_ptr(self) -> int:
        if not self.memory:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.pointer

    def is_contiguous(self) -> bool:
        return self.strides is None

    def is_neg(self) -> bool:
        return False

    def record_stream(self, stream: int) -> None:
        self.torch.used_on.append((self, stream))

    def __dlpack__(self, *, stream: Any = None) -> Any:
        made = super().__dlpack__(stream=stream)
        if self.torch.devices[-1] != self.ordinal:
            raise BufferError("Can't export tensors on a different CUDA device index.")
        if self.requires_grad or self.layout != "strided" or not self.memory:
            raise BufferError("Can't export such tensors")
        return made
