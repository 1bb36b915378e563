"""The traffic of a nest: what each level of its loops loads and stores, how often, from where.

A stream's working set is what a core uses between two uses of the same bytes (Helix eq. 1).
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from gtco.machine.target import CACHE_LINE, Target
from gtco.tensor.nest.nest import Nest
from gtco.tensor.stage import ITEM_BYTES
from gtco.tensor.workload import Layer, Stream

PAGE = 4096  # bytes of the addresses that choose a set of L1
FILLS = 16  # lines that L1 fetches at a time on a Golden Cove (Intel's optimization manual)
REACH = 64  # pages whose addresses a core keeps at hand; it has room for 96 on a Granite Rapids


class _Pieces(NamedTuple):
    """What the layers share.

    - ``kblocks`` and ``passes`` of the nest;
    - ``rows`` of a pass, ``height`` of a block of rows (the average of two);
    - bytes as they are multiplied: of a block's A, a panel's block of B and a block's C
      (``a_tile``, ``b_panel``, ``c_tile``); of A and C that a pass works on (``a_block``,
      ``c_block``), with C of so many panels ``together``;
    - bytes in the tensors: what a task reads and writes (``task_a``, ``task_b``, ``task_c``) and
      what there is (``whole_a``, ``whole_b``, ``whole_c``);
    - ``foreign``: the share of A and C that lies with other cores. A thread begins with the same
      part of the tasks in every stage, so it has its part of the rows, if tasks are cut by rows.
      With fewer such cuts than cores, it computes columns of rows that are not its own;
    - ``stride``: bytes between rows of A in an input that is read in place, else 0; ``room``: how
      many times their own room such rows take in a cache.
    """

    nest: Nest
    target: Target
    kblocks: int
    passes: float
    rows: float
    height: float
    a_tile: float
    b_panel: float
    c_tile: float
    a_block: float
    c_block: float
    together: int
    task_a: float
    task_b: float
    task_c: float
    whole_a: float
    whole_b: float
    whole_c: float
    foreign: float
    stride: int
    room: float


def layers(nest: Nest, target: Target) -> tuple[Layer, ...]:
    """The layers of a nest, inner to outer: row blocks, panels, blocks of k and passes, tasks.

    B's panels are prefetched, so that they are under way while products are computed. So are rows
    of A that follow each other in an input. Products wait for the rest: other first reads of A,
    partial sums, and the output.
    """
    pieces = _pieces(nest, target)
    return _row_blocks(pieces), _panels(pieces), _blocks_of_k(pieces), _tasks(pieces)


def _pieces(nest: Nest, target: Target) -> _Pieces:
    batch, m, n, k = nest.extents
    tile, shape, kc, windows = nest.row, nest.shape, nest.kc, nest.a.windows
    panels, columns = shape.task_panels, tile.columns
    positions, outputs = nest.transform
    # bytes of an element of A, B and C when it is multiplied, and in the tensors
    item_a, item_b, item_c = float(tile.kind.a.nbytes), tile.kind.b.item, 4.0
    stored_a, stored_b, stored_c = nest.a.nbytes, nest.b.nbytes, float(ITEM_BYTES[nest.out])
    passes = nest.passes
    rows = shape.task_rows / passes
    height = rows / nest.held
    different = 1 + (height - 1) * (windows.fresh if windows else 1)  # rows, without overlaps
    stride = int(nest.a.stride * item_a) if nest.a.how == "direct" else 0
    room = spread(stride, item_a * kc)
    together = 1 if nest.order == "k" or positions > 1 else panels
    each = nest.taps or positions  # numbers of an element of B that are stored
    return _Pieces(
        nest,
        target,
        nest.kblocks,
        passes,
        rows,
        height,
        a_tile=item_a * different * kc,
        b_panel=item_b * kc * columns,
        c_tile=item_c * height * columns,
        a_block=item_a * (windows.copied if windows else room * positions * rows * kc),
        c_block=item_c * positions * (height if nest.by_block else rows) * together * columns,
        together=together,
        task_a=stored_a * (windows.copied if windows else shape.task_rows * k * outputs),
        task_b=stored_b * each * k * panels * columns,
        task_c=stored_c * outputs * shape.task_rows * min(panels * columns, n),
        whole_a=stored_a * (windows.whole if windows else batch * m * k * outputs),
        whole_b=stored_b * each * k * n * batch / nest.b.batches,
        whole_c=stored_c * outputs * batch * m * n,
        foreign=max(0.0, 1.0 - shape.tasks / shape.chunks_n / target.cores),
        stride=stride,
        room=room,
    )


def _row_blocks(p: _Pieces) -> Layer:
    """The blocks of rows that meet a panel's block of k."""
    nest, kind = p.nest, p.nest.row.kind
    k, positions, held = nest.extents[3], nest.positions, nest.held
    item_a, stride = float(kind.a.nbytes), p.stride
    # Rows whose lines share few sets of L1 evict each other, and the next iteration loads the part
    # that does not fit again.
    lines = p.height * CACHE_LINE * spread(stride, CACHE_LINE)
    lost = max(0.0, 1.0 - p.target.level("L1").capacity / lines)
    again = 1.0 + lost * (CACHE_LINE / (item_a * kind.step) - 1.0)
    kept = 1.0 if positions > 1 else (p.kblocks - 1) / p.kblocks  # the share of sums for later
    # The next panel arrives while this one is used, and takes as much room. Beside tiles it takes
    # none in L1, so readings say: it is fetched to L2, and one panel lasts for few products.
    a_set = p.a_block + 2 * p.b_panel + p.c_tile * (held if kept else 1)
    b_set = (1 if kind.in_tiles else 2) * p.b_panel + p.room * p.a_tile + p.c_tile
    if nest.order == "k" and not nest.a.windows:  # rows are read again after all blocks of k
        a_set += item_a * spread(stride, item_a * k) * positions * p.rows * k - p.a_block
    if positions > 1:  # B streams by: few blocks of rows use a panel before the next one
        a_set, b_set = p.a_block + p.c_block, p.b_panel + p.a_tile
        if nest.taps:  # all positions of a panel lie in scratch
            b_set = positions * p.b_panel + p.a_tile
        if nest.by_block:  # the next block of rows reads all positions of the panel again
            b_set = positions * (p.b_panel + p.a_tile) + p.c_block
            a_set += positions * p.b_panel
    # sums are stored and loaded
    partial = Stream(2 * p.c_tile * kept, p.c_block + p.a_block + p.b_panel * p.together)
    loads = Stream(p.a_tile * again, a_set), Stream(p.b_panel, b_set)
    return Layer(held, loads, (partial,) if kept else ())


def _panels(p: _Pieces) -> Layer:
    """The panels of a task at all positions. With order=k, their blocks of k are among them."""
    nest, shape = p.nest, p.nest.shape
    n, k = nest.extents[2:]
    positions, passes = nest.positions, p.passes
    once = min(1.0, p.whole_b / (shape.tasks * p.task_b))  # the share that no task read before
    each, stored = nest.taps or positions, nest.b.nbytes
    panel_bytes = stored * nest.kc * nest.row.columns * each / positions / passes
    others = p.whole_b + p.task_a + p.task_c
    before = p.task_b + p.a_block * p.kblocks + p.c_block
    if positions > 1:  # so the readings of three machines say
        others = before = p.whole_b
    weights = (
        # the working set of a B that is not constant is that of one batch: none other was timed
        Stream(panel_bytes * once, stored * k * n, "DRAM" if nest.constant_b else ""),
        Stream(panel_bytes * (1 - once), others),
        Stream(panel_bytes * (passes - 1), before),
    )
    count = shape.task_panels * positions * (p.kblocks if nest.order == "k" else 1)
    return Layer(count, weights, overlapped=nest.prefetch != "none")


def _blocks_of_k(p: _Pieces) -> Layer:
    """The passes of a task over its panels, and the blocks of k of each."""
    nest, k, windows = p.nest, p.nest.extents[3], p.nest.a.windows
    inner, direct = nest.order == "k", nest.a.how == "direct"
    # the share of A that the core did not read before
    first = windows.new if windows else min(1.0, p.target.cores / nest.shape.chunks_n)
    a_bytes = p.task_a / p.passes * (1 if inner else nest.kc / k)
    in_line = direct and nest.a.stride == k and p.kblocks == 1
    return Layer(
        p.passes * (1 if inner else p.kblocks),
        (
            Stream(a_bytes * first, p.whole_a, handed=p.foreign),
            Stream(a_bytes * (1 - first), p.task_a + p.task_b),
        ),
        () if direct else (Stream(p.a_block, p.a_block),),
        overlapped=nest.prefetch != "none" and in_line,
    )


def _tasks(p: _Pieces) -> Layer:
    """The tasks, which store the output.

    A line is fetched before it is written, and the line that it replaces is written back. A
    prefetcher does so from the second line of a run, which is a row of a tile. Stores delay the
    tile unit more: there a run is a row of the task if blocks of rows meet all panels, or if the
    pages of all rows stay at hand until the next panel; and a line of two panels is stored twice.
    A block of more rows than L1 fetches lines at a time waits for the first ones.

    For the tile unit, whose tasks are few and large, last tasks are priced as small as they are.
    For vectors every wave counts as a whole one: their picks and layouts were measured so.
    """
    nest, stored = p.nest, float(ITEM_BYTES[p.nest.out])
    width, run, touched = stored * nest.row.columns, stored * nest.row.columns, p.task_c
    if nest.row.kind.in_tiles:
        pages = p.rows * min(1.0, stored * nest.extents[2] / PAGE)
        run *= nest.shape.task_panels if nest.order == "rows" or pages <= REACH else 1
        touched *= max(1.0, CACHE_LINE / width) * max(1.0, p.height / FILLS)
    fetched = Stream(2 * touched * min(1.0, CACHE_LINE / run), p.whole_c, handed=p.foreign)
    # handed over once as they are stored, and once as the next stage reads them
    stores = fetched, Stream(touched, p.whole_c, handed=2 * p.foreign)
    even = nest.shape.even if nest.row.kind.in_tiles else 1.0
    return Layer(1, (), stores, nest.shape.tasks, even=even)


def spread(stride: int, run: float) -> float:
    """How many times their own room runs of ``run`` bytes take in a cache if they lie ``stride``
    bytes apart. A stride with a large power of two lets all runs begin in few of the sets. The
    address within a page decides; the pages themselves lie anywhere.
    """
    if stride <= run or stride % CACHE_LINE:
        return 1.0
    return max(1.0, gcd(stride, PAGE) / max(run, CACHE_LINE))
