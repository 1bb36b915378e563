"""Compiles in several threads of a process."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import helper

import gtco
from gtco.support.alone import alone
from gtco.support.quiet import quiet, quiet_code
from tests.few_nodes import by_onnxruntime, model, typed
from tests.kernels import fresh_seed


def test_threads_compile_one_after_the_other() -> None:
    rng = np.random.default_rng(fresh_seed())

    def difference(n: int) -> float:
        x = rng.standard_normal((4, 8 + n), dtype=np.float32)
        w = rng.standard_normal((8 + n, 16), dtype=np.float32)
        proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": x}, {"w": w})
        proto = typed(proto, by_onnxruntime(proto, {"x": x}))
        with gtco.compile_model(proto, cache=False) as compiled:
            return float(np.abs(compiled(x) - x @ w).max())

    with ThreadPoolExecutor(3) as pool:
        assert max(pool.map(difference, range(6))) < 1e-4


def test_another_thread_waits_and_the_same_does_not() -> None:
    order = []

    def second() -> None:
        with alone():
            order.append("second")

    with alone():
        other = threading.Thread(target=second)
        other.start()
        with alone():
            other.join(0.2)
            order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_what_another_thread_prints_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """While torch and TVM are kept quiet: by print, by a log record, and straight to the file."""
    begun, printed = threading.Event(), threading.Event()
    log = logging.getLogger("tests.of.another.thread")
    handler = logging.StreamHandler()
    log.addHandler(handler)

    def other() -> None:
        begun.wait(10)
        print("by print")
        log.warning("by a log record")
        os.write(2, b"to the file\n")
        printed.set()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        with quiet(), quiet_code("a mark"):
            begun.set()
            assert printed.wait(10)
            print("hidden")
            log.warning("hidden")
            warnings.warn("hidden", stacklevel=1)
            os.write(2, b"hidden, with a mark\n")
            sys.stdout.flush()
    finally:
        log.removeHandler(handler)
        thread.join()
    out, err = capfd.readouterr()
    assert out == "by print\n" and "hidden" not in err
    assert "by a log record" in err and "to the file" in err
    print("again")
    assert capfd.readouterr().out == "again\n"


def test_modules_in_threads_leave_the_process_as_it_was() -> None:
    torch = pytest.importorskip("torch")
    before = sys.stdout, sys.stderr, logging.root.manager.disable
    everything = ("ignore", None, Warning, None, 0)

    def shape(n: int) -> tuple[int, ...]:
        x = torch.randn(2, 4 + n)
        with gtco.compile_model(torch.nn.Linear(4 + n, 3), (x,), cache=False) as compiled:
            return tuple(compiled(x).shape)

    with ThreadPoolExecutor(3) as pool:
        assert {*pool.map(shape, range(3))} == {(2, 3)}
    assert (sys.stdout, sys.stderr, logging.root.manager.disable) == before
    assert everything not in warnings.filters
