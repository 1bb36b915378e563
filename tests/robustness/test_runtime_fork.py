"""A fork at any moment, whatever other threads do with models: the child can use the models that it
inherited, and open its own. A child that hangs is killed after a while, and the test fails.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.module import Model, load
from gtco.support.errors import ArtifactError
from tests.runtime.test_models import SLEEPER, check, example_inputs, kernels, small, some_tasks
from tests.runtime.test_module import REPOSITORY

PATIENCE = 120.0  # seconds until a child counts as hanging


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one step with 8 tasks of 20 ms each, which need no CPU."""
    return some_tasks(SLEEPER, tmp_path_factory.mktemp("slow"))


def in_child(work: Callable[[], None]) -> None:
    """Does the work in a fork of this process. The fork must end, without an exception."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child of a fork hangs")
        time.sleep(0.005)
    assert done[1] == 0


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Another thread repeats the work until the ``with`` ends."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures


@pytest.mark.parametrize("threads", [1, 2])
def test_while_another_thread_is_inside_the_model(slow: Path, small: Path, threads: int) -> None:
    x = np.arange(8, dtype=np.float32)

    def child() -> None:
        np.testing.assert_array_equal(model(x), x + 1)
        with load(slow, threads) as own:
            np.testing.assert_array_equal(own(x), x + 1)
        with load(small) as other:
            check(other(*example_inputs()), *example_inputs())
        model.close()

    with load(slow, threads) as model, meanwhile(lambda: model(x)):
        for pause in (0.0, 0.03, 0.05):
            time.sleep(pause)
            while not model._lock.locked():  # the thread is inside
                time.sleep(0)
            in_child(child)
    assert not model._close.alive


def test_while_other_threads_open_and_close_models(small: Path) -> None:
    def open_and_close() -> None:
        with load(small, 3) as model:
            check(model(*example_inputs()), *example_inputs())

    open_and_close()  # modules that Python imports at the first call have their own locks
    with meanwhile(open_and_close), meanwhile(open_and_close):
        for _ in range(10):
            in_child(open_and_close)


def test_children_of_children(small: Path) -> None:
    with load(small, 2) as model:

        def run(depth: int) -> None:
            check(model(*example_inputs(depth)), *example_inputs(depth))
            if depth:
                in_child(lambda: run(depth - 1))

        run(3)
        check(model(*example_inputs()), *example_inputs())


CLOSED = """
import os, sys
from gtco.runtime.module import load
models = [load(sys.argv[1], 1) for _ in range(3)]
for number in map(int, sys.argv[2:]):
    models[number].close()
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (2, 0)], ids=str)
def test_models_that_were_closed_before(small: Path, closed: tuple[int, ...]) -> None:
    """A fork visits the models that are open. Freed memory is filled, so that a closed one would
    not be taken for one.
    """
    command = [sys.executable, "-c", CLOSED, str(small), *map(str, closed)]
    env = {**os.environ, "MALLOC_PERTURB_": "165"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_closed_model_stays_closed_in_the_child(small: Path) -> None:
    model: Model = load(small)
    model.close()

    def child() -> None:
        with pytest.raises(ArtifactError, match="is closed"):
            model(*example_inputs())

    in_child(child)
