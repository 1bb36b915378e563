"""What a program does, as far as its price goes: streams of bytes in layers of loops around a
micro-kernel (Helix's rKernel, Table 2), and the work beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Stream(NamedTuple):
    """Bytes that one iteration reads or writes, out of a working set of ``resident`` bytes.

    The working set says where the bytes come from: the innermost level of memory that holds it
    (Helix eq. 1). ``memory`` names the level where it is known, as "DRAM" for weights. ``chains``:
    the bytes are read as so many short runs at once, which no hardware prefetcher follows; 0 for
    one sequential run. ``cores``: the working set is dealt out to so many, each of which keeps its
    own share in its own caches. ``handed``: between stages it passes through the hands of whichever
    cores are free, so that those caches hold what others read next.
    """

    nbytes: float
    resident: float
    memory: str = ""
    chains: int = 0
    cores: int = 1
    handed: bool = False


class Layer(NamedTuple):
    """One level of the rKernel (Helix, Table 2): ``iterations`` (N_TmpIter) of the layer below,
    each loading and storing.

    ``parallel`` is N_ParIter of eq. 6. ``overlapped``: are loads of one iteration under way while
    the one before computes (eq. 5), or does each wait for its own?
    """

    iterations: float
    loads: tuple[Stream, ...] = ()
    stores: tuple[Stream, ...] = ()
    parallel: int = 1
    overlapped: bool = True


@dataclass(frozen=True)
class Extra:
    """Level-0 work of another kind: ``count`` pieces (rows that are packed, vectors that are
    stored) of ``units`` each.
    """

    kernel: str
    count: float
    units: float = 1.0


class Workload(NamedTuple):
    """What the analytic policy prices: level 0 by its kind and size, the levels above as layers,
    inner to outer.

    ``kernel`` is a row of the table of rates: ``fma:6x4`` (the micro-kernel of 6 rows and 4
    vectors), ``fma`` (the fastest of them) or vector instructions of a kind
    (:mod:`gtco.search.calibration.rates`); ``work`` is how many units of it one iteration of the
    innermost layer runs (for ``fma``: vector FMAs), and ``beside`` what work of other kinds that
    iteration does. ``extra`` is such work beside the loops, over all tasks. ``fixed`` is more of it
    that no choice changes, as an epilogue: priced, and left out where configs are compared, so that
    stages around one contraction share their best. ``flops`` is what the stage is counted for.
    """

    kernel: str
    work: float
    layers: tuple[Layer, ...]
    flops: float
    extra: tuple[Extra, ...] = ()
    fixed: tuple[Extra, ...] = ()
    beside: tuple[Extra, ...] = ()
