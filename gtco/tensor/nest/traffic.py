"""The traffic of a nest: what each level of its loops loads and stores, how often, from where.

A stream's working set is what a core uses between two uses of the same bytes (Helix eq. 1).
"""

from __future__ import annotations

from math import gcd

from gtco.machine.target import CACHE_LINE, Target
from gtco.tensor.nest.nest import Nest
from gtco.tensor.stage import ITEM_BYTES
from gtco.tensor.workload import Layer, Stream

PAGE = 4096  # bytes of the addresses that choose a set of L1
FILLS = 16  # lines that L1 fetches at a time on a Golden Cove (Intel's optimization manual)
REACH = 64  # pages whose addresses a core keeps at hand; it has room for 96 on a Granite Rapids


def layers(nest: Nest, target: Target) -> tuple[Layer, ...]:
    """The layers of a nest, inner to outer: row blocks, panels, blocks of k and passes, tasks.

    B's panels are prefetched, so that they are under way while products are computed. So are rows
    of A that follow each other in an input. Products wait for the rest: other first reads of A,
    partial sums, and the output.
    """
    batch, m, n, k = nest.extents
    tile, shape, kc, held, passes = nest.row, nest.shape, nest.kc, nest.held, nest.passes
    kblocks, panels, columns = nest.kblocks, shape.task_panels, tile.columns
    (positions, outputs), windows = nest.transform, nest.a.windows
    inner = nest.order == "k"  # blocks of k, inside of panels
    ahead = nest.prefetch != "none"
    # bytes of an element of A, B and C when it is multiplied, and in the tensors
    item_a, item_b, item_c = float(tile.kind.a.nbytes), tile.kind.b.item, 4.0
    stored_a, stored_b, stored_c = nest.a.nbytes, nest.b.nbytes, float(ITEM_BYTES[nest.out])
    rows = shape.task_rows / passes
    height = rows / held  # the average of the blocks' two heights
    different = 1 + (height - 1) * (windows.fresh if windows else 1)  # rows, without overlaps
    a_tile, b_panel = item_a * different * kc, item_b * kc * columns
    c_tile = item_c * height * columns
    direct = nest.a.how == "direct"
    stride = int(nest.a.stride * item_a) if direct else 0
    room = spread(stride, item_a * kc)
    together = 1 if inner or positions > 1 else panels  # panels whose sums are kept
    a_block = item_a * (windows.copied if windows else room * positions * rows * kc)
    c_block = item_c * positions * (height if nest.by_block else rows) * together * columns

    # Rows whose lines share few sets of L1 evict each other, and the next iteration loads the part
    # that does not fit again.
    lines = height * CACHE_LINE * spread(stride, CACHE_LINE)
    lost = max(0.0, 1.0 - target.level("L1").capacity / lines)
    again = 1.0 + lost * (CACHE_LINE / (item_a * tile.kind.step) - 1.0)
    kept = 1.0 if positions > 1 else (kblocks - 1) / kblocks  # the share of sums for later
    # The next panel arrives while this one is used, and takes as much room. Beside tiles it takes
    # none in L1, so readings say: it is fetched to L2, and one panel lasts for few products.
    a_set = a_block + 2 * b_panel + c_tile * (held if kept else 1)
    b_set = (1 if tile.kind.in_tiles else 2) * b_panel + room * a_tile + c_tile
    if inner and not windows:  # rows are read again after all blocks of k
        a_set += item_a * spread(stride, item_a * k) * positions * rows * k - a_block
    if positions > 1:  # B streams by: few blocks of rows use a panel before the next one
        a_set, b_set = a_block + c_block, b_panel + a_tile
        if nest.taps:  # all positions of a panel lie in scratch
            b_set = positions * b_panel + a_tile
        if nest.by_block:  # the next block of rows reads all positions of the panel again
            a_set, b_set = a_set + positions * b_panel, positions * (b_panel + a_tile) + c_block
    partial = Stream(2 * c_tile * kept, c_block + a_block + b_panel * together)  # stored and loaded
    micro = Layer(
        held, (Stream(a_tile * again, a_set), Stream(b_panel, b_set)), (partial,) if kept else ()
    )

    task_a = stored_a * (windows.copied if windows else shape.task_rows * k * outputs)
    each = nest.taps or positions  # numbers of an element of B that are stored
    task_b = stored_b * each * k * panels * columns
    task_c = stored_c * outputs * shape.task_rows * min(panels * columns, n)
    whole_a = stored_a * (windows.whole if windows else batch * m * k * outputs)
    whole_b = stored_b * each * k * n * batch / nest.b.batches
    whole_c = stored_c * outputs * batch * m * n
    once = min(1.0, whole_b / (shape.tasks * task_b))  # the share that no task read before
    panel_bytes = stored_b * kc * columns * each / positions / passes
    others, before = whole_b + task_a + task_c, task_b + a_block * kblocks + c_block
    if positions > 1:  # so the readings of three machines say
        others = before = whole_b
    weights = (
        # the working set of a B that is not constant is that of one batch: none other was timed
        Stream(panel_bytes * once, stored_b * k * n, "DRAM" if nest.constant_b else ""),
        Stream(panel_bytes * (1 - once), others),
        Stream(panel_bytes * (passes - 1), before),
    )
    panel = Layer(panels * positions * (kblocks if inner else 1), weights, overlapped=ahead)

    # the share of A that the core did not read before
    first = windows.new if windows else min(1.0, target.cores / shape.chunks_n)
    a_bytes = task_a / passes * (1 if inner else kc / k)
    block = Layer(
        passes * (1 if inner else kblocks),
        (
            Stream(a_bytes * first, whole_a, handed=True),
            Stream(a_bytes * (1 - first), task_a + task_b),
        ),
        () if direct else (Stream(a_block, a_block),),
        overlapped=ahead and direct and nest.a.stride == k and kblocks == 1,
    )
    # A line is fetched before it is written, and the line that it replaces is written back. A
    # prefetcher does so from the second line of a run, which is a row of a tile. Stores delay the
    # tile unit more: there a run is a row of the task if blocks of rows meet all panels, or if the
    # pages of all rows stay at hand until the next panel; and a line of two panels is stored twice.
    # A block of more rows than L1 fetches lines at a time waits for the first ones.
    width, run, touched = stored_c * columns, stored_c * columns, task_c
    if tile.kind.in_tiles:
        pages = rows * min(1.0, stored_c * n / PAGE)
        run *= panels if nest.order == "rows" or pages <= REACH else 1
        touched *= max(1.0, CACHE_LINE / width) * max(1.0, height / FILLS)
    fetched = Stream(2 * touched * min(1.0, CACHE_LINE / run), whole_c, handed=True)
    task = Layer(1, (), (fetched, Stream(touched, whole_c, handed=True)), shape.tasks)
    return micro, panel, block, task


def spread(stride: int, run: float) -> float:
    """How many times their own room runs of ``run`` bytes take in a cache if they lie ``stride``
    bytes apart. A stride with a large power of two lets all runs begin in few of the sets. The
    address within a page decides; the pages themselves lie anywhere.
    """
    if stride <= run or stride % CACHE_LINE:
        return 1.0
    return max(1.0, gcd(stride, PAGE) / max(run, CACHE_LINE))
