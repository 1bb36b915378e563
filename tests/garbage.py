"""Python's garbage collection in processes that run many tests."""

from __future__ import annotations

import gc


def seldom_collected() -> None:
    """From here on, collections leave out what is there already, and they come seldom. Each walks
    over all live values, of which such a process has millions: half a second, hundreds of times.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
