"""The result of a sketch for a GPU: a kernel's source with its launch, and the numbers that the
policy prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gtco.tensor.loops import Line
from gtco.tensor.packing import Packing


@dataclass(frozen=True)
class CudaProgram:
    """One kernel: a translation unit of CUDA C++ that includes headers of ``device/`` and defines
    ``extern "C" __global__ void symbol(inputs..., out)``. The parameters are pointers to the
    stage's inputs in order and to its output, in the elements' own types. With ``counters`` it is
    ``symbol(inputs..., scratch, counters, out)``; a global variable would be shared by all handles,
    whose runs may overlap.

    - ``grid``: blocks along each axis;
    - ``threads``: those of one block (along x);
    - ``shared``: dynamic shared memory of a block, in bytes;
    - ``packings``: the layout of constant inputs, by input name;
    - ``scratch``: bytes of global memory in which blocks leave floats for each other, or a block
      keeps temporary tensors between its loops;
    - ``counters``: the number of uint32 in which blocks that work together count. They are zeros
      before each run, and each run leaves zeros;
    - ``registers``: the price's estimate for a thread, 0 if there is none; with these, blocks run
      side by side;
    - ``lines``: the loops in words.
    """

    source: str
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0
    packings: Mapping[str, Packing] = field(default_factory=dict)
    scratch: int = 0
    counters: int = 0
    registers: int = 0
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Launch:
    """The numbers of a program that the policy prices.

    - ``blocks`` of ``threads`` with ``shared`` bytes each, and about ``registers`` a thread;
    - ``unit``: the unit that does ``work`` FLOPs in all blocks together, padding included;
    - ``vector``: float32 operations of CUDA cores beside it (epilogue, exponentials);
    - ``read``, ``written``: bytes that memory delivers and takes at least once;
    - ``traffic``: bytes that all blocks together ask L2 for, in whole sectors of 32 bytes;
    - ``flops``: the operations for which the stage is counted;
    - ``overlapped``: True if loads are under way while the block computes;
    - ``ahead``: the number of slices that are under way while one is used;
    - ``staged``: bytes that all warps together read from shared memory;
    - ``steps``: iterations of a block that wait for one another, such as those between two barriers
      of a loop over k;
    - ``joined``: bytes that the last of the blocks that share a tile reads after all others have
      ended;
    - ``copying``: the number of threads that only bring the data that the others multiply;
    - ``indexing``: integer operations that find addresses and decide conditions;
    - ``lines``: lines of L1 that the accesses of all warps touch. Each access counts anew;
    - ``asked``: bytes that a thread asks memory for at once, before it uses any of them.
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
    joined: float = 0.0
    copying: int = 0
    ahead: int = 1
    indexing: float = 0.0
    lines: float = 0.0
    asked: float = 16.0
