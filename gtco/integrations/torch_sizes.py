"""The size that torch leaves open in a graph and gtco takes as a range: a batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gtco.support.sizes import MOST_SIZE, Range


@dataclass(frozen=True)
class Batch:
    """A symbol that is the size of the outermost axis of a graph's inputs.

    - ``sizes``: what it may be, as torch knows it
    - ``places``: the arguments that have it, and the axis of each
    - ``numbers``: the arguments that are this size itself
    """

    sizes: Range
    places: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]

    def of(self, arguments: Sequence[Any]) -> int:
        """Its value in a call with these arguments."""
        number, axis = self.places[0]
        return int(arguments[number].shape[axis])

    def without(self, key: Sequence[Any]) -> tuple[Any, ...]:
        """What :meth:`gtco.integrations.torch_compile.Graph.key` gives, with None in place of this
        size.
        """
        found = list(key)
        for number, axis in self.places:
            found[number] = (*found[number][:axis], None, *found[number][axis + 1 :])
        for number in self.numbers:
            found[number] = None
        return tuple(found)


def batch_of(graph_module: Any, constants: Collection[int]) -> Batch | None:
    """The batch of a graph that torch made for several sizes. None if no symbol is one: it has to
    be the outermost size of some inputs, and may occur in no other size that torch hands over.
    ``constants`` are the numbers of the arguments that are weights.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in nodes]
    if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in values):
        return None
    tensors = {
        number: list(value.shape)
        for number, value in enumerate(values)
        if isinstance(value, torch.Tensor) and number not in constants
    }
    for shape in tensors.values():
        outermost = next((size for size in shape if not _is(size, 1)), 1)
        if isinstance(outermost, torch.SymInt) and outermost.node.expr.is_symbol:
            symbol = outermost
            break
    else:
        return None
    places, numbers = [], []
    for number, shape in tensors.items():
        axes = [axis for axis, size in enumerate(shape) if _depends(size, symbol)]
        if not axes:
            continue
        (axis, *others) = axes
        if others or not _equal(shape[axis], symbol) or not all(_is(n, 1) for n in shape[:axis]):
            return None
        places.append((number, axis))
    for number, value in enumerate(values):
        if isinstance(value, torch.SymInt) and _depends(value, symbol):
            if not _equal(value, symbol):
                return None
            numbers.append(number)
    bounds = symbol.node.shape_env.bound_sympy(symbol.node.expr)
    low, high = (
        int(bound) if bound.is_Integer else unknown  # torch has an infinity of its own
        for bound, unknown in ((bounds.lower, 1), (bounds.upper, MOST_SIZE))
    )
    low, high = max(low, 1), min(high, MOST_SIZE)
    if low > high:
        return None
    # without parts each size is compiled when it is first seen, not all of them now
    sizes = Range(low, high, symbol="batch", made="parts")
    return Batch(sizes, tuple(places), tuple(numbers))


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _depends(size: Any, symbol: torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and symbol.node.expr in size.node.expr.free_symbols


def _equal(size: Any, symbol: torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr == symbol.node.expr)
