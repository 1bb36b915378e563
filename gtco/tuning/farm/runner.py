"""Hands libraries to the machines of a farm that are of one kind.

Each tuning has at most one request on a machine, and Ray serves the requests for a machine in the
order that they came: several tunings take turns. A machine that leaves in the middle costs the
reading in flight, which another machine does again. A machine that turns out to be of another kind
than it said is not asked again, and nothing that it read counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gtco.machine.identity import Identity, identity
from gtco.machine.target import Target
from gtco.support.errors import FarmError, OptionError
from gtco.tuning.farm import machine as there
from gtco.tuning.farm.connection import POLL, Farm, FarmMachine, MachineLost
from gtco.tuning.runner import Budget, Readings

WAIT = 120.0  # seconds without a machine of the kind, until a tuning ends
LOST = 60.0  # seconds, at most, that a lost machine is not asked again
LOSSES = 2  # times that machines are lost with the same libraries, until these are blamed


class FarmRunner:
    """A :class:`~gtco.tuning.runner.Runner` of the machines of one kind. Several threads may read.
    ``notes`` says what was wrong with machines.
    """

    def __init__(
        self, farm: Farm, kind: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.farm, self.kind, self.clock = farm, kind, clock
        self.notes: list[str] = []
        self._busy: set[FarmMachine] = set()
        self._aside: set[FarmMachine] = set()
        self._lost: dict[FarmMachine, float] = {}  # and until when it is not asked again
        self._changed = threading.Condition()

    @property
    def machines(self) -> int:
        return max(len(self._usable()), 1)

    def read(self, libraries: Sequence[Path], budget: Budget) -> Readings:
        contents = [library.read_bytes() for library in libraries]
        asked = there.request(self.kind, budget)
        lost: list[FarmMachine] = []
        while True:
            with self._lease() as machine:
                try:
                    answer = self.farm.ask(machine, asked, contents)
                    who, read = there.understood(answer, len(libraries))
                except MachineLost as error:
                    lost.append(machine)
                    self._lost[machine] = self.clock() + LOST
                    self._note(f"the machine {machine.name} was lost: {error}")
                    if len(lost) == LOSSES:
                        names = " and ".join(dict.fromkeys(m.name for m in lost))
                        how = f"cost the farm {names}, lost meanwhile"
                        return Readings(failed=how)
                    continue
                except (OptionError, FarmError) as error:
                    self._set_aside(machine, str(error))
                    continue
                if who.kind != self.kind or read is None:
                    other = f"it is of the kind {who.kind} ({who.name}), not of {self.kind}"
                    self._set_aside(machine, other)
                    continue
                return read

    def _usable(self) -> list[FarmMachine]:
        """The machines that can be asked. A machine that was lost still shows for a while; once it
        does not, whatever shows under its name is there again.
        """
        present = [m for m in self.farm.machines() if m.kind == self.kind]
        for machine, until in list(self._lost.items()):
            if machine not in present or self.clock() > until:
                self._lost.pop(machine, None)
        return [m for m in present if m not in self._aside and m not in self._lost]

    @contextmanager
    def _lease(self) -> Iterator[FarmMachine]:
        """A machine that no other thread of this tuning uses. Waits for it. Raises
        :class:`FarmError` where none comes.
        """
        begin = self.clock()
        with self._changed:
            while True:
                usable = self._usable()
                free = [machine for machine in usable if machine not in self._busy]
                if free:
                    machine = free[0]
                    self._busy.add(machine)
                    break
                if usable:
                    begin = self.clock()
                elif self.clock() - begin > WAIT:
                    raise FarmError(self._nobody())
                self._changed.wait(POLL)
        try:
            yield machine
        finally:
            with self._changed:
                self._busy.discard(machine)
                self._changed.notify_all()

    def _nobody(self) -> str:
        told = f" ({'; '.join(self.notes)})" if self.notes else ""
        return (
            f"the farm {self.farm.address} had no machine of the kind {self.kind} for {WAIT:.0f} s"
            f"{told}. What was measured is in the records; the same command goes on from them"
        )

    def _set_aside(self, machine: FarmMachine, why: str) -> None:
        with self._changed:
            self._aside.add(machine)
        self._note(f"the machine {machine.name} is not used: {why}")

    def _note(self, note: str) -> None:
        self.notes.append(f"farm: {note}")


def identities(farm: Farm) -> dict[str, Identity]:
    """Who the machines of each kind are, by the answer of one that really is of its kind."""
    found: dict[str, Identity] = {}
    for machine in farm.machines():
        if machine.kind in found:
            continue
        try:
            answer = farm.ask(machine, there.request(machine.kind, Budget(0)))
            who, _ = there.understood(answer, 0)
        except (MachineLost, FarmError, OptionError):
            continue
        if who.kind == machine.kind:
            found[machine.kind] = who
    return found


def wanted(farm: Farm, kind: str) -> tuple[str, Target]:
    """The kind of machines to measure on, and the target that code for them is built for. ``kind``
    "" is the kind of this machine. Raises :class:`FarmError` if the farm has none of it.
    """
    here = identity()
    kind = kind or here.kind
    if kind == here.kind and any(machine.kind == kind for machine in farm.machines()):
        return kind, here.target(here)
    known = identities(farm)
    if kind in known:
        return kind, known[kind].target(here)
    there_are = ", ".join(f"{name} ({who.name})" for name, who in known.items()) or "none at all"
    raise FarmError(
        f"the farm {farm.address} has no machine of the kind {kind}"
        f"{', which this machine is of' if kind == here.kind else ''}. It has: {there_are}. "
        "--kind names the kind to measure on and to compile for"
    )
