"""Sketch rule for fused attention on GPUs, structure SSSR-RSRS (GTCO, Algorithm 3). Scores go from
the first product to the second in registers, in blocks of keys (online softmax), for any number of
tokens and any widths of the heads.

The loops are those of ``device/gtco/attention.cuh`` (Tensor Cores: float16, and bfloat16 from sm_80
on) and ``attention_cores.cuh`` (CUDA cores: the other dtypes). The space decides their template
arguments. The printed lambdas say how this stage reads its operands, adds a bias to its scores and
stores its result. Masks mean the same as in :mod:`gtco.tensor.sketch.attention.cpu`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, isinf, prod

import numpy as np

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import (
    Epilogue,
    ancestors,
    anchor,
    epilogue,
    prologue_readable,
)
from gtco.tensor.analysis.indices import broadcast_index, reshape_index
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cost import epilogue_vectors, vectors
from gtco.tensor.cuda import neighbours
from gtco.tensor.cuda.arguments import Arguments, arguments
from gtco.tensor.cuda.lambdas import address, addressable, store, value
from gtco.tensor.cuda.pieces import in_pieces, row_stride
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.cuda.spelling import CTYPES
from gtco.tensor.sketch.attention.cuda_block import Blocking
from gtco.tensor.sketch.attention.cuda_loops import attention_lines
from gtco.tensor.sketch.shared.cuda_streaming import number
from gtco.tensor.space import Config, Decision, Option, Rejection, Role
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage

WARPS = 8  # most warps of a block
# Registers of a thread, estimated: it can address 255, and NVRTC takes a few more or fewer
REGISTERS = 240
WAITING = 0.375  # registers of a lane for waiting biases, for each 16 rows and each key
SCORE = 12.0  # float32 operations of a score: an exponential counts as 8, maximum, sum, rounding
MEANWHILE = 7.0  # so many of these 8 pass beside products of Tensor Cores: it is one instruction
LANES = 16  # element-wise operators are counted for so many lanes; each lane counts as one
BIAS = 6.0  # float32 operations of a score's bias: an address, a load, an addition
# What a lane does in a step on Tensor Cores, whatever the number of its keys: for each 16 rows the
# maxima of two among 4 lanes, and whether they grew; and waiting, votes, addresses of fragments.
MAXIMA, STEP = 14.0, 50.0
MERGED = 4.0  # operations of a sum of a share of the keys: stored, read and added up
KEYS = (8, 16, 32, 64, 128)  # keys that a warp takes in a step
_LEAST: Mapping[str, Option] = dict(
    query="shared", tiles=1, warps=1, split=1, heads=1, stages=1
)


def match(stage: Stage, target: GpuTarget) -> CudaAttention | None:
    """The stage as one ``attention`` with readable operands and a one-to-one epilogue, if one of
    its blocks fits the target; else None.
    """
    op = anchor(stage, "attention")
    if op is None:
        return None
    types = [stage.types[x] for x in op.inputs] + [op.type, stage.output.type]
    if any(isinstance(d, str) or d == 0 for t in types for d in t.shape):
        return None
    products = {t.dtype for t in types[:3]}
    if products not in ({"float32"}, {"float16"}, {"bfloat16"}):
        return None
    if any(t.dtype not in ("float32", "float16", "bfloat16") for t in types):
        return None
    if not prologue_readable(stage, op.inputs):
        return None
    tail = epilogue(stage, op.output)
    sketch = CudaAttention(stage, target, tail) if tail else None
    return sketch if sketch and all(sketch._options(n, {}) for n in sketch._names) else None


@dataclass(frozen=True)
class CudaAttention:
    """softmax(scale * q k^T + bias) v over the batch axes; see the module's text for the loops."""

    stage: Stage
    target: GpuTarget
    tail: Epilogue

    name = "attention"
    structure = "SSSR-RSRS"
    _names = ("columns", "query", "tiles", "keys", "warps", "split", "heads", "stages")

    @property
    def op(self) -> Operator:
        return self.stage.producers[self.tail.anchor]

    @property
    def operand(self) -> str:
        """The dtype of q, k and v."""
        return self.stage.types[self.op.inputs[0]].dtype

    @property
    def unit(self) -> str:
        """The unit that multiplies: Tensor Cores if the target has them for the operands' dtype."""
        mma = f"mma:{self.operand}"
        old = self.operand == "bfloat16" and self.target.generation < 80
        return mma if self.target.rate(mma) and not old else "fma"

    @property
    def mma(self) -> bool:
        return self.unit != "fma"

    @property
    def extents(self) -> tuple[int, int, int, int, int]:
        """(batch, queries m, keys n, width of keys d, width of values e)."""
        q, v = (self.stage.types[self.op.inputs[i]].sizes for i in (0, 2))
        return prod(self.op.type.sizes[:-2]), q[-2], v[-2], q[-1], v[-1]

    @cached_property
    def computed_bias(self) -> bool:
        """True if the bias is computed from several tensors, as decomposed positions are."""
        made = ancestors(self.stage, self.op.inputs[3]) if len(self.op.inputs) > 3 else ()
        return any(len(op.inputs) > 1 for op in made)

    @cached_property
    def addressed(self) -> bool:
        """True if pieces of k and v lie in memory as they are."""
        *_, d, e = self.extents
        k, v = self.op.inputs[1:3]
        return d % 8 == e % 8 == 0 and addressable(self.stage, k) and addressable(self.stage, v)

    @property
    def flops(self) -> float:
        b, m, n, d, e = self.extents
        return 2.0 * b * m * n * (d + e)

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        roles: dict[str, Role] = {
            "columns": "block",
            "query": "operand",
            "tiles": "registers",
            "keys": "block",
            "warps": "block",
            "split": "parallel",
            "heads": "grain",
            "stages": "overlap",
        }
        for name in self._names:
            if name not in chosen:
                return Decision(name, roles[name], self._options(name, chosen))
        return None

    def _options(self, name: str, chosen: Mapping[str, Option]) -> tuple[Option, ...]:
        """The options that fit the target if every decision not yet made takes its least option."""
        own: dict[str, Option] = {"columns": self._columns()[-1], "keys": self._keys[0]}
        least = {**_LEAST, **own, **chosen}
        found = [o for o in self._candidates(name, least) if self._fits({**least, name: o})]
        return tuple(found)

    def _candidates(self, name: str, chosen: Mapping[str, Option]) -> Sequence[Option]:
        b, m, n, _, _ = self.extents
        tiles, keys, warps, split = (int(chosen[x]) for x in ("tiles", "keys", "warps", "split"))
        match name:
            case "columns":
                return self._columns()
            case "query":
                return ("registers", "shared") if self.mma else ("shared",)
            case "tiles":
                return (1, 2) if m > 16 else (1,)
            case "keys":
                return _up_to(n, self._keys)
            case "warps":
                return _up_to(ceil(m / (16 * tiles)), (1, 2, 4, 8))
            case "split":
                return [s for s in (1, 2, 4, 8) if s <= ceil(n / keys)]
            case "heads":  # several in a block if one head has few rows
                return [h for h in (1, 2, 4, 8) if h <= b and (h == 1 or m <= 16 * tiles * warps)]
        return [s for s in (2, 3, 1) if s == 1 or s <= ceil(n / (keys * split))]

    @property
    def _keys(self) -> tuple[int, ...]:
        return KEYS[1:] if self.mma else KEYS[:-1]

    def _columns(self) -> tuple[int, ...]:
        """The numbers of columns of v that a block may have. All columns are one option if their
        sums leave enough registers for the rest. Blocks with a part of the columns compute the
        scores again.
        """
        *_, e = self.extents
        unit = 8 if self.mma else 4
        whole = -(-e // unit) * unit
        most = 256 if self.mma else 128
        return (whole,) if whole <= most else (most, most // 2)

    def _fits(self, chosen: Mapping[str, Option]) -> bool:
        block = self.blocking(chosen)
        threads = 32 * block.count
        # biases of several steps wait beside the scores, if the compiler has registers for them
        waiting = (len(self.op.inputs) > 3) * (not block.once) * WAITING * block.tiles * block.keys
        return (
            block.count <= WARPS
            and block.shared <= self.target.shared
            and block.registers + waiting <= REGISTERS
            and block.registers <= self.target.registers_sm // threads
        )

    def blocking(self, chosen: Mapping[str, Option]) -> Blocking:
        _, _, n, d, _ = self.extents
        unit = 16 if self.mma else 4
        numbers = ("columns", "tiles", "warps", "split", "heads", "keys", "stages")
        return Blocking(
            mma=self.mma,
            item=2 if self.mma else 4,
            depth=-(-d // unit) * unit,
            held=chosen["query"] == "registers",
            once=n <= int(chosen["keys"]) * int(chosen["split"]),
            addressed=self.addressed,
            computed=self.computed_bias,
            **{name: int(chosen[name]) for name in numbers},
        )

    # its price ------------------------------------------------------------------------------------
    def blocks(self, block: Blocking) -> tuple[int, int, int]:
        """The number of blocks along the rows, the columns and the heads."""
        b, m, _, _, e = self.extents
        return ceil(m / block.rows), ceil(e / block.columns), ceil(b / block.heads)

    def workload(self, config: Config) -> Launch:
        b, m, n, d, e = self.extents
        block = self.blocking(config.by_name)
        rows, columns, heads = self.blocks(block)
        # warps without a row or a key of the problem have nothing to do
        high = ceil(m / (16 * block.tiles)) * 16 * block.tiles
        wide = ceil(n / block.keys) * block.keys
        scores = float(b * columns * high * wide)
        item = ITEM_BYTES[self.operand]
        biased = len(self.op.inputs) > 3
        operands = item * float(b * columns) * (rows * n * (d + block.columns) + m * d)
        warp_steps = scores / (16 * block.tiles * block.keys)
        steps = ceil(n / block.step)
        count = rows * columns * heads
        if self.mma:  # sums are scaled in a few steps alone
            looping = 32 * warp_steps * (STEP + MAXIMA * block.tiles)
            looping += count * steps * block.copying
        else:
            looping = b * columns * high * block.width * ceil(n / block.keys)
        merged = count * MERGED * block.merged
        written = float(self.stage.output.type.nbytes)
        return Launch(
            blocks=count,
            threads=32 * block.count,
            shared=block.shared,
            registers=block.registers,
            unit=self.unit,
            work=2.0 * scores * (block.depth + block.width),
            vector=scores * (SCORE - MEANWHILE * self.mma + BIAS * biased)
            + looping
            + merged
            + b * m * e * (3.0 + self._tail_vectors)
            + self._prologue(rows, columns),
            read=float(self.stage.input_bytes),
            written=written,
            traffic=operands + written + biased * 4.0 * b * columns * m * n,
            flops=self.flops,
            overlapped=block.stages > 1,
            staged=warp_steps * block.staged,
            steps=steps,
            ahead=max(1, block.stages - 1),
        )

    def _prologue(self, rows: int, columns: int) -> float:
        """Operations that compute q, k and v; every block that reads an operand repeats them."""
        b, m, n, d, e = self.extents
        read = (columns * m * d, columns * rows * n * d, rows * n * e)
        return sum(b * count * each for count, each in zip(read, self._head_vectors, strict=True))

    @cached_property
    def _tail_vectors(self) -> float:
        """Operations of the epilogue on one element."""
        return epilogue_vectors(self.tail, LANES).total

    @cached_property
    def _head_vectors(self) -> tuple[float, ...]:
        """Operations that compute an element of q, of k and of v."""
        before = (ancestors(self.stage, tensor) for tensor in self.op.inputs[:3])
        return tuple(vectors(self.stage, each, LANES).total for each in before)

    @property
    def signature(self) -> tuple[object, ...]:
        """All values that the space and the loops' price depend on."""
        reads = self.addressed, len(self.op.inputs) > 3, self.computed_bias
        return (self.name, self.operand, self.stage.output.type.dtype, *self.extents, *reads)

    # the program ----------------------------------------------------------------------------------
    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        b, m, n, d, e = self.extents
        block = self.blocking(config.by_name)
        args = arguments(self.stage)
        read = [
            self._reads(args, which, name, params)
            for which, name, params in (
                (0, "q", (("b", b), ("m", m), ("c", d))),
                (1, "k", (("b", b), ("n", n), ("c", d))),
                (2, "v", (("b", b), ("n", n), ("c", e))),
            )
        ]
        scores, (stored, storing) = self._scores(args), self._stores(args)
        guarded = ", true" if self.op.get("guarded") else ""
        function = "attention" if self.mma else "attention_cores"
        ways = ", ".join(f"gtco::{way}({name})" for (_, way), name in zip(read, "qkv", strict=True))
        call = (
            f"using Shape = gtco::AttentionShape<{b}, {m}, {n}, {d}, {e}{guarded}>;\n"
            f"using Block = gtco::AttentionBlock<{block.arguments}>;\n"
            f"gtco::{function}<{CTYPES[self.operand]}, Shape, Block>(\n"
            f"    block, {ways}, score, {storing}(store));"
        )
        about = (
            f"{b} heads, {m} x {n} tokens of {d} and {e}; a block of {block.heads} x {block.rows} "
            f"rows, steps of {block.step} keys"
        )
        text = source(
            symbol,
            self.stage,
            (f"{function}.cuh", neighbours.HEADER),
            (*(text for text, _ in read), scores, stored),
            call,
            32 * block.count,
            about,
            side_by_side=1,  # if NVRTC chooses the number itself, it spills a few registers
        )
        blocks = self.blocks(block)
        lines = attention_lines(self.stage, self.op, self.extents, block, blocks)
        grid = (prod(blocks), 1, 1)
        return CudaProgram(
            text, grid, 32 * block.count, block.shared, registers=block.registers, lines=lines
        )

    def _of_result(self, index: Sequence[Expr]) -> list[Expr]:
        """(flat batch, row, column) -> an index of the operator's output."""
        lead = self.op.type.sizes[:-2]
        return [*reshape_index([index[0]], [prod(lead)], lead), *index[1:]]

    def _of_operand(self, which: int, index: Sequence[Expr]) -> list[Expr]:
        """(flat batch, row, column) -> an index of q, k, v or the bias."""
        shape = self.stage.types[self.op.inputs[which]].sizes
        return broadcast_index(self._of_result(index), shape)

    def _reads(
        self, args: Arguments, which: int, name: str, params: tuple[tuple[str, int], ...]
    ) -> tuple[str, str]:
        """The lambda that reads q, k or v, and the way it is called. It gives addresses if pieces
        of 16 bytes lie in memory as the kernel needs them. Else it gives values, a piece at once if
        rows are whole pieces.
        """
        tensor, extents = self.op.inputs[which], [extent for _, extent in params]
        piece = 8 if self.mma else 4
        if extents[-1] % piece:
            text = value(
                args, self.stage, tensor, name, params, lambda at: self._of_operand(which, at)
            )
            return text, "valued"
        stored = self.mma or self.operand == "float32"  # the dtype that tiles hold
        index = partial(self._of_operand, which)
        if stored and in_pieces(self.stage, tensor, extents, index, piece):
            stride = row_stride(self.stage, tensor, extents, index) if name != "q" else None
            way = "addressed" if stride is None else f"evenly_addressed<{stride}>"
            return address(args, self.stage, tensor, name, params, index), way
        pieces = (*params[:2], ("p", extents[-1] // piece))
        text = neighbours.reading(
            args,
            self.stage,
            tensor,
            name,
            pieces,
            lambda b, row, p, v: index((b, row, p * piece + v)),
            piece,
        )
        return text, "pieced"

    def _stores(self, args: Arguments) -> tuple[str, str]:
        """The lambda that stores the result, and the way it is called: with the neighbours that a
        lane holds at once.
        """
        b, m, _, _, e = self.extents
        run = 2 if self.mma else 4
        if e % run:
            params = (("b", b), ("m", m), ("c", e))
            text = store(args, self.stage, self.tail, "store", params, self._of_result)
            return text, "gtco::stored_ones"
        text = neighbours.storing(
            args,
            self.stage,
            self.tail,
            "store",
            (("b", b), ("m", m), ("p", e // run)),
            lambda b, m, p, v: self._of_result((b, m, p * run + v)),
            run,
        )
        return text, f"gtco::stored_runs<{run}>"

    def _scores(self, args: Arguments) -> str:
        """``score``: a positive scale alone, or a function that also adds the bias to a product."""
        scale = float(np.float32(self.op["scale"]))
        if len(self.op.inputs) == 3:
            if scale > 0.0 and not isinf(scale):
                return f"gtco::Scaled score{{{_literal(scale)}}};"
            made = f"return product * {_literal(scale)};"
            head = "auto score = gtco::scored([=](int, int, int, float product)"
            return f"{head} {{ {made} }});"
        b, m, n, _, _ = self.extents
        params = (("b", b), ("m", m), ("n", n))
        bias = value(
            args, self.stage, self.op.inputs[3], "bias", params, lambda i: self._of_operand(3, i)
        )
        hidden = self.op.get("hidden")
        lines = [
            bias,
            "auto score = gtco::scored([=](int b, int m, int n, float product) {",
            "  const float added = bias(b, m, n);",
        ]
        if hidden is None:
            lines.append(f"  return fmaf(product, {_literal(scale)}, added);")
        else:  # whatever the score is, NaN and infinities included
            lines.append(f"  const float x = fmaf(product, {_literal(scale)}, added);")
            lines.append(f"  return added <= {_literal(float(hidden))} ? added : x;")
        return "\n".join([*lines, "});"])


def _up_to(size: int, options: Sequence[int]) -> Sequence[int]:
    """The options up to and including the first that covers all of ``size``."""
    last = next((i for i, o in enumerate(options) if o >= size), len(options) - 1)
    return options[: last + 1]


def _literal(x: float) -> str:
    """A float32 as a C++ literal."""
    if isinf(x):
        return "gtco::no_key()" if x < 0 else "-gtco::no_key()"
    return number(x)
