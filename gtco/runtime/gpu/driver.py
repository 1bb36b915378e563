"""The GPUs of this machine, as the driver names them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from gtco.support.errors import ArtifactError

NO_DEVICE = 100  # CUresult
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # CUdevice_attribute, of a device's architecture


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it, ``NVIDIA H100 PCIe``, and its compute capability."""

    name: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.major}{self.minor})"


def open_driver() -> tuple[ctypes.CDLL, int]:
    """libcuda, initialised, and the number of GPUs that it finds. Raises ``OSError`` if there is no
    libcuda, and :class:`ArtifactError` if it does not start.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    status = driver.cuInit(0)
    if status == NO_DEVICE:
        return driver, 0
    status = status or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        raise ArtifactError(
            f"the NVIDIA driver does not start: {_error_name(driver, status)}; nvidia-smi and the "
            "system's log say why"
        )
    return driver, count.value


def _error_name(driver: ctypes.CDLL, status: int) -> str:
    """``CUDA_ERROR_SYSTEM_DRIVER_MISMATCH``; the number if the error has no name."""
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"its error {status}"


def gpu(index: int) -> Gpu:
    """The GPU with this number. Raises :class:`ArtifactError` if there is none."""
    try:
        driver, count = open_driver()
    except OSError as error:
        raise ArtifactError(f"there is no driver: {error}") from error
    if not 0 <= index < count:
        raise ArtifactError(f"there is no GPU {index}: the driver finds {count}")
    return described(driver, index)


def described(driver: ctypes.CDLL, index: int) -> Gpu:
    device, text = ctypes.c_int(), ctypes.create_string_buffer(128)
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceGetName(text, len(text), device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_MINOR, device)
    )
    if failed:
        raise ArtifactError(f"device {index} ({_error_name(driver, failed)})")
    return Gpu(text.value.decode(errors="replace"), major.value, minor.value)
