"""NVIDIA GPUs as data for the space, the policy and the runtime."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from gtco.support.errors import OptionError

ARCHITECTURES = ("sm_75", "sm_80", "sm_89", "sm_90a")  # images are made for these, the oldest first
# GPUs newer than all of them run this one's PTX. Its blocks take at most 99 KiB of shared memory,
# and sm_120 gives a block no more than that.
NEWER = "sm_89"
# GPUs of compute capability 8.6 (A10, RTX 30xx) run images of sm_80, and their blocks and
# multiprocessors take no more than those of sm_89.
SMALLER = {86: "sm_80,sm_89"}
MOST_REGISTERS = 255  # registers of a thread: instructions cannot name more
REGISTER_GRANULE = 8  # the registers of a thread are given out in eights
WARP = 32  # threads
# Of any launch: https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications".
MOST_BLOCK_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # along x, y and z


@dataclass(frozen=True)
class GpuTarget:
    """One GPU, and the architectures that images are made for.

    - ``arch``: the architecture that programs are chosen for, the first of ``images``
    - ``images``: every image runs the same programs, so they take no more than all of ``images``
      have
    - ``sms``: streaming multiprocessors
    - ``clock``: in Hz
    - ``bandwidth``, ``l2_bandwidth``: of its memory and of L2, in bytes a second
    - ``l2``: in bytes
    - ``shared``: bytes of shared memory that one block may have
    - ``shared_sm``, ``threads_sm``: shared memory and threads of a multiprocessor, for all its
      blocks
    - ``registers_sm``: 32-bit registers of a multiprocessor
    - ``rates``: FLOPs per clock of one multiprocessor by unit: ``fma`` (CUDA cores, float32),
      ``mma:float16`` and ``mma:bfloat16`` (Tensor Cores, float32 sums) if it has them, and
      ``wgmma:`` of both by warp groups
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
        """FLOP/s of a unit on all multiprocessors; 0 if the GPU does not have it."""
        for name, rate in self.rates:
            if name == unit:
                return rate * self.sms * self.clock
        return 0.0

    @property
    def generation(self) -> int:
        """The number of the oldest architecture that an image is made for; programs may use its
        instructions. It is 80 for sm_80 and for sm_90a with sm_80, 90 for sm_90a alone.
        """
        return min(generation_of(image) for image in self.images or (self.arch,))

    @property
    def portable(self) -> str:
        """The newest architecture with an image whose PTX newer GPUs run; "" if there is none. Code
        made for sm_90a runs only on that architecture.
        """
        able = [image for image in self.images if not image.endswith("a")]
        return max(able, key=generation_of, default="")

    def runs_on(self, major: int, minor: int, ptx: bool = True) -> bool:
        """True if a GPU of this compute capability runs one of the images, or the PTX that comes
        with them unless ``ptx`` is False; csrc/cuda/images.c has the same rule.
        """
        here = 10 * major + minor
        later = ptx and self.portable and generation_of(self.portable) <= here
        if f"sm_{here}a" in self.images or later:
            return True
        family = (generation_of(image) for image in self.images if not image.endswith("a"))
        return any(n // 10 == major and n <= here for n in family)

    @property
    def cores(self) -> int:
        """The number of units that work is divided for."""
        return self.sms

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        return {"kind": self.kind, **fields, "rates": dict(self.rates), "images": list(self.images)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GpuTarget:
        fields = {k: v for k, v in data.items() if k != "kind"}
        fields["rates"], fields["images"] = tuple(fields["rates"].items()), tuple(fields["images"])
        return GpuTarget(**fields)


def lacking(unit: str, images: Iterable[str]) -> list[str]:
    """The architectures whose GPUs do not have this unit."""
    return [image for image in images if not GPUS[f"cuda:{_TYPICAL[image]}"].rate(unit)]


def generation_of(arch: str) -> int:
    """80 for sm_80, 90 for sm_90a."""
    return int(arch.removeprefix("sm_").rstrip("a"))


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
# Hopper's Tensor Cores do 4096 FLOPs a clock. mma.sync reaches some 63% of them at best (Luo et al.
# 2024, arXiv:2402.13499). Our kernels, timed on an H200, reach 3080 with wgmma and 1400 without.
_GROUPS = ("wgmma:float16", 3080.0), ("wgmma:bfloat16", 3080.0)
_ADA, _HOPPER = _rates(256, 512, 512), (*_rates(256, 1400, 1400), *_GROUPS)
# Hopper's L2 is what our kernels get on an H200. All other figures are from the vendor's sheets:
# boost clock, memory, dense rates with float32 sums. (name, architecture, multiprocessors, GHz,
# GB/s of memory, GB/s of L2, MiB of L2)
GPUS: Mapping[str, GpuTarget] = {
    gpu.name: gpu
    for gpu in (
        _gpu("2080ti", "sm_75", 68, 1.545, 616, 1800, 5.5, shared=(64, 64), threads=1024,
             rates=_TURING),
        _gpu("a100", "sm_80", 108, 1.41, 1555, 4500, 40, shared=(163, 164), threads=2048,
             rates=_AMPERE),
        _gpu("rtx4090", "sm_89", 128, 2.52, 1008, 5000, 72, shared=(99, 100), threads=1536,
             rates=_ADA),
        # unlike the 4090, its Tensor Cores sum in float32 at full rate
        _gpu("l4", "sm_89", 58, 2.04, 300, 2000, 48, shared=(99, 100), threads=1536,
             rates=_rates(256, 1024, 1024)),
        _gpu("h100", "sm_90a", 132, 1.83, 3350, 7100, 50, shared=(227, 228), threads=2048,
             rates=_HOPPER),
        _gpu("h200", "sm_90a", 132, 1.83, 4800, 7100, 50, shared=(227, 228), threads=2048,
             rates=_HOPPER),
    )
}  # fmt: skip
# GPUs by name for which nothing can be compiled any more.
_OLD = {"v100": "sm_70", "titanv": "sm_70", "p100": "sm_60", "p40": "sm_61", "gtx1080": "sm_61"}
# An architecture alone stands for its best known GPU.
_TYPICAL = {"sm_75": "2080ti", "sm_80": "a100", "sm_89": "rtx4090", "sm_90a": "h100"}


def gpu_target(name: str) -> GpuTarget:
    """The target of a name such as ``cuda:sm_80``, ``cuda:sm_80,sm_90a`` (images for both; programs
    chosen for the first, with the shared memory and formats that both have), ``cuda:h100`` or
    ``cuda:sm_90a,l4``. Capitals and a ``cuda:`` before each part make no difference. Raises
    :class:`OptionError` for other names.
    """
    parts = [part.strip() for part in name.partition(":")[2].split(",")]
    given = [part[5:] if part.lower().startswith("cuda:") else part for part in parts]
    gpus = [_known(one, name) for one in given]
    asked = [one.lower() for one in given]
    first = gpus[0]
    images = tuple(dict.fromkeys(gpu.arch for gpu in gpus))
    units = set.intersection(*(set(dict(gpu.rates)) for gpu in gpus))
    return replace(
        first,
        name=f"cuda:{','.join(asked)}",
        images=images,
        shared=min(gpu.shared for gpu in gpus),
        shared_sm=min(gpu.shared_sm for gpu in gpus),
        threads_sm=min(gpu.threads_sm for gpu in gpus),
        rates=tuple((unit, rate) for unit, rate in first.rates if unit in units),
    )


def target_of(name: str, major: int, minor: int) -> str:
    """The target for a GPU by the driver's name, such as NVIDIA GeForce RTX 4090, and its compute
    capability: ``cuda:rtx4090``. A GPU that gtco does not know gets its architecture (or those of
    :data:`SMALLER`), and one that is newer than all architectures gets :data:`NEWER`. Raises
    :class:`OptionError` if neither an image nor PTX runs on it.
    """
    capability = 10 * major + minor
    if capability > max(map(generation_of, ARCHITECTURES)):
        return f"cuda:{NEWER}"
    if capability in SMALLER:
        return f"cuda:{SMALLER[capability]}"
    same = [
        arch
        for arch in ARCHITECTURES
        if generation_of(arch) // 10 == major
        and (generation_of(arch) == capability or not arch.endswith("a"))
        and generation_of(arch) <= capability
    ]
    if not same:
        raise OptionError(
            f"no images are made for {name} (sm_{capability}): gtco has {', '.join(ARCHITECTURES)}"
        )
    words = re.split(r"[^a-z0-9]+", name.lower())
    names = {*words, *(a + b for a, b in pairwise(words))}
    for gpu in GPUS.values():
        if gpu.arch == same[-1] and gpu.name.removeprefix("cuda:") in names:
            return gpu.name
    return f"cuda:{same[-1]}"


def _known(asked: str, name: str) -> GpuTarget:
    """One GPU or architecture of the target ``name``."""
    gpu = GPUS.get(f"cuda:{_TYPICAL.get(asked.lower(), asked.lower())}")
    if gpu is not None:
        return gpu
    known = ", ".join((*ARCHITECTURES, *(gpu.removeprefix("cuda:") for gpu in GPUS)))
    wrong = f"unknown GPU '{asked}'" if asked else "no GPU is named"
    number = asked.lower().removeprefix("sm_").rstrip("af")
    why = ""
    if asked.lower() in _OLD:
        why = f"; it is of {_OLD[asked.lower()]}, and CUDA 13 ended what is older than sm_75"
    elif asked.lower().startswith("sm_") and number.isdigit():
        if int(number) < 75:
            why = "; CUDA 13 ended what is older than sm_75 (Turing)"
        elif int(number) == 90:
            why = "; the image for it is sm_90a"
        elif int(number) in SMALLER:
            why = f"; GPUs of sm_{number} run what is made for {SMALLER[int(number)]}"
        elif int(number) == 87:
            why = "; GPUs of sm_87 run images of sm_80"
        elif int(number) > 90:
            why = f"; GPUs newer than sm_90a (Hopper) run the PTX of {NEWER}"
    raise OptionError(f"{wrong} in target '{name}'{why}. Known: {known}")
