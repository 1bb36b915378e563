"""TVM without PyTorch, for processes that are gtco's own.

``tvm_ffi`` imports torch if it is installed, to exchange tensors. gtco never gives it torch's
tensors, and the import costs seconds and some 150 MB in every process. So torch is hidden during
the import. The API does not do this: in a user's process another thread may import torch at the
same moment.
"""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gtco.support.garbage import uncollected


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays what the handlers of Ctrl-C and SIGTERM raise until the end of the block. An exception
    in the middle of an import may crash Python, because it frees a module that an extension has
    only half made.
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
    """Imports TVM, and torch with it only if torch is imported already. What is imported
    stays, so Python's garbage collector leaves it out from here on.
    """
    if sys.modules.get("tvm") is not None:
        return
    with uninterrupted(), uncollected():  # collecting is a sixth of an import's time
        if "torch" in sys.modules or "tvm_ffi" in sys.modules:
            importlib.import_module("tvm")
        else:
            sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
            try:
                importlib.import_module("tvm")
            finally:
                del sys.modules["torch"]
        gc.freeze()
