"""NVIDIA GPUs as data: what the space, the policy and the runtime reckon with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtco.errors import OptionError

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90a")  # that images are made for, the oldest first


@dataclass(frozen=True)
class GpuTarget:
    """One GPU, and the architectures that images are made for.

    ``arch`` is the architecture that programs are chosen for, the first of ``images``; ``sms``
    streaming multiprocessors; ``clock`` in Hz; ``bandwidth`` of its memory and ``l2_bandwidth`` in
    bytes a second; ``l2`` in bytes; ``shared`` the bytes of shared memory that one block may have,
    ``shared_sm`` and ``threads_sm`` what a multiprocessor has for all its blocks; ``registers_sm``
    32-bit registers; ``rates`` FLOPs a clock of one multiprocessor by unit: ``fma`` (CUDA cores,
    float32), ``mma:float16`` and ``mma:bfloat16`` (Tensor Cores, float32 sums), where it has them.
    """

    name: str
    arch: str
    sms: int
    clock: float
    bandwidth: float
    l2_bandwidth: float
    l2: int
    shared: int
    shared_sm: int
    threads_sm: int
    registers_sm: int
    rates: tuple[tuple[str, float], ...]
    images: tuple[str, ...] = ()

    kind = "cuda"

    def rate(self, unit: str) -> float:
        """FLOP/s of a unit on all multiprocessors; 0 where the GPU has none."""
        return dict(self.rates).get(unit, 0.0) * self.sms * self.clock

    @property
    def generation(self) -> int:
        """The architecture's number: 80 of sm_80, 90 of sm_90a."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        return {"kind": self.kind, **fields, "rates": dict(self.rates), "images": list(self.images)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GpuTarget:
        fields = {k: v for k, v in data.items() if k != "kind"}
        fields["rates"], fields["images"] = tuple(fields["rates"].items()), tuple(fields["images"])
        return GpuTarget(**fields)


def _rates(fma: float, half: float, bfloat: float) -> tuple[tuple[str, float], ...]:
    units = {"fma": fma, "mma:float16": half, "mma:bfloat16": bfloat}
    return tuple((unit, rate) for unit, rate in units.items() if rate)


def _gpu(
    *about: Any, shared: tuple[int, int], threads: int, rates: tuple[tuple[str, float], ...]
) -> GpuTarget:
    name, arch, sms, ghz, gbytes, l2_gbytes, l2_mib = about
    one, whole = shared
    return GpuTarget(
        f"cuda:{name}",
        arch,
        sms,
        ghz * 1e9,
        gbytes * 1e9,
        l2_gbytes * 1e9,
        int(l2_mib * 2**20),
        one << 10,
        whole << 10,
        threads,
        65536,
        rates,
        (arch,),
    )


_TURING, _AMPERE = _rates(128, 512, 0), _rates(128, 2048, 2048)
_ADA, _HOPPER = _rates(256, 512, 512), _rates(256, 4096, 4096)
# Sheets of the vendor: boost clock, memory, dense rates with float32 sums. (name, architecture,
# multiprocessors, GHz, GB/s of memory, GB/s of L2, MiB of L2)
GPUS: Mapping[str, GpuTarget] = {
    gpu.name: gpu
    for gpu in (
        _gpu("2080ti", "sm_75", 68, 1.545, 616, 1800, 5.5, shared=(64, 64), threads=1024,
             rates=_TURING),
        _gpu("a100", "sm_80", 108, 1.41, 1555, 4500, 40, shared=(163, 164), threads=2048,
             rates=_AMPERE),
        _gpu("rtx4090", "sm_89", 128, 2.52, 1008, 5000, 72, shared=(99, 100), threads=1536,
             rates=_ADA),
        _gpu("l4", "sm_89", 58, 2.04, 300, 2000, 48, shared=(99, 100), threads=1536, rates=_ADA),
        _gpu("h100", "sm_90a", 132, 1.83, 3350, 5500, 50, shared=(227, 228), threads=2048,
             rates=_HOPPER),
        _gpu("h200", "sm_90a", 132, 1.83, 4800, 5500, 50, shared=(227, 228), threads=2048,
             rates=_HOPPER),
    )
}  # fmt: skip
# An architecture alone stands for its best known GPU.
_TYPICAL = {"sm_75": "2080ti", "sm_80": "a100", "sm_89": "rtx4090", "sm_90a": "h100"}


def gpu_target(name: str) -> GpuTarget:
    """The target of a name such as ``cuda:sm_80``, ``cuda:sm_80,sm_90a`` (images for both, programs
    chosen for the first) or ``cuda:h100``. Raises :class:`OptionError` for others.
    """
    asked = name.removeprefix("cuda:").split(",")
    first = f"cuda:{_TYPICAL.get(asked[0], asked[0])}"
    others = [a for a in asked[1:] if a not in ARCHITECTURES]
    if first not in GPUS or others:
        wrong = others[0] if first in GPUS else asked[0]
        old = wrong.startswith("sm_") and wrong[3:5].isdigit() and int(wrong[3:5]) < 75
        why = "; CUDA 13 ended what is older than sm_75" if old else ""
        known = ", ".join((*ARCHITECTURES, *(gpu.removeprefix("cuda:") for gpu in GPUS)))
        raise OptionError(f"unknown GPU '{wrong}' in target '{name}'{why}; known: {known}")
    gpu = GPUS[first]
    images = tuple(dict.fromkeys((gpu.arch, *asked[1:])))
    return GpuTarget(**{**vars(gpu), "name": name, "images": images})
