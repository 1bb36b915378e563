"""The loops of attention on a GPU (``device/gtco/attention.cuh``, ``attention_cores.cuh``) as lines
to read.
"""

from __future__ import annotations

from math import ceil, prod

from gtco.tensor.cuda.loops import Loops, before, written
from gtco.tensor.loops import BLOCKS, REGISTERS, WARPS, Line
from gtco.tensor.sketch.attention.cuda_block import Blocking
from gtco.tensor.stage import Operator, Stage


def attention_lines(
    stage: Stage,
    op: Operator,
    extents: tuple[int, int, int, int, int],
    block: Blocking,
    blocks: tuple[int, int, int],
) -> tuple[Line, ...]:
    """The loops of softmax(scale * q k^T + bias) v.

    - ``extents``: batch, queries, keys, the widths of keys and of values;
    - ``blocks``: those along rows, columns and heads.
    """
    b, m, n, d, e = extents
    step = 16 if block.mma else 4  # steps of a product's inner axis
    rows, keys = 16 * block.tiles, block.keys
    loops = Loops()
    cut = f"{block.heads} of {b} heads, {min(block.rows, m)} of {m} queries"
    if blocks[1] > 1:
        cut += f", {block.columns} of {e} columns of v"
    with loops.over("block", prod(blocks), BLOCKS, cut):
        held = ", then registers" if block.held else ""
        loops.says(f"q[{block.rows}, {d}]{_made(stage, op, 0)} -> shared memory{held}")
        ahead = {1: "", 2: "; the next step is copied ahead"}.get(
            block.stages, f"; the next {block.stages - 1} steps are copied ahead"
        )
        with loops.over("step", ceil(n / block.step), text=f"keys, of {n}{ahead}", step=block.step):
            loops.says(f"k[{block.step}, {d}]{_made(stage, op, 1)} -> shared memory")
            loops.says(f"v[{block.step}, {block.columns}]{_made(stage, op, 2)} -> shared memory")
            share = f"{rows} queries by {keys} keys each"
            with loops.over("warp", block.count, WARPS, share):
                inner = ceil(block.depth / step)
                with loops.over("c", inner, REGISTERS, "scores in registers", step):
                    loops.says(f"scores[{rows}, {keys}] += q[{rows}, {step}] x k[{step}, {keys}]")
                bias = " + bias" if len(op.inputs) > 3 else ""
                loops.says(
                    f"scores = exp(scale * scores{bias} - the largest so far); what was summed "
                    "up before is scaled to it"
                )
                with loops.over("key", ceil(keys / step), REGISTERS, "sums in registers", step):
                    left, right = f"scores[{rows}, {step}]", f"v[{step}, {block.columns}]"
                    loops.says(f"C[{rows}, {block.columns}] += {left} x {right}")
        if block.split > 1:
            loops.says(f"C of the {block.split} shares of the keys is added up in shared memory")
        loops.says(written(stage, op.output, "C / sum of the exponentials"))
    return loops.lines


def _made(stage: Stage, op: Operator, which: int) -> str:
    """What makes an operand inside the stage, in words."""
    made = before(stage, op.inputs[which])
    return f", with {made}" if made else ""
