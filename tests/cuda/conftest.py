"""The fake driver and the small GPU model, for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gtco.runtime.writing.linking import write_artifact
from tests.cuda.compiling import Compiling
from tests.cuda.fake_driver import KERNELS, FakeDriver, build, compile_kernels, small_gpu_artifact


@pytest.fixture(scope="session")
def _fake_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(build(tmp_path_factory.mktemp("driver")))


@pytest.fixture
def driver(_fake_driver: FakeDriver) -> Iterator[FakeDriver]:
    """Two fake GPUs of sm_80. At the end they must have been used correctly. Later tests of this
    process see no GPU.
    """
    _fake_driver.reset(2, 8, 0, 1)
    yield _fake_driver
    faults = _fake_driver.faults().decode()
    _fake_driver.reset(0, 8, 0, 1)
    assert faults == ""


@pytest.fixture(scope="session")
def gpu_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(KERNELS, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def small_gpu(gpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the small GPU model's library."""
    return write_artifact(
        small_gpu_artifact(gpu_kernels), tmp_path_factory.mktemp("small") / "small.so"
    )


@pytest.fixture(scope="session")
def compiling() -> Compiling:
    return Compiling()
