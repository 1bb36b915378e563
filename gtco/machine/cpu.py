"""CPUs as data: levels of memory, vector registers, instruction sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gtco.machine.isa import ISAS, X86_64, Isa

CACHE_LINE = 64  # bytes
TILES = ("amx-tile", "amx-bf16", "amx-int8")  # those of the tile unit


@dataclass(frozen=True)
class MemoryLevel:
    """One level of the memory hierarchy: its capacity in bytes, its sustained bandwidth per core in
    bytes a second, its latency in seconds.
    """

    name: str
    capacity: int
    bandwidth: float
    latency: float
    shared: bool = False


@dataclass(frozen=True)
class Target:
    """A CPU: what code for it may use, and the figures for the analytic policy.

    - ``mcpu``: LLVM's name of the CPU, which tunes the code
    - ``features``: the instruction sets beyond the baseline of ``isa`` that the code may use; an
      artifact requires these of the CPU that opens it (:meth:`required`). The names are those of
      LLVM and csrc/cpu/features.def (csrc/cpu/features_arm.def)
    - ``lanes``: float32 values in a vector
    - ``registers``: vector registers
    - ``fma_ports``: vector FMAs a cycle
    - ``frequency``: in Hz
    - ``cores``: the number of threads that code for it has, for which work is divided and priced
    - ``memory``: the levels from L1 outward
    - ``emulated``: those of the features whose instructions are replaced by functions that do the
      same. Only tests set it, to run kernels in tiles on machines without a tile unit
    - ``isa``: the instruction set that the features extend
    - ``cpu``: what tells its CPU from others (:func:`gtco.machine.target.cpu_identity`), if it is
      not this machine's
    - ``fast_algorithms``: False leaves out the kernels that multiply less than the definition does,
      by sums of operands (Winograd's and Strassen's)
    """

    name: str
    mcpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    fma_ports: float
    frequency: float
    cores: int
    memory: tuple[MemoryLevel, ...]
    emulated: tuple[str, ...] = ()
    isa: Isa = field(default=X86_64, repr=False)
    cpu: tuple[tuple[str, str], ...] = ()
    fast_algorithms: bool = True

    kind = "cpu"

    @property
    def here(self) -> bool:
        """True if code for it can run on this machine, as far as the kind of machine says. The
        features are checked when a library is opened.
        """
        return self.isa.here

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """The features whose instructions the code contains."""
        return tuple(name for name in self.features if name not in self.emulated)

    def required(self, tiles: bool) -> tuple[str, ...]:
        """The features that an artifact requires. A compiler never uses the tile unit by itself, so
        only kernels that multiply in ``tiles`` need it.
        """
        return tuple(n for n in self.instruction_sets if tiles or n not in TILES)

    @property
    def peak(self) -> float:
        """Nominal float32 FLOP/s of one core."""
        return 2 * self.lanes * self.fma_ports * self.frequency

    @property
    def elsewhere(self) -> float:
        """The share of a tensor that lies with other cores, if each has a part of the same size."""
        return 1.0 - 1.0 / self.cores

    def level(self, name: str) -> MemoryLevel:
        return self.levels[name]

    @cached_property
    def levels(self) -> dict[str, MemoryLevel]:
        """The levels of memory by their names."""
        return {level.name: level for level in self.memory}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mcpu": self.mcpu,
            "features": list(self.features),
            "lanes": self.lanes,
            "registers": self.registers,
            "fma_ports": self.fma_ports,
            "frequency": self.frequency,
            "cores": self.cores,
            "memory": [[m.name, m.capacity, m.bandwidth, m.latency, m.shared] for m in self.memory],
            **({"emulated": list(self.emulated)} if self.emulated else {}),
            # x86-64 is not said: so it was before there was another
            **({"isa": self.isa.name} if self.isa is not X86_64 else {}),
            **({"cpu": dict(self.cpu)} if self.cpu else {}),
            **({} if self.fast_algorithms else {"fast_algorithms": False}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Target:
        fields = dict(data)
        fields["features"] = tuple(fields["features"])
        fields["emulated"] = tuple(fields.get("emulated", ()))
        fields["cpu"] = tuple(sorted(fields.get("cpu", {}).items()))
        fields["isa"] = ISAS[fields.get("isa", X86_64.name)]
        fields["memory"] = tuple(MemoryLevel(*m) for m in fields["memory"])
        return Target(**fields)
