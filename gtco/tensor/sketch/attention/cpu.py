"""Sketch rule for fused attention, structure SSSR-RSRS (GTCO, Section IV-D): scores never leave the
cache.

::

    for task in batch x row chunks x heads:                       # parallel
      pack K transposed [n / lanes, d, lanes], V [n, e]           # once a task, stays in L2
      for block of mr (or mr - 1) query rows:
        scores[mr, n] = scale * Q[mr, d] x K^T[d, n]              # micro-kernel, L1
        scores = exp(scores + bias - rowmax); sum                 # softmax of whole rows, as 2^x
        tile[mr, e] = scores[mr, n] x V[n, e]; epilogue(tile / sum) -> output

Whole rows of scores are kept (mr x n floats). Blocks of keys with an online softmax would save
nothing while the rows fit the L2 cache. On a Zen 4, equally many products with 224, 464, 688 and
1370 keys of width 64 take the same time within 3 %, though only the first two leave the scores in
L1. In C on a Granite Rapids, 1376 keys in tiles take 0.96 to 1.19 of the time in blocks of 64 to
352 keys. They take as long if the weights of a block of rows are computed beside the products of
the next one: such a product occupies one of the two units that compute vectors.

Where K and V do not fit L2 themselves, ``mc`` blocks of rows share a pass over each::

    for mc blocks of mr rows:
      for vectors of keys that a micro-kernel multiplies by:      # read from far once, then from L1
        for block: scores = scale * Q x K^T
      for block: softmax of its rows
      for 64 keys:                                                # the same
        for block: tile += scores x V

4097 keys of width 64 take 0.82 of the time with four blocks on a Granite Rapids (2 MB of L2), 2049
keys the same time. Tiles do not do this: a pass over blocks of two heights would configure the unit
again and again.

A row that a mask hides completely gets the value that the single operators give: the mean of V if
the mask is finite, NaN if it is -inf, and 0 if a guard follows the softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import ancestors, anchor, bytes_read, epilogue, prologue_readable
from gtco.tensor.cost import epilogue_vectors, vectors
from gtco.tensor.emit.vector_math import AVX512_LANES
from gtco.tensor.intrinsics.table import MicroKernel, micro_kernels, packable
from gtco.tensor.intrinsics.tiles import CONFIGURING
from gtco.tensor.nest.nest import packed_steps
from gtco.tensor.nest.shape import TaskShape
from gtco.tensor.sketch.attention.facts import AttentionFacts, together_of
from gtco.tensor.sketch.attention.loops import KEYS, AttentionLoops
from gtco.tensor.sketch.shared.program import program
from gtco.tensor.sketch.shared.tiling import chunk_options, tile_decision, tile_options
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage
from gtco.tensor.workload import Extra, Layer, Stream, Workload

# Blocks of rows may share passes over K and V where these have more bytes in one head, as float32,
# or more than the L2 cache. So many blocks may do so.
LARGE, TOGETHER = 1 << 20, (1, 2, 4, 8)
# Vector instructions for a vector of weights: maximum, difference, power of 2 and sum, by the dtype
# in which the weights are multiplied (fewer if AVX-512 has instructions for it); for rounding it to
# that dtype; and for adding a bias to the scores.
WEIGHTS = {"float32": 15.0, "bfloat16": 13.0}
FEWER = 4.0
ROUNDING = {"float32": 0.0, "bfloat16": 3.0}
BIAS = 4.0


def match(stage: Stage, target: Target) -> Attention | None:
    """The stage as one ``attention`` with readable operands and a one-to-one epilogue, or None."""
    op = anchor(stage, "attention")
    if op is None:
        return None
    types = [stage.types[x] for x in op.inputs] + [op.type, stage.output.type]
    if any(isinstance(d, str) or d == 0 for t in types for d in t.shape):
        return None
    products, sums = {t.dtype for t in types[:3]}, {t.dtype for t in types[3:-1]}
    if products not in ({"float32"}, {"bfloat16"}) or sums != {"float32"}:
        return None
    if types[-1].dtype not in ("float32", "bfloat16", "uint8", "int8"):
        return None
    if not prologue_readable(stage, op.inputs):
        return None
    tail = epilogue(stage, op.output)
    return Attention(stage, target, tail) if tail else None


@dataclass(frozen=True)
class Attention(AttentionFacts):
    """softmax(scale * q k^T + bias) v over the batch axes; see the module's text for the loops."""

    name = "attention"
    structure = "SSSR-RSRS"

    @property
    def flops(self) -> float:
        b, m, n, d, e = self.extents
        return 2.0 * b * m * n * (d + e)

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "tile" not in chosen:
            return self.tile_decision
        if "chunks_m" not in chosen:
            m = self.extents[1]
            blocks = ceil(m / MicroKernel.parse(str(chosen["tile"]), 1).rows)
            return Decision("chunks_m", "parallel", chunk_options(blocks, self.target.cores))
        if "mc" not in chosen and self.may_share:
            tile = MicroKernel.parse(str(chosen["tile"]), self.target.lanes)
            blocks = ceil(ceil(self.extents[1] / tile.rows) / int(chosen["chunks_m"]))
            most = 1 if tile.kind.in_tiles else blocks
            return Decision("mc", "block", tuple(n for n in TOGETHER if n <= most), unsaid=1)
        return None

    @property
    def may_share(self) -> bool:
        """True if blocks of rows may share passes over K and V, which may not fit the L2 cache."""
        _, _, n, d, e = self.extents
        return 4 * n * (d + e) > min(LARGE, self.target.level("L2").capacity)

    @cached_property
    def tile_decision(self) -> Decision:
        _, m, _, _, e = self.extents
        rows = tile_options(packable(micro_kernels(self.target, self.operand)), m, e)
        return tile_decision(rows, rows=m)

    def workload(self, config: Config) -> Workload:
        b, m, n, d, e = self.extents
        tile = MicroKernel.parse(config["tile"], self.target.lanes)
        lanes, chunks = tile.lanes, config["chunks_m"]
        blocks = ceil(m / tile.rows)
        height = m / blocks  # the average of the blocks' two heights
        keys, values = ceil(n / lanes), ceil(e / lanes)
        item_out = float(ITEM_BYTES[self.stage.output.type.dtype])
        # K and V in scratch, whose elements are float32 or pairs, with what fills vectors up
        steps = (keys * packed_steps(d, tile.kind)[0], values * packed_steps(n, tile.kind)[0])
        operands, scores = 4.0 * lanes * sum(steps), 4.0 * height * n
        own, together = ceil(blocks / chunks), together_of(config)
        stores = (Stream(item_out * height * e, item_out * m * e, handed=self.foreign(chunks)),)
        if together == 1:
            # Beside tiles, whose products take little time, scores count: they are stored, read for
            # their maximum and for the weights, and these are stored and read with each part of V.
            beside = int(tile.kind.in_tiles)
            weights = ITEM_BYTES[self.operand] * height * n
            parts = ceil(values / min(tile.vectors, values))
            read = Stream(beside * (2 * scores + parts * weights), operands + scores)
            stored = Stream(beside * (scores + weights), operands + scores)
            layers = [Layer(own, (Stream(operands, operands + scores), read), (*stores, stored))]
        else:
            # Scores pass through the cache that holds those of all blocks: they are stored twice
            # and read three times. The sums of V do so once for each block of keys.
            held, sums = together * scores, 4.0 * height * e
            passing = Stream(3 * scores, held), Stream(2 * scores, held)
            again = Stream(ceil(n / KEYS) * sums, together * sums)
            near = max(tile.columns * d, KEYS * e) * ITEM_BYTES[self.operand]
            loads = (Stream(operands, near), passing[0], again)
            passes = ceil(own / together)
            layers = [
                Layer(own / passes, loads, (*stores, passing[1], again)),
                Layer(passes, (Stream(operands, operands + held),)),
            ]
        keys_values = Stream(self.read_bytes, b * self.read_bytes, handed=self.foreign(1))
        task = Layer(1, (keys_values,), (), b * chunks, overlapped=False)
        behind = epilogue_vectors(self.tail, lanes)
        row = replace(tile, rows=ceil(height), vectors=min(tile.vectors, values))
        shape = self.shape(config)
        covered = shape.covered(tile, blocks) / blocks
        return Workload(
            row.kernel,
            covered * (keys * tile.steps(d) + values * tile.steps(n)) / tile.kind.products,
            (*layers, task),
            self.flops,
            self.extra(chunks, tile, shape),
            (
                Extra("store", b * m * values, 3.0),
                Extra("vector", b * m * values, behind.vector),
                Extra("exp", b * m * values, behind.exp),
            ),
        )

    @cached_property
    def heads(self) -> tuple[list[Operator], ...]:
        """The operators that compute q, k and v in the stage."""
        return tuple(ancestors(self.stage, x) for x in self.op.inputs[:3])

    @cached_property
    def head_vectors(self) -> tuple[float, ...]:
        """Vector instructions that the stage spends on computing a vector of q, k and v."""
        return tuple(vectors(self.stage, head, self.target.lanes).total for head in self.heads)

    @cached_property
    def read_bytes(self) -> float:
        """Bytes that are read for K and V of one head, before the stage computes anything from
        them.
        """
        _, _, n, d, e = self.extents
        keys, values = (bytes_read(self.stage, x) for x in self.op.inputs[1:3])
        return n * (keys * d + values * e)

    def extra(self, chunks: int, tile: MicroKernel, shape: TaskShape) -> tuple[Extra, ...]:
        """The work beside the products: packing K and V, the operators on q, k and v, and softmax,
        with scaling and configuring in the tile unit.
        """
        b, m, n, d, e = self.extents
        lanes, head = self.target.lanes, self.head_vectors
        keys = ceil(n / lanes)
        bias = keys * BIAS if len(self.op.inputs) > 3 else 0
        rounding = keys * ROUNDING[self.operand]
        fewer = FEWER if lanes == AVX512_LANES else 0.0
        return (
            Extra("pack", 3.0 * b * chunks * keys * (d + e)),
            Extra("vector", b * m * ceil(d / lanes), head[0]),
            Extra("vector", b * chunks * keys * d, head[1]),
            Extra("vector", b * chunks * keys * e, head[2]),
            Extra("exp", b * m, keys * (WEIGHTS[self.operand] - fewer)),
            Extra("vector", b * m, bias + rounding + 40),
            Extra("vector", b * m * keys if tile.kind.in_tiles else 0),
            Extra("fma", CONFIGURING * shape.configurations(tile, shape.tasks, b)),
        )

    @property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the loops' price depend on."""
        dtype = self.stage.output.type.dtype
        return (self.name, self.operand, dtype, self.read_bytes, *self.extents)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        loops = AttentionLoops(self, config)
        tasks, scratch = loops.shape.tasks, loops.scratch
        return program(symbol, self.stage, self.target, tasks, loops.emit, scratch)
