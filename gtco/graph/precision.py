"""Narrow operands: what contractions read is rounded to bfloat16 or float16, and all else stays
float32.

    before: n = layer_norm(x)    y = matmul(n, W)
    after:  n = layer_norm(x)    h = cast(n) {bfloat16}    y = matmul(h, W'), W' in bfloat16

matmul, attention (q, k and v) and conv2d give float32 of narrow operands: sums, softmax,
normalisation, attention's masks, the residual stream, the model's inputs and outputs keep their
precision.

float16 ends at 65504. A contraction with a constant operand beyond that stays in float32. What is
computed and lies beyond becomes an infinity, as it does in other engines; nothing is saturated, so
that it shows.

A tensor that contractions alone read lies in memory as narrow: the cast stands right behind what
computes it, in front of the movement between, and once however many read it.

    before: s = slice(q)    r = permute(s)               a = attention(r, ...)
    after:  h = cast(q)     s = slice(h)    r = permute(s)    a = attention(r, ...)

Which stage a cast joins, as the epilogue of the one before or the prologue of the one behind, is
the fusion search's to find.
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
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

# What casts to it are called.
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
# Half of the bytes is worth a difference that predictions do not resolve.
SLOWER = 1.05
Cost = Callable[[Stage], float]  # seconds of a stage, infinite where no kernel can do it
# Movement, which passes bits as they are, and which of its inputs it moves.
_FIRST = frozenset("identity reshape permute slice broadcast roll gather".split())
_MOVES = _FIRST | {"concat", "pad"}


def narrow_operands(
    graph: Graph, dtype: str, cost: Cost | None = None, floor: Floor = no_floor
) -> Graph:
    """The graph with the float32 operands of its contractions rounded to ``dtype``. Depthwise
    convolutions, and those in groups as narrow, stay: they multiply vectors of channels, and are
    bound by memory that is float32. With ``cost``, so does a contraction that would be slower, for
    want of a kernel as good; ``floor`` is at most what a stage of the operator costs.
    """
    with uncollected():  # as the fusion search, whose policy prices here too
        return _Narrowing(graph.copy(), dtype, cost, floor).run()


def narrowed_operands(graph: Graph, op: Operator, dtype: str) -> tuple[int, ...]:
    """Positions of the operands that ``dtype`` is for; none where the operator stays as it is."""
    if op.kind not in ("matmul", "attention", "conv2d") or op.type.dtype != "float32":
        return ()
    positions = (0, 1, 2) if op.kind == "attention" else (0, 1)
    types = [graph.types[op.inputs[i]] for i in positions]
    if any(t.dtype != "float32" for t in types):
        return ()
    if narrow_groups(op, types[1].shape):
        return ()
    if any(_beyond(graph, op.inputs[i], dtype) for i in positions):
        return ()
    return positions


def _beyond(graph: Graph, tensor: str, dtype: str) -> bool:
    """Is it a constant with finite values that ``dtype`` has no number for?"""
    array = graph.constants.get(tensor)
    if array is None or not array.size:
        return False
    largest = float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))
    return largest > float(finfo(dtype).max)


class Prices:
    """Is an operator worth narrower operands? Answers are kept for equal operators."""

    def __init__(self, graph: Graph, dtype: str, cost: Cost | None, floor: Floor) -> None:
        self.graph, self.dtype, self.cost, self.floor = graph, dtype, cost, floor
        self.found: dict[str, bool] = {}

    def pays(self, op: Operator, narrow: tuple[int, ...]) -> bool:
        """Is the operator, alone in a stage, no slower with its operands at ``narrow`` in the
        dtype? Always, where there are no prices.
        """
        if self.cost is None:
            return True
        plain = self.alone(op, ())
        if plain.key not in self.found:
            half = self.cost(self.alone(op, narrow))
            # what the plain one takes at least mostly says it, and needs no search among configs
            self.found[plain.key] = isfinite(half) and (
                half <= SLOWER * self.floor(op, self.graph.types)
                or half <= SLOWER * self.cost(plain)
            )
        return self.found[plain.key]

    def alone(self, op: Operator, narrow: tuple[int, ...]) -> Stage:
        """A stage of the operator, its operands at ``narrow`` in the dtype."""
        types = {x: self.graph.types[x] for x in op.inputs}
        types |= {op.inputs[i]: TensorType(types[op.inputs[i]].shape, self.dtype) for i in narrow}
        return make_stage((op,), types, self.graph.constants)


class _Narrowing:
    """A graph under the pass; ``half`` is a tensor's rounded twin."""

    def __init__(self, graph: Graph, dtype: str, cost: Cost | None, floor: Floor) -> None:
        self.graph, self.dtype = graph, dtype
        self.prices = Prices(graph, dtype, cost, floor)
        self.half: dict[str, str] = {}
        self.positions = {o: self.narrow(op) for o, op in graph.operators.items()}
        self.alone: dict[str, bool] = {}
        for output in reversed(list(graph.operators)):
            self.alone[output] = self.read_by_contractions(output)

    def narrow(self, op: Operator) -> tuple[int, ...]:
        """Positions of the operands to be rounded."""
        narrow = narrowed_operands(self.graph, op, self.dtype)
        return narrow if narrow and self.prices.pays(op, narrow) else ()

    def run(self) -> Graph:
        for output, op in list(self.graph.operators.items()):
            narrow = self.positions[output]
            if not narrow:
                continue
            inputs = [self.rounded(x) if i in narrow else x for i, x in enumerate(op.inputs)]
            self.graph.put(Operator(op.kind, tuple(inputs), output, op.type, op.attrs, op.name))
        return self.graph.prune()

    def read_by_contractions(self, tensor: str) -> bool:
        """Do contractions alone read it, through movement or at once? Asked of readers first."""
        if tensor in self.graph.outputs:
            return False
        return all(
            self.moved(op, tensor) and self.alone[op.output]
            if op.kind in _MOVES
            else all(i in self.positions[op.output] for i, x in enumerate(op.inputs) if x == tensor)
            for op in self.graph.consumers(tensor)
        )

    def moved(self, op: Operator, tensor: str) -> bool:
        """Does the movement move this input of its, and not read it as positions?"""
        return op.kind not in _FIRST or tensor not in op.inputs[1:]

    def rounded(self, tensor: str) -> str:
        """``tensor`` rounded: the movement that made it on rounded inputs, or a cast."""
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
