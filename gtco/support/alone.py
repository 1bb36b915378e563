"""One compile at a time in a process. TVM builds modules on a stack that all threads share, so
that compiles in several threads would mix their functions. They wait for each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # quantizing compiles within a compile


@contextmanager
def alone() -> Iterator[None]:
    with _lock:
        yield


def _renew() -> None:
    """In the child of a fork: the thread that held the lock is not there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
