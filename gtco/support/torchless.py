"""TVM with no more than gtco needs of it, for processes that are gtco's own.

``tvm_ffi`` imports torch if it is installed, to exchange tensors. gtco never gives it torch's
tensors, and the import costs seconds and some 150 MB in every process. TVM also registers what it
has for GPUs and for several machines. gtco uses none of it, and names that this build lacks make
TVM read the symbols of its libraries for an error that it then ignores: 0.2 s in every process. So
these are hidden during the import. The API does not do this: in a user's process another thread may
import torch at the same moment.
"""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gtco.support.environment import variable
from gtco.support.garbage import uncollected


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays what the handlers of Ctrl-C, SIGTERM and SIGHUP raise until the end of the block. An
    exception in the middle of an import may crash Python, because it frees a module that an
    extension has only half made.
    """
    came: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # signals are its own
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Makes an import of each module fail, unless it is imported already."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def import_tvm() -> None:
    """Imports TVM, and torch with it only if torch is imported already. What is imported
    stays, so Python's garbage collector leaves it out from here on.
    """
    if sys.modules.get("tvm") is not None:
        return
    unwanted = ["tvm.runtime.disco"]  # sessions over several machines
    if "tvm_ffi" not in sys.modules:
        unwanted.append("torch")
    with (
        uninterrupted(),
        uncollected(),  # collecting is a sixth of an import's time
        hidden(*unwanted),
        variable("TVM_DEVICE_BACKEND_AUTOLOAD", "0"),
    ):
        importlib.import_module("tvm")
        gc.freeze()
