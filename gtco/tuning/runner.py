"""What runs the libraries that candidates are in: this machine (:mod:`gtco.tuning.local`), the
machines of a farm (:mod:`gtco.tuning.farm.runner`), or the GPU or CPU that a bundle was carried to
(:mod:`gtco.tuning.offline`). Whoever measures knows only this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Budget:
    """How long to read: ``rounds`` rounds at least, and more until ``seconds`` have passed. After
    ``limit`` seconds reading ends with as few rounds as there are then.
    """

    rounds: int
    seconds: float = 0.0
    limit: float = inf


@dataclass(frozen=True)
class Readings:
    """What was read of libraries.

    - ``seconds``: for each library, seconds [rounds, steps]; nothing if they failed
    - ``wrong``: the steps of the first library whose results are not those of their rivals
    - ``machine``: who read it, as the JSON of a :class:`gtco.machine.identity.Identity`; "" is the
      machine that compiles
    - ``failed``: a sentence on how the libraries failed; "" if they did not
    """

    seconds: tuple[np.ndarray, ...] = ()
    wrong: frozenset[int] = frozenset()
    machine: str = ""
    failed: str = ""


class Runner(Protocol):
    """Runs the steps of libraries, round after round. One library holds candidates, whose results
    are compared. Several are whole models, which run alternately.
    """

    @property
    def machines(self) -> int:
        """How many libraries can be read at the same time, each on a machine of its own."""
        ...

    def read(self, libraries: Sequence[Path], budget: Budget) -> Readings:
        """The readings. A failure of the machine is none of the libraries: a runner tries again, or
        raises a :class:`GtcoError`.
        """
        ...
