"""Narrow operands: the operands of contractions are rounded to bfloat16 or float16, and everything
else stays float32.

    before: n = layer_norm(x)    y = matmul(n, W)
    after:  n = layer_norm(x)    h = cast(n) {bfloat16}    y = matmul(h, W'), W' in bfloat16

matmul, attention (q, k and v) and conv2d make float32 results of narrow operands. Sums, softmax,
normalisation, attention's masks, the residual stream of tokens, and the model's inputs and outputs
keep their precision.

float16 ends at 65504. A contraction with a larger constant operand stays in float32. A larger
computed value becomes an infinity, as in other engines; nothing is saturated, so the overflow is
visible.

A tensor that only contractions read is stored as narrow. The cast comes directly after the operator
that computes the tensor, before any movement, and only once for all readers.

    before: s = slice(q)    r = permute(s)               a = attention(r, ...)
    after:  h = cast(q)     s = slice(h)    r = permute(s)    a = attention(r, ...)

An image that a convolution reads is stored as narrow even if others read it too, as a residual sum
does, and so is one of which only the pooled maximum is narrow. In float32 such images of a ResNet
fill no cache, and their memory, not the multiplications, limits its 1x1 convolutions.

    before: h = cast(x)    y = conv2d(h, W')    z = add(t, x)
    after:  h = cast(x)    y = conv2d(h, W')    w = cast(h) {float32}    z = add(t, w)

So is one of two convolutions that are added up, if their sum is stored as narrow: only the other
one shares a stage with the sum.

The fusion search decides which stage a cast joins: the one before it, as an epilogue, or the one
after it, as a prologue.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import numpy as np
from ml_dtypes import finfo

from gtco.graph.fusion.dpof import Floor
from gtco.graph.fusion.stages import no_floor
from gtco.graph.graph import Graph
from gtco.support.garbage import uncollected
from gtco.tensor.analysis.window import narrow_groups
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

# The names of casts, by dtype.
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
# Half of the bytes is worth a slowdown that is smaller than the error of predictions.
SLOWER = 1.05
Cost = Callable[[Stage], float]  # seconds of a stage, infinite if no kernel can do it
# Movement, which does not change bits, by the inputs that it moves.
_FIRST = frozenset("identity reshape permute slice broadcast roll gather".split())
_MOVES = _FIRST | {"concat", "pad"}
IMAGE = 4  # axes of an image with its batch


def narrow_operands(
    graph: Graph, dtype: str, cost: Cost | None = None, floor: Floor = no_floor
) -> Graph:
    """The graph with the float32 operands of its contractions rounded to ``dtype``. Depthwise
    convolutions, and those in equally narrow groups, stay float32: they multiply vectors of
    channels, and reading their float32 memory limits them. With ``cost``, a contraction that would
    be slower, because it has no kernel as good, stays too. ``floor`` is a lower bound on the cost
    of a stage with the operator.
    """
    with uncollected():  # the fusion search does so too: the same policy prices here
        return _Narrowing(graph.copy(), dtype, cost, floor).run()


def narrowed_operands(graph: Graph, op: Operator, dtype: str) -> tuple[int, ...]:
    """The positions of the operands to round to ``dtype``; none if the operator stays as it is."""
    if op.kind not in ("matmul", "attention", "conv2d") or op.type.dtype != "float32":
        return ()
    positions = (0, 1, 2) if op.kind == "attention" else (0, 1)
    types = [graph.types[op.inputs[i]] for i in positions]
    if any(t.dtype != "float32" for t in types):
        return ()
    if narrow_groups(op, types[1].shape):
        return ()
    if op.get("exact", 0) > finfo(dtype).nmant + 1:  # whole numbers of more bits than it holds
        return ()
    if any(_beyond(graph, op.inputs[i], dtype) for i in positions):
        return ()
    return positions


def _beyond(graph: Graph, tensor: str, dtype: str) -> bool:
    """True for a constant that has a finite value beyond the range of ``dtype``."""
    array = graph.constants.get(tensor)
    if array is None or not array.size:
        return False
    largest = float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))
    return largest > float(finfo(dtype).max)


class Prices:
    """Decides whether an operator is worth narrower operands. Answers are kept for
    equal operators.
    """

    def __init__(self, graph: Graph, dtype: str, cost: Cost | None, floor: Floor) -> None:
        self.graph, self.dtype, self.cost, self.floor = graph, dtype, cost, floor
        self.found: dict[tuple[str, str], bool] = {}

    def pays(
        self, op: Operator, narrow: tuple[int, ...], instead: Operator | None = None
    ) -> bool:
        """True if the operator, alone in a stage, is no slower with its operands at ``narrow`` in
        the dtype, or as the operator that is given ``instead``. Always true without prices.
        """
        if self.cost is None:
            return True
        plain = self.alone(op, ())
        other = self.alone(op, narrow) if instead is None else self.alone(instead, ())
        if (plain.key, other.key) not in self.found:
            half = self.cost(other)
            # The lower bound of the plain one mostly decides, and needs no search among configs.
            self.found[plain.key, other.key] = isfinite(half) and (
                half <= SLOWER * self.floor(op, self.graph.types)
                or half <= SLOWER * self.cost(plain)
            )
        return self.found[plain.key, other.key]

    def alone(self, op: Operator, narrow: tuple[int, ...]) -> Stage:
        """A stage of only the operator, with its operands at ``narrow`` in the dtype."""
        types = {x: self.graph.types[x] for x in op.inputs}
        types |= {op.inputs[i]: TensorType(types[op.inputs[i]].shape, self.dtype) for i in narrow}
        return make_stage((op,), types, self.graph.constants)


class _Narrowing:
    """A graph during the pass. ``half`` has the rounded twin of each tensor."""

    def __init__(self, graph: Graph, dtype: str, cost: Cost | None, floor: Floor) -> None:
        self.graph, self.dtype = graph, dtype
        self.prices = Prices(graph, dtype, cost, floor)
        self.half: dict[str, str] = {}
        self.positions = {o: self.narrow(op) for o, op in graph.operators.items()}
        self.alone: dict[str, bool] = {}
        for output in reversed(list(graph.operators)):
            self.alone[output] = self.read_by_contractions(output)

    def narrow(self, op: Operator) -> tuple[int, ...]:
        """The positions of the operands to round."""
        narrow = narrowed_operands(self.graph, op, self.dtype)
        return narrow if narrow and self.prices.pays(op, narrow) else ()

    def run(self) -> Graph:
        for output, op in list(self.graph.operators.items()):
            narrow = self.positions[output]
            if not narrow:
                continue
            inputs = [self.rounded(x) if i in narrow else x for i, x in enumerate(op.inputs)]
            self.graph.put(Operator(op.kind, tuple(inputs), output, op.type, op.attrs, op.name))
        for output in reversed(list(self.graph.prune().operators)):
            self.store_narrow(output)
        return self.graph.prune()

    def store_narrow(self, tensor: str) -> None:
        """Makes all readers of an image read its rounded twin, if that loses no more than a
        convolution, a maximum or the rounding of a sum would lose too. Readers of its readers were
        asked first.
        """
        graph = self.graph
        readers = graph.consumers(tensor)
        if len(graph.types[tensor].shape) != IMAGE or tensor in graph.outputs:
            return
        half = self.half.get(tensor)
        if half is not None and any(r.kind == "conv2d" for r in graph.consumers(half)):
            others = [r for r in readers if r.output != half]
        elif graph.types[tensor].dtype != "float32":
            return
        elif all(map(self.narrow_maximum, readers)) or self.is_addend(tensor):
            half, others = self.rounded(tensor), readers
        else:
            return
        if others:
            wide = graph.add("cast", (half,), graph.types[tensor], name=self.called(tensor))
            twin = graph.operators[half]
            graph.replace_uses(tensor, wide)
            graph.put(twin)  # it alone goes on reading the tensor

    def is_addend(self, tensor: str) -> bool:
        """True if the image is a convolution's, and all that is done with it is to add it to that
        of another convolution, which is not rounded, for a sum that is only read rounded.
        """
        match self.graph.consumers(tensor):
            case [Operator(kind="add") as total] if self.is_convolved(tensor):
                others = [x for x in total.inputs if x != tensor]
                return all(map(self.is_convolved, others)) and self.is_rounded(total.output)
        return False

    def is_convolved(self, tensor: str) -> bool:
        """True if the tensor is a convolution's, perhaps with a bias."""
        op = self.graph.producer(tensor)
        if op is not None and op.kind == "add":
            computed = [x for x in op.inputs if x not in self.graph.constants]
            return len(computed) == 1 and self.is_convolved(computed[0])
        return op is not None and op.kind == "conv2d"

    def is_rounded(self, tensor: str) -> bool:
        """True if the tensor, or what one function makes of its elements, is only read rounded."""
        if tensor in self.graph.outputs:
            return False
        match self.graph.consumers(tensor):
            case [Operator(kind="cast") as reader]:
                return reader.output == self.half.get(tensor)
            case [reader] if reader.kind in ELEMENTWISE_OPERATORS and len(reader.inputs) == 1:
                return self.is_rounded(reader.output)
        return False

    def narrow_maximum(self, op: Operator) -> bool:
        """True if the operator is a pooled maximum whose result is only read rounded."""
        readers = self.graph.consumers(op.output)
        twin = self.half.get(op.output)
        hidden = op.output not in self.graph.outputs
        return hidden and op.kind == "max_pool2d" and [r.output for r in readers] == [twin]

    def read_by_contractions(self, tensor: str) -> bool:
        """True if only contractions read the tensor, directly or through movement. Readers are
        asked first.
        """
        if tensor in self.graph.outputs:
            return False
        return all(
            self.moved(op, tensor) and self.alone[op.output]
            if op.kind in _MOVES
            else all(i in self.positions[op.output] for i, x in enumerate(op.inputs) if x == tensor)
            for op in self.graph.consumers(tensor)
        )

    def moved(self, op: Operator, tensor: str) -> bool:
        """True if the operator is movement that moves this input, instead of reading it as
        positions.
        """
        return op.kind not in _FIRST or tensor not in op.inputs[1:]

    def rounded(self, tensor: str) -> str:
        """``tensor`` rounded: the movement that made it, applied to rounded inputs, or a cast."""
        if tensor in self.half:
            return self.half[tensor]
        graph, op = self.graph, self.graph.producer(tensor)
        kind = TensorType(graph.types[tensor].shape, self.dtype)
        if op is not None and op.kind in _MOVES and self.alone[tensor]:
            sources = op.inputs[:1] if op.kind in _FIRST else op.inputs
            inputs = (*(self.rounded(x) for x in sources), *op.inputs[len(sources) :])
            made = Operator(op.kind, inputs, graph.fresh(tensor), kind, op.attrs, op.name)
        else:
            name = op.name if op is not None else ""
            made = Operator("cast", (tensor,), graph.fresh(self.called(tensor)), kind, (), name)
        self.half[tensor] = graph.put(made)
        return made.output

    def called(self, tensor: str) -> str:
        return f"{tensor}_{SHORT[self.dtype]}"
