"""What a sketch makes for a GPU: a kernel's source with its launch, and what the policy prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gtco.tensor.packing import Packing


@dataclass(frozen=True)
class CudaProgram:
    """One kernel: a translation unit of CUDA C++ that includes headers of ``device/`` and defines
    ``extern "C" __global__ void symbol(inputs..., out)``, pointers to the stage's inputs in order
    and to its output, in the elements' own types. With ``counters`` it is
    ``symbol(inputs..., scratch, counters, out)``: a global variable would be one for all handles,
    whose runs may overlap.

    ``grid`` in blocks, ``threads`` of one block (along x), ``shared`` the dynamic shared memory of
    a block in bytes; ``packings``: how constant inputs are laid out, by input name. ``scratch``:
    the bytes of global memory in which blocks leave each other floats, or one what it needs between
    its loops; ``counters``: how many uint32 blocks that work together count in, zeros before each
    run, which each run leaves as zeros. ``registers`` that
    the price reckons a thread with, 0 where there is none: with these blocks lie side by side.
    """

    source: str
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    packings: Mapping[str, Packing] = field(default_factory=dict)
    scratch: int = 0
    counters: int = 0
    registers: int = 0


@dataclass(frozen=True)
class Launch:
    """What the policy prices of a program.

    ``blocks`` of ``threads`` with ``shared`` bytes and about ``registers`` a thread; ``unit`` does
    ``work`` FLOPs in all blocks together, padding included; ``vector`` float32 operations of CUDA
    cores beside it (epilogue, exponentials); ``read`` and ``written`` the bytes that memory gives
    and takes at least once, ``traffic`` those that blocks ask of L2 all together; ``overlapped``:
    are loads under way while the block computes? ``flops`` is what the stage is counted for.
    ``staged``: the bytes that warps read of shared memory, all together; ``steps``: iterations of a
    block that wait for one another, as those between two barriers of a loop over k. ``trusted``:
    may it be picked where no device has run it? What may not is proposed to be measured.
    ``joined``: bytes that the last of the blocks that share a tile reads when all others have
    ended. ``copying``: how many of the threads do nothing but bring what the others multiply.
    """

    blocks: int
    threads: int
    shared: int
    registers: int
    unit: str
    work: float
    vector: float
    read: float
    written: float
    traffic: float
    flops: float
    overlapped: bool = True
    staged: float = 0.0
    steps: int = 1
    trusted: bool = True
    joined: float = 0.0
    copying: int = 0
