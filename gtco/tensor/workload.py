"""The work of a program, as far as its price depends on it: streams of bytes in layers of loops
around a micro-kernel (Helix's rKernel, Table 2), and the work beside them.
"""

from __future__ import annotations

from typing import NamedTuple


class Stream(NamedTuple):
    """Bytes that one iteration reads or writes, out of a working set of ``resident`` bytes.

    The working set decides where the bytes come from: the innermost level of memory that holds it
    (Helix eq. 1).

    - ``memory``: the level, if it is known, such as "DRAM" for weights;
    - ``chains``: the bytes are read as so many short runs at once, which no hardware prefetcher
      follows; 0 for one sequential run;
    - ``cores``: the working set is dealt out to so many cores, each of which keeps its own share in
      its own caches;
    - ``handed``: the working set passes from stage to stage, and other cores wrote, or are going to
      read, this share of it (``Target.elsewhere`` if each has a part of the same size).
    """

    nbytes: float
    resident: float
    memory: str = ""
    chains: int = 0
    cores: int = 1
    handed: float | None = None


class Layer(NamedTuple):
    """One level of the rKernel (Helix, Table 2): ``iterations`` (N_TmpIter) of the layer below,
    each of which loads and stores.

    ``parallel`` is N_ParIter of eq. 6. The layers describe the largest of these iterations, and an
    average one has the share ``even`` of its work. ``overlapped`` is true if loads of one iteration
    are under way while the one before computes (eq. 5); else each iteration waits for its own.
    """

    iterations: float
    loads: tuple[Stream, ...] = ()
    stores: tuple[Stream, ...] = ()
    parallel: int = 1
    overlapped: bool = True
    even: float = 1.0


class Extra(NamedTuple):
    """Level-0 work of another kind: ``amount`` pieces (rows that are packed, vectors that are
    stored) of ``units`` each.
    """

    kernel: str
    amount: float
    units: float = 1.0


class Workload(NamedTuple):
    """The numbers that the analytic policy prices: level 0 by its kind and size, and the levels
    above as layers, inner to outer.

    - ``kernel``: a row of the table of rates: ``fma:6x4`` (the micro-kernel of 6 rows and 4
      vectors), ``fma`` (the fastest of them) or vector instructions of a kind
      (:mod:`gtco.search.calibration.rates`);
    - ``work``: the units of it in one iteration of the innermost layer (for ``fma``: vector FMAs);
    - ``beside``: the work of other kinds in that iteration;
    - ``extra``: such work beside the loops, over all tasks;
    - ``fixed``: further such work that no choice changes, such as an epilogue. It is priced, but
      left out when configs are compared, so that stages around one contraction share their best;
    - ``flops``: the operations for which the stage is counted.
    """

    kernel: str
    work: float
    layers: tuple[Layer, ...]
    flops: float
    extra: tuple[Extra, ...] = ()
    fixed: tuple[Extra, ...] = ()
    beside: tuple[Extra, ...] = ()
