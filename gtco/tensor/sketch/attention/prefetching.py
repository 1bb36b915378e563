"""The lines that attention asks for ahead: other cores may have them, and its rows lie far apart in
memory, so that no hardware prefetcher follows them.
"""

from __future__ import annotations

from math import ceil

from gtco.machine.target import CACHE_LINE
from gtco.tensor.analysis.indices import broadcast_index
from gtco.tensor.emit.emitter import Array, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.sketch.attention.facts import AttentionFacts
from gtco.tensor.stage import ITEM_BYTES, item_bytes


def ask_for_outputs(reader: Reader, sketch: AttentionFacts, output: Array, row: list[Expr]) -> None:
    """Prefetches the lines that the row's outputs will be stored to."""
    line = CACHE_LINE // ceil(item_bytes(output.dtype))
    with reader.emitter.loop(ceil(sketch.extents[4] / line), "line") as n:
        reader.prefetch(sketch.tail, [*row, n * line], output)


def ask_for_next_head(reader: Reader, sketch: AttentionFacts, row: list[Expr]) -> None:
    """Prefetches a row of q, k and v of the next head, while softmax computes."""
    *_, d, e = sketch.extents
    for name, width in zip(sketch.op.inputs[:3], (d, d, e), strict=True):
        line = CACHE_LINE // ITEM_BYTES[sketch.operand]
        with reader.emitter.loop(ceil(width / line), "line") as n:
            where = broadcast_index([*row, n * line], reader.shape(name))
            reader.prefetch_value(name, where)
