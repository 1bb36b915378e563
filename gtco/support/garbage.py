"""Python's garbage collection, which is left out where it could find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, for what makes many values and no cycles of them: collections
    walk over all that lives, again and again, to find nothing.
    """
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
