"""Turns Python's garbage collection off where it would find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Runs a block without garbage collection. It is for code that makes many values and no cycles
    of them: each collection would walk over all live values and find nothing.
    """
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
