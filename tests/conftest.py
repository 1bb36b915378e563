"""Fixtures and the import path, shared by all tests. The tests run from a checkout, without
installing.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings

from tests.garbage import seldom_collected

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Tests are about compiling, and many change the compiler: only those of the cache use it.
os.environ["GTCO_CACHE_GB"] = "0"

# A thread of OpenBLAS or OpenMP spins for a tenth of a second behind a product, on the core of
# another test process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of tests start gtco as a process, which should not compile gtco's own source each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell's background jobs start with Ctrl-C ignored, and so would processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # nothing that is imported or collected is garbage: see seldom_collected

# No test depends on a quick machine: an example may take any time.
settings.register_profile("gtco", deadline=None)
settings.load_profile("gtco")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


def pytest_collection_finish() -> None:
    seldom_collected()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Compiles of this process share their workers, onnxsim's process and what torch's exporter
    knows, and measure the machine even if it is busy. This does not hold for the test that first
    imports the compiler or torch's exporter inside itself, so that tests without them need not wait
    for them.
    """
    if compiler := sys.modules.get("gtco.compiler"):
        from gtco.codegen import processes
        from gtco.driver import making
        from gtco.search.calibration import measure
        from tests.one_set_of_workers import OneSetOfWorkers

        compiler.Workers = OneSetOfWorkers  # type: ignore[attr-defined]
        making.Workers = OneSetOfWorkers  # type: ignore[misc, assignment]
        processes.early = nullcontext  # a command would start a server that nobody asks
        measure.MOST_SECONDS = 600.0
    if simplify := sys.modules.get("gtco.frontend.simplify"):
        from tests.one_simplifier import OneSimplifier

        simplify.subprocess = OneSimplifier  # type: ignore[attr-defined]
        simplify.one_process = nullcontext  # type: ignore[attr-defined]
    if registration := sys.modules.get("torch.onnx._internal.exporter._registration"):
        from tests.one_torchlib import gather_once

        gather_once(registration.ONNXRegistry)


def pytest_sessionfinish() -> None:
    for name in ("tests.one_set_of_workers", "tests.one_simplifier"):
        if shared := sys.modules.get(name):
            shared.end()
