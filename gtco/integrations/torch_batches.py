"""What a graph of torch.compile does at any batch, from what it does at three.

A new batch has the same results in other places: sizes, strides and offsets that grow with the
batch. They are straight lines, which two batches give and a third one confirms. So a batch that is
seen for the first time needs no run of the graph on tensors without data
(:func:`gtco.integrations.torch_graph.examine`), which takes as long as the graph has operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from gtco.integrations.torch_graph import Facts, Place, Result, alike, examine
from gtco.integrations.torch_sizes import Batch

SEEN = 8  # batches of the range of which three are looked at


@dataclass(frozen=True)
class AnyBatch:
    """``facts`` are those at ``size``, and ``growth`` what each of their numbers grows by with
    each sample, in the order of :func:`_numbers`.
    """

    facts: Facts
    size: int
    growth: tuple[int, ...]

    def at(self, size: int) -> Facts | None:
        """The facts at this batch. None for one sample: an axis of one element may have any stride,
        so torch treats it in its own way.
        """
        if size == 1:
            return None
        known = _numbers(self.facts)
        return _with_numbers(
            self.facts,
            [n + (size - self.size) * g for n, g in zip(known, self.growth, strict=True)],
        )


def any_batch(graph_module: Any, arguments: Sequence[Any], batch: Batch) -> AnyBatch | None:
    """The facts at any batch of a graph. None if they are not straight lines, or if the batch is
    not the outermost axis in the memory of an argument, or has too few sizes.
    """
    sizes = [size for size in islice(batch.sizes, SEEN) if size > 1]
    if len(sizes) < 3 or not all(map(_outermost, *_places(arguments, batch))):
        return None
    a, b, c = sizes[0], sizes[1], sizes[-1]
    first, second, third = (examine(graph_module, _at(arguments, batch, n)) for n in (a, b, c))
    if not (alike(first, second) and alike(first, third)):
        return None
    one, two = _numbers(first), _numbers(second)
    if len(one) != len(two) or any((y - x) % (b - a) for x, y in zip(one, two, strict=True)):
        return None
    growth = tuple((y - x) // (b - a) for x, y in zip(one, two, strict=True))
    found = AnyBatch(first, a, growth)
    return found if found.at(b) == second and found.at(c) == third else None


def _places(arguments: Sequence[Any], batch: Batch) -> tuple[list[Any], list[int]]:
    return [arguments[n] for n, _ in batch.places], [axis for _, axis in batch.places]


def _outermost(tensor: Any, axis: int) -> bool:
    """True if other sizes of the axis leave all strides as they are."""
    steps = [
        stride
        for number, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if number != axis and size > 1
    ]
    return bool(tensor.stride(axis) >= max(steps, default=0))


def _at(arguments: Sequence[Any], batch: Batch, size: int) -> list[Any]:
    """The arguments with this batch; what is in the tensors does not count."""
    found = list(arguments)
    for number, axis in batch.places:
        tensor = arguments[number]
        shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
        found[number] = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype)
    for number in batch.numbers:
        found[number] = size
    return found


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(facts: Facts) -> list[int]:
    """All numbers of the results that may grow with the batch."""
    found: list[int] = []
    for result in facts.results:
        if _counts(result.value):
            found.append(result.value)
        if (place := result.place) is not None:
            found += [*place.size, *place.stride, place.offset]
    return found


def _with_numbers(facts: Facts, numbers: Sequence[int]) -> Facts:
    """The facts with these numbers, in the order of :func:`_numbers`."""
    left = iter(numbers)
    results: list[Result] = []
    for result in facts.results:
        if _counts(result.value):
            result = replace(result, value=next(left))
        if (place := result.place) is not None:
            axes = len(place.size)
            size, stride = tuple(islice(left, axes)), tuple(islice(left, axes))
            result = replace(result, place=Place(size, stride, next(left)))
        results.append(result)
    return replace(facts, results=tuple(results))
