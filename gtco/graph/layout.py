"""Channels last: convolution, pooling, resizing and sampling in NHWC. The permutations that this
adds are moved until they meet and cancel.

    before: y = conv2d(x, w) {NCHW}
    after:  y = permute(conv2d(permute(x, 0231), w) {NHWC}, 0312)

NHWC makes a row of im2col contiguous and a 1x1 convolution a plain matrix product. The permutation
after such an operator *sinks* towards the outputs, through every operator that lets it pass
(element-wise operators, concat, pad, slice, reductions, reshapes that keep its axes apart). The
permutation before it is *pulled* towards the inputs. Between two convolutions they meet and become
the identity. They also meet the model's own permutations: flatten(2).transpose(1, 2) after a patch
embedding cancels, and so does the transpose -> view -> convolution -> flatten -> transpose of a
transformer's tokens. The rest is needed: at most the model's NCHW inputs and outputs, and operators
that mix axes.

Pooling and resizing are as fast in either layout. One beside a remaining permutation is tried in
the other layout, and stays there if fewer elements are moved. Between NCHW tensors it moves none.
An operator that enlarges a map before an NCHW output has the permutation before it, where the map
is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from math import prod

from gtco.graph.graph import Graph
from gtco.graph.permutes import (
    Axes,
    across_reshape,
    compose,
    invert,
    is_identity,
    moves_nothing,
    permuted,
    through,
    through_reduction,
)
from gtco.graph.rewrites.name_outputs import name_outputs
from gtco.tensor.stage import Dim, Operator, TensorType, make_attrs

TO_NHWC: Axes = (0, 2, 3, 1)
TO_NCHW: Axes = (0, 3, 1, 2)
_NHWC_ALONE = frozenset(["conv2d", "conv_transpose2d", "grid_sample"])
_EITHER = frozenset(["max_pool2d", "avg_pool2d", "resize2d"])
# A permutation is pulled above so many operators at most: each takes five of Python's frames, and
# Python allows 1000.
DEEPEST = 64

# A way to have a tensor permuted: elements that must really be moved, and how to build it.
Way = tuple[int, Callable[[], str]]


def channels_last(graph: Graph) -> Graph:
    """The same function with every convolution and sampling in NHWC, and with as little permuting
    as the rules find. Pooling and resizing get the layout that needs less permuting.

    Weights stay OIHW (the kernel packs them). Inputs and outputs keep their names and shapes.
    Reshapes of reshapes become one. A graph without NCHW operators keeps its layout.
    """
    best = _converted(graph)
    # An earlier conversion of this graph may have moved fewer elements than another one would.
    alone = [op for op in graph.operators.values() if op.kind in _NHWC_ALONE]
    done = all(op.get("layout") != "NCHW" for op in alone)
    return graph if done and moved_elements(graph) < moved_elements(best) else best


def _converted(graph: Graph) -> Graph:
    everything = _settled(lambda: _Pass(graph).convert(_NHWC_ALONE | _EITHER))
    if moved_elements(everything) == 0 or not _beside_permutes(everything):
        return everything
    # A chain of poolings between NCHW tensors gains nothing until the whole chain stays in NCHW.
    needed = _settled(lambda: _Pass(graph).convert(_NHWC_ALONE))
    best = min(everything, needed, key=moved_elements)
    for op in _beside_permutes(best):
        here = best.producer(op.output)
        if here is not None and here.kind == op.kind:  # no earlier turn changed this one
            best = min(best, _settled(partial(_turned, best, here)), key=moved_elements)
    return best


def _turned(graph: Graph, op: Operator) -> _Pass:
    return _Pass(graph).turn(op)


def _settled(begin: Callable[[], _Pass]) -> Graph:
    """The graph that ``begin`` makes, with permutations pulled and sunk, or only pulled, whichever
    moves less. Sinking past an operator whose other readers need NCHW could move more than it
    saves.
    """
    return min((begin().settle(sink) for sink in (True, False)), key=moved_elements)


def _beside_permutes(graph: Graph) -> list[Operator]:
    """The operators of either layout that have a remaining permutation before or after them."""
    found = {op.output for op in permutes(graph)}
    found |= {op.inputs[0] for op in permutes(graph)}
    return [
        op
        for op in graph.operators.values()
        if op.kind in _EITHER and not found.isdisjoint((op.inputs[0], op.output))
    ]


def moved_elements(graph: Graph) -> int:
    """The number of elements that the graph's permutations move. A permutation that moves only axes
    of size 1 moves none.
    """
    return sum(_size(op.type.shape) for op in permutes(graph))


def permutes(graph: Graph) -> list[Operator]:
    """The permutations that move elements."""
    return [
        op
        for op in graph.operators.values()
        if op.kind == "permute" and not moves_nothing(graph.types[op.inputs[0]].shape, op["axes"])
    ]


def _size(shape: tuple[Dim, ...]) -> int:
    """The number of elements, with 64 for a symbolic size. It is used only to compare."""
    return prod(dim if isinstance(dim, int) else 64 for dim in shape)


class _Pass:
    """A graph that is being rewritten. ``down`` names the permutations that sink."""

    def __init__(self, graph: Graph):
        self.graph = graph.copy()
        self.down: set[str] = set()
        self.folded: dict[tuple[str, Axes], str] = {}
        self.current = ""  # the permutation that is being pulled: it may not replace itself
        self.deep = 0  # the operators above which the current way is pulled
        self.built: dict[tuple[str, Axes], str] = {}  # in the current way: x + x pulls x once

    # -- conversion --------------------------------------------------------------------------------

    def convert(self, kinds: Collection[str]) -> _Pass:
        """Turns every operator of these kinds to NHWC, between permutations."""
        graph = self.graph
        before: dict[str, str] = {}
        for op in list(graph.operators.values()):
            if op.kind not in kinds or op["layout"] != "NCHW":
                continue
            x = op.inputs[0]
            if x not in before:
                before[x] = graph.add("permute", [x], axes=TO_NHWC)
            self._replace(op, before[x], TO_NHWC, "NHWC")
        graph.prune()
        return self

    def turn(self, op: Operator) -> _Pass:
        """Turns one operator to the other layout, between permutations."""
        layout, axes = ("NCHW", TO_NCHW) if op["layout"] == "NHWC" else ("NHWC", TO_NHWC)
        self._replace(op, self.graph.add("permute", [op.inputs[0]], axes=axes), axes, layout)
        self.graph.prune()
        return self

    def _replace(self, op: Operator, source: str, axes: Axes, layout: str) -> None:
        """Makes ``op`` read ``source``, in ``layout``; a permutation after it restores
        its output.
        """
        graph = self.graph
        made = graph.put(
            Operator(
                op.kind,
                (source, *op.inputs[1:]),
                graph.fresh(f"{op.output}_{layout.lower()}"),
                TensorType(permuted(op.type.shape, axes), op.type.dtype),
                make_attrs(**(dict(op.attrs) | {"layout": layout})),
                op.name,
            )
        )
        graph.put(_permute(op.output, op.type, made, invert(axes)))
        self.down.add(op.output)

    # -- to a fixed point --------------------------------------------------------------------------

    def settle(self, sink: bool) -> Graph:
        """Applies the rules until none applies. Every step moves a permutation towards the outputs
        (sink) or moves fewer elements (pull), so it ends. Permutations that can sink no further are
        at last pulled like all others, because they may now meet each other or new ones.
        """
        self._until_none_applies(sink)
        if sink:
            self.down.clear()
            self._until_none_applies(sink=False)
        return name_outputs(self.graph)

    def _until_none_applies(self, sink: bool) -> None:
        changed = True
        while changed:
            changed = False
            for output in list(self.graph.operators):
                op = self.graph.producer(output)
                if op is None:  # it was removed in this round
                    continue
                if op.kind == "permute":
                    changed |= self._pull(op) or (sink and output in self.down and self._sink(op))
                elif op.kind == "reshape":
                    changed |= self._merge_reshapes(op)
            self.graph.prune()

    def _pull(self, op: Operator) -> bool:
        """Replaces a permutation by something that moves fewer elements: nothing, a folded
        constant, a reshape, a composition, or permutations further up that cancel there.
        """
        graph, (source,) = self.graph, op.inputs
        maker = graph.producer(source)
        moves = 0 if moves_nothing(graph.types[source].shape, op["axes"]) else _size(op.type.shape)
        self.current = op.output
        self.built.clear()
        moved, build = self._way(source, op["axes"])
        self.current = ""
        composes = maker is not None and maker.kind == "permute"
        # A permutation that sinks is not pulled up: it would go back and forth across a pad.
        better = moved < moves if op.output not in self.down else moved == 0
        if not (better or composes or moves == 0):
            return False
        made = build()
        new = graph.producer(made)
        if new is not None and new.kind == "permute" and op.output in self.down:
            self.down.add(made)
        graph.replace_uses(op.output, made)
        return True

    def _merge_reshapes(self, op: Operator) -> bool:
        graph, (source,) = self.graph, op.inputs
        if graph.types[source].shape == op.type.shape:
            if op.output in graph.outputs:
                return False
            graph.replace_uses(op.output, source)
            return True
        maker = graph.producer(source)
        if maker is None or maker.kind != "reshape":
            return False
        graph.put(Operator("reshape", maker.inputs, op.output, op.type, op.attrs, op.name))
        return True

    # -- pull: the cheapest way to have a tensor permuted ------------------------------------------

    def _way(self, tensor: str, axes: Axes) -> Way:
        """The cheapest way found to have ``permute(tensor, axes)``."""
        graph = self.graph
        shape = graph.types[tensor].shape
        if is_identity(axes):
            return 0, lambda: tensor
        if graph.is_constant(tensor):
            return 0, lambda: self._fold(tensor, axes, len(axes))
        maker = graph.producer(tensor)
        if maker is not None and maker.kind == "permute":
            return self._way(maker.inputs[0], compose(maker["axes"], axes))
        for reader in graph.consumers(tensor):
            if self.current in graph.outputs:  # would need a copy under the output's name
                break
            if reader.kind == "permute" and reader["axes"] == axes:
                if reader.output != self.current and reader.output not in self.down:
                    return 0, _give(reader.output)
        target = permuted(shape, axes)
        if moves_nothing(shape, axes):
            kind = TensorType(target, graph.types[tensor].dtype)
            return 0, self._once(tensor, axes, lambda: graph.add("reshape", [tensor], kind))
        plain = _size(shape)
        other = self._way_above(maker, axes) if maker is not None else None
        if other is not None and other[0] < plain:
            return other[0], self._once(tensor, axes, other[1])
        return plain, self._once(tensor, axes, lambda: graph.add("permute", [tensor], axes=axes))

    def _once(self, tensor: str, axes: Axes, build: Callable[[], str]) -> Callable[[], str]:
        def made() -> str:
            if (tensor, axes) not in self.built:
                self.built[tensor, axes] = build()
            return self.built[tensor, axes]

        return made

    def _way_above(self, maker: Operator, axes: Axes) -> Way | None:
        """The permutation pulled above the operator that makes the tensor."""
        graph = self.graph
        dtype = maker.type.dtype
        target = TensorType(permuted(maker.type.shape, axes), dtype)
        if maker.kind == "reshape":  # costs nothing, so other readers do not matter
            # permute(reshape(x), axes) = z  <=>  x = reshape(permute(z, inverse)): swap these two.
            source = maker.inputs[0]
            swapped = across_reshape(target.shape, invert(axes), graph.types[source].shape)
            if swapped is None:
                return None
            moved, build = self._way(source, invert(swapped[1]))
            return moved, lambda: graph.add("reshape", [build()], target, name=maker.name)
        if self.deep == DEEPEST or graph.only_user(maker.output) is None:
            return None
        self.deep += 1
        try:
            return self._way_op(maker, axes)
        finally:
            self.deep -= 1

    def _way_op(self, op: Operator, axes: Axes) -> Way | None:
        """``permute(op(...), axes)`` as ``op`` on permuted inputs."""
        graph = self.graph
        passed = through(op, axes)
        if passed is None:
            return None
        attrs, which = passed
        operands = list(zip(op.inputs, which, strict=True))
        plans = {  # one of x * x, or each level of a power would double them
            (name, wanted): self._way_operand(name, axes) if wanted else (0, _give(name))
            for name, wanted in dict.fromkeys(operands)
        }
        target = TensorType(permuted(op.type.shape, axes), op.type.dtype)

        def build() -> str:
            made = {operand: make() for operand, (_, make) in plans.items()}
            inputs = tuple(made[operand] for operand in operands)
            return graph.put(
                Operator(op.kind, inputs, graph.fresh(f"{op.output}_p"), target, attrs, op.name)
            )

        return sum(moved for moved, _ in plans.values()), build

    def _way_operand(self, name: str, axes: Axes) -> Way:
        """An input of an element-wise operator. If it has fewer axes, leading axes of size 1 are
        added.
        """
        graph = self.graph
        shape, rank = graph.types[name].shape, len(axes)
        if not shape or len(shape) == rank:
            return self._way(name, axes) if shape else (0, _give(name))
        if graph.is_constant(name):
            return 0, lambda: self._fold(name, axes, rank)
        full = (1,) * (rank - len(shape)) + shape
        flat = moves_nothing(full, axes)

        def build() -> str:
            dtype = graph.types[name].dtype
            if flat:
                return graph.add("reshape", [name], TensorType(permuted(full, axes), dtype))
            return graph.add(
                "permute", [graph.add("reshape", [name], TensorType(full, dtype))], axes=axes
            )

        return 0 if flat else _size(shape), build

    def _fold(self, name: str, axes: Axes, rank: int) -> str:
        """The permuted constant. It is made only once."""
        graph = self.graph
        key = (name, axes)
        if key not in self.folded or self.folded[key] not in graph.constants:
            known = graph.types[name]
            full = replace(known, shape=(1,) * (rank - len(known.shape)) + known.shape)
            whole = name if full == known else graph.add_result("reshape", (name,), full)
            self.folded[key] = graph.add_result("permute", (whole,), axes=axes)
        return self.folded[key]

    # -- sink --------------------------------------------------------------------------------------

    def _sink(self, op: Operator) -> bool:
        """Moves a permutation after each of its readers that lets it pass."""
        if op.output in self.graph.outputs:
            return False
        changed = False
        for user in list(self.graph.consumers(op.output)):
            for made, axes in self._behind(op, user):
                self.graph.put(_permute(user.output, user.type, made, axes, user.name))
                self.down.add(user.output)
                changed = True
        return changed

    def _behind(self, op: Operator, user: Operator) -> Iterator[tuple[str, Axes]]:
        """``user`` on unpermuted inputs, and the permutation that restores its output."""
        graph, (source,) = self.graph, op.inputs
        axes: Axes = op["axes"]
        if user.kind == "reshape":
            shape = graph.types[source].shape
            swapped = across_reshape(shape, axes, user.type.shape)
            if swapped is not None:
                target = TensorType(swapped[0], user.type.dtype)
                yield graph.add("reshape", [source], target, name=user.name), swapped[1]
        elif user.kind in ("sum", "mean", "max", "min", "prod") and not user["keepdims"]:
            attrs, rest = through_reduction(user, axes)
            yield graph.add(user.kind, [source], name=user.name, **dict(attrs)), rest
        elif len(axes) == len(user.type.shape):
            self.built.clear()
            way = self._way_op(user, invert(axes))
            # Small operands (a gate, a bias computed at run time) may be permuted instead.
            if way is not None and 4 * way[0] <= _size(op.type.shape):
                yield way[1](), axes


def _permute(output: str, kind: TensorType, source: str, axes: Axes, name: str = "") -> Operator:
    return Operator("permute", (source,), output, kind, make_attrs(axes=axes), name)


def _give(name: str) -> Callable[[], str]:
    return lambda: name
