"""Tensors in the fake GPU's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.cuda.fake_driver import (
    FakeDriver,
)
from tests.runtime.test_models import COLUMNS, ROWS, check, example_inputs

Y, TOTAL = np.empty((ROWS, COLUMNS), np.float32), np.empty(COLUMNS, np.float32)


class Tensor:
    """An array in the fake GPU's memory that exports DLPack as frameworks do."""

    def __init__(self, driver: FakeDriver, array: np.ndarray, **how: Any) -> None:
        self.driver, self.array = driver, array
        self.ordinal, offset = how.get("ordinal", 0), how.get("offset", 0)
        self.strides: tuple[int, ...] | None = how.get("strides")
        self.pointer = driver.put(array, self.ordinal, offset)
        self.offset = how.get("byte_offset", 0)
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.ordinal)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.asked.append(stream)
        kinds = {"f": 2, "i": 0, "u": 1, "b": 6}
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        strides = (ctypes.c_int64 * self.array.ndim)(*(self.strides or ()))
        managed = (ctypes.c_uint64 * 16)()  # a DLManagedTensor
        managed[0] = self.pointer - self.offset
        managed[1] = 2 | self.ordinal << 32
        code = kinds[self.array.dtype.kind] | self.array.itemsize * 8 << 8 | 1 << 16
        managed[2] = self.array.ndim | code << 32
        managed[3] = ctypes.addressof(shape)
        managed[4] = ctypes.addressof(strides) if self.strides else 0
        managed[5] = self.offset
        self.alive = (shape, strides, managed)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(managed), b"dltensor", None)

    def numpy(self) -> np.ndarray:
        return self.driver.get(self.pointer, self.array)


def tensors(driver: FakeDriver, ordinal: int = 0, seed: int = 0) -> tuple[Any, ...]:
    """Inputs and outputs on the device, and the arrays of the inputs."""
    x, mask = example_inputs(seed)
    on = [Tensor(driver, array, ordinal=ordinal) for array in (x, mask, Y, TOTAL)]
    return (on[0], on[1]), (on[2], on[3]), (x, mask)


def check_replays(driver: FakeDriver, stream: Any, inputs: Any, outputs: Any) -> None:
    """Checks that a replay of what the stream captured reads its inputs anew."""
    for seed in (5, 6):
        arrays = example_inputs(seed)
        for tensor, array in zip(inputs, arrays, strict=True):
            driver.write(tensor.pointer, array.ctypes.data, array.nbytes)
        driver.replay(stream)
        driver.sync(stream, 0)
        check(tuple(t.numpy() for t in outputs), *arrays)
