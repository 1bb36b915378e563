"""Who a machine is: what decides how long code takes on it, and its name. A machine of a farm says
this with every reading, so that readings of different machines are never mixed up.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from gtco.machine.cores import ROOT
from gtco.machine.target import CPUS, Target, cpu_identity, detect
from gtco.support.errors import OptionError
from gtco.support.version import __version__

GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"


@dataclass(frozen=True)
class Identity:
    """A machine.

    - ``host``: its name
    - ``cpu``: what tells its CPU from others (:func:`gtco.machine.target.cpu_identity`)
    - ``row``: its row in ``TARGETS``
    - ``features``: the instruction sets that code for it may use
    - ``cores``: threads that code for it has
    - ``caches``: bytes, by name
    - ``governor``: of its clock, or "unknown"
    - ``gtco``: the version of gtco there
    """

    host: str
    cpu: dict[str, str]
    row: str
    features: tuple[str, ...]
    cores: int
    caches: dict[str, int]
    governor: str
    gtco: str

    @cached_property
    def kind(self) -> str:
        """A short name of all machines whose readings may be compared: the same CPU, features,
        cores and version of gtco.
        """
        same = [self.cpu, self.row, self.features, self.cores, self.gtco]
        digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
        return f"{self.row}-{self.cores}c-{digest[:6]}"

    @property
    def name(self) -> str:
        """The CPU in words."""
        return self.cpu.get("model name", "") or self.row

    def target(self, here: Identity) -> Target:
        """The target that code for this machine is built for, seen from the machine ``here``. Its
        figures are those of its row. If it is of the kind of ``here``, it is ``here``'s own.
        """
        if self.kind == here.kind:
            return detect()
        row = CPUS[self.row]
        memory = tuple(
            replace(level, capacity=self.caches.get(level.name, level.capacity))
            for level in row.memory
        )
        return replace(
            row,
            name=self.kind,
            features=self.features,
            cores=self.cores,
            memory=memory,
            cpu=tuple(sorted(self.cpu.items())),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Identity:
        """Raises :class:`OptionError` for a text that is not an identity."""
        try:
            data = json.loads(text)
            data["features"] = tuple(data["features"])
            found = Identity(**data)
            texts = (found.host, found.governor, found.gtco, *found.features, *found.cpu)
            right = (
                found.row in CPUS
                and type(found.cores) is int
                and found.cores > 0
                and all(isinstance(text, str) for text in (*texts, *found.cpu.values()))
                and all(type(size) is int for size in found.caches.values())
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"no description of a machine: {text[:200]!r}") from error
        if not right:
            raise OptionError(f"no description of a machine: {text[:200]!r}")
        return found


def identity() -> Identity:
    """Who this machine is. Raises :class:`OptionError` where gtco compiles for no such CPU."""
    target = detect()
    row = next((name for name, known in CPUS.items() if known.mcpu == target.mcpu), None)
    if row is None:
        raise OptionError(f"gtco has no target for this machine's CPU ({target.mcpu})")
    return Identity(
        platform.node(),
        cpu_identity(),
        row,
        target.features,
        target.cores,
        {level.name: level.capacity for level in target.memory if level.name != "DRAM"},
        governor(),
        __version__,
    )


def governor(root: Path = ROOT) -> str:
    """What decides the clock's frequency, as Linux names it; "unknown" where it does not say."""
    try:
        return (root / GOVERNOR).read_text().strip() or "unknown"
    except OSError:
        return "unknown"
