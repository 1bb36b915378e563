"""The traffic of a nest: what each level of its loops loads and stores, how often, from where."""

from __future__ import annotations

from math import ceil

from gtco.tensor.nest.nest import Nest
from gtco.tensor.stage import ITEM_BYTES
from gtco.tensor.workload import Layer, Stream


def layers(nest: Nest) -> tuple[Layer, ...]:
    """The layers of a nest, inner to outer: row blocks, panels, blocks of k and passes, tasks."""
    batch, m, n, k = nest.extents
    tile, shape, kc, held, passes = nest.row, nest.shape, nest.kc, nest.held, nest.passes
    # bytes of an element of A, B and C when it is multiplied, and in the tensors
    item_a, item_b, item_c = float(tile.kind.a.nbytes), float(tile.kind.b.nbytes), 4.0
    item, stored_b, item_out = (
        float(nest.a.nbytes),
        float(nest.b.nbytes),
        float(ITEM_BYTES[nest.out]),
    )
    rows, panels, columns = shape.task_rows / passes, shape.task_panels, tile.columns
    height = rows / held  # the average of the blocks' two heights
    a_tile, b_panel = item_a * height * kc, item_b * kc * columns
    c_tile = item_c * height * columns
    a_stream = Stream(a_tile, item_a * rows * kc)
    if nest.a.how == "direct":
        conflicts = nest.a.stride * item_a % 4096 == 0 and height > 8
        followed = nest.prefetch != "none" and nest.a.stride == k and nest.kblocks == 1
        a_stream = Stream(
            a_tile * (tile.lanes if conflicts else 1),
            item_a * rows * kc,
            chains=0 if followed else ceil(height),
        )
    partial = (Stream(c_tile, item_c * rows * panels * columns),) if nest.kblocks > 1 else ()
    micro = Layer(held, (a_stream, Stream(b_panel, b_panel + a_tile), *partial), partial)
    once = nest.constant_b and passes == 1
    weights = Stream(stored_b * kc * columns, stored_b * k * n, "DRAM" if once else "")
    panel = Layer(panels, (weights,), overlapped=nest.prefetch != "none")
    packed = Stream(item * rows * kc, item * batch * m * k, handed=True)
    copies = (packed,), (Stream(item_a * rows * kc, item_a * rows * kc),)
    block = Layer(nest.kblocks * passes, *(copies if nest.a.how == "packed" else ()))
    written = item_out * shape.task_rows * panels * columns
    result = Stream(written, item_out * batch * m * n, handed=True)
    return micro, panel, block, Layer(1, (), (result,), shape.tasks)
