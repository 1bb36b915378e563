"""Compiles whose picks do not depend on the machine's speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gtco.machine.target import Target
from gtco.search.calibration import profile
from gtco.search.calibration.profile import MachineTable
from gtco.search.calibration.rates import RateTable


@contextmanager
def by_constants() -> Iterator[None]:
    """Compiles of this process price by the constants of their target. A test that counts kernels
    or layouts, or asks what is multiplied, needs it: the table of this machine was measured beside
    other tests, and any pick may be the best by such a table.
    """

    def constants(machine: Target, *_: object) -> MachineTable:
        return MachineTable(RateTable(machine))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "machine_table", constants)
        yield
