"""TVM without PyTorch, for processes that are gtco's own.

``tvm_ffi`` imports torch wherever it is installed, to exchange tensors that gtco never hands it:
seconds, and some 150 MB, in every process. Hiding torch for the moment of the import spares both.
Not for the API: in a user's process another thread may import torch at that moment.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gtco.support.garbage import uncollected


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What handlers would raise of Ctrl-C and SIGTERM waits until here: an exception in the middle
    of an import may crash Python, which then frees a module that an extension has half made.
    """
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # signals are its own
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def import_tvm() -> None:
    """Import TVM, and torch with it only where torch is there already."""
    with uninterrupted(), uncollected():  # collecting is a sixth of an import's time
        if "torch" in sys.modules or "tvm_ffi" in sys.modules:
            importlib.import_module("tvm")
            return
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
        try:
            importlib.import_module("tvm")
        finally:
            del sys.modules["torch"]
