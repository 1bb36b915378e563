"""Where the result of each operator has the samples of a batch; see :mod:`gtco.graph.samples`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import Operator, TensorType


@dataclass(frozen=True)
class Along:
    """Where a tensor has its samples: index ``(o * n + sample) * inner + i`` of ``axis``, with o
    below ``outer`` and i below ``inner``. Integers may grow by ``step`` from each sample to the
    next: numbers of rows of a table that has so many rows of each sample.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    step: int = 0

    def at(self, axis: int) -> Along:
        return replace(self, axis=axis)


Place = Along | None  # None: the same for all samples


class Mixed(Exception):
    """Why an operator's result is not made sample by sample."""


@dataclass(frozen=True)
class Call:
    """An operator at both sizes, with the places of its inputs."""

    small: Operator
    types: tuple[TensorType, ...]  # types of the inputs at the small size
    places: tuple[Place, ...]
    sizes: tuple[int, int]
    large: Operator

    def rank(self, number: int) -> int:
        return len(self.types[number].shape)

    @property
    def out_rank(self) -> int:
        return len(self.small.type.shape)


# the rules: (operator, places of its inputs) -> the place of its result ---------------------------


def _agreed(places: Sequence[Place]) -> Along:
    """The one place of operands in the result's axes."""
    found = {place for place in places if place is not None}
    if len(found) != 1:
        raise Mixed("combines samples with other samples")
    return found.pop()


def _aligned(call: Call, number: int) -> Place:
    """The place of an operand that broadcasts, in the result's axes."""
    place = call.places[number]
    return place and place.at(place.axis + call.out_rank - call.rank(number))


def elementwise(call: Call) -> Place:
    return _agreed([_aligned(call, number) for number in range(len(call.types))])


def _same(call: Call) -> Place:
    return call.places[0]


def _only(call: Call) -> Along:
    """The place of the first input, the only one that may have samples."""
    place = call.places[0]
    if place is None or any(other is not None for other in call.places[1:]):
        raise Mixed("has another parameter for each sample")
    return place


def _reshape(call: Call) -> Place:
    place = _only(call)
    shape, result, n = call.types[0].sizes, call.small.type.sizes, call.sizes[0]
    outer = prod(shape[: place.axis]) * place.outer
    inner = prod(shape[place.axis + 1 :]) * place.inner
    for axis, size in enumerate(result):
        before, behind = prod(result[:axis]), prod(result[axis + 1 :])
        if before and behind and outer % before == 0 and inner % behind == 0:
            if size == outer // before * n * (inner // behind):
                return Along(axis, outer // before, inner // behind)
    raise Mixed("takes samples apart")


def _permute(call: Call) -> Place:
    place = _only(call)
    return place.at(tuple(call.small["axes"]).index(place.axis))


def _slice(call: Call) -> Place:
    place = _only(call)
    axis = place.axis
    whole = call.types[0].shape[axis] == call.small.type.shape[axis]
    if not whole or call.small["begin"][axis] != 0 or call.small["strides"][axis] != 1:
        raise Mixed("takes some of the samples, or changes their order")
    return place


def _concat(call: Call) -> Place:
    axis = call.small["axis"]
    places = [place for place in call.places if place is not None]
    if len(places) < len(call.places):
        raise Mixed("puts samples beside something that is not a sample")
    if any(place.axis != axis for place in places):
        return _agreed(places)
    if len({place.inner for place in places}) > 1:
        raise Mixed("puts samples beside samples of another size")
    return Along(axis, sum(place.outer for place in places), places[0].inner)


def _broadcast(call: Call) -> Place:
    return _aligned(call, 0)


def _pad(call: Call) -> Place:
    place = _only(call)
    if call.small["before"][place.axis] or call.small["after"][place.axis]:
        raise Mixed("adds samples")
    return place


def _roll(call: Call) -> Place:
    place = _only(call)
    if call.small["shifts"][place.axis] % int(call.types[0].shape[place.axis]):
        raise Mixed("moves samples to other places")
    return place


def _gather(call: Call) -> Place:
    data, indices = call.places
    axis = call.small["axis"]
    if data is None:
        assert indices is not None
        return indices.at(axis + indices.axis)
    if indices is not None:
        raise Mixed("looks samples up by the indices of other samples")
    if data.axis == axis:
        raise Mixed("picks samples")
    return data if data.axis < axis else data.at(data.axis + call.rank(1) - 1)


def _reduction(call: Call) -> Place:
    place = _only(call)
    rank = call.rank(0)
    given = call.small.get("axes")
    axes = {axis % rank for axis in ([call.small["axis"]] if given is None else given)}
    if place.axis in axes:
        raise Mixed("takes samples together")
    if call.small["keepdims"]:
        return place
    return place.at(place.axis - sum(axis < place.axis for axis in axes))


def _along_axis(call: Call) -> Place:
    place = _only(call)
    if place.axis == call.small["axis"] % call.rank(0):
        raise Mixed("takes samples together")
    return place


def _without_last(count: int) -> Callable[[Call], Place]:
    """The rule of an operator that goes over the last ``count`` axes."""

    def rule(call: Call) -> Place:
        place = _only(call)
        if place.axis >= call.rank(0) - count:
            raise Mixed("takes samples together")
        return place

    return rule


def _images(*more: str) -> Callable[[Call], Place]:
    """The rule of an operator on images, which samples are. With "channels", on each channel."""

    def rule(call: Call) -> Place:
        place = _only(call)
        channel = 1 if call.small.get("layout") == "NCHW" else call.rank(0) - 1
        if place.axis != 0 and not ("channels" in more and place.axis == channel):
            raise Mixed("reads samples as rows, columns or channels of an image")
        return place

    return rule


def _matmul(call: Call) -> Place:
    a, b = call.places
    if (a and a.axis == call.rank(0) - 1) or (b and b.axis == call.rank(1) - 2):
        raise Mixed("adds up samples")
    left, right = _aligned(call, 0), _aligned(call, 1)
    if left and right and left.axis >= call.out_rank - 2:
        raise Mixed("multiplies samples by other samples")
    return _agreed([left, right])


def _attention(call: Call) -> Place:
    """Queries, keys and values have samples on axes of their own, or queries alone have them on
    their rows.
    """
    for number, place in enumerate(call.places):
        rank = call.rank(number)
        least = 1 if number in (0, 3) else 2
        if place and place.axis > rank - 1 - least:
            raise Mixed("takes samples together")
    found = _agreed([_aligned(call, number) for number in range(len(call.places))])
    if found.axis == call.out_rank - 1:
        raise Mixed("takes samples together")
    if len(call.places) > 3:
        _check_repeated(call, 3, found)
    return found


def _grid_sample(call: Call) -> Place:
    image, grid = call.places
    if (image and image.axis) or (grid and grid.axis):
        raise Mixed("reads samples as rows, columns or channels of an image")
    found = _agreed([image, grid])
    _check_repeated(call, 0, found)
    _check_repeated(call, 1, found)
    return found


def _check_repeated(call: Call, number: int, found: Along) -> None:
    """Raises :class:`Mixed` for an operand that is different for each sample though it is said to
    be the same for all, such as a constant. What infers types does not look at these operands.
    """
    axis = found.axis - call.out_rank + call.rank(number)
    if call.places[number] is None and axis >= 0 and call.types[number].shape[axis] != 1:
        raise Mixed("has another constant for each sample")


RULES: Mapping[str, Callable[[Call], Place]] = {
    "identity": _same,
    "reshape": _reshape,
    "permute": _permute,
    "slice": _slice,
    "concat": _concat,
    "broadcast": _broadcast,
    "pad": _pad,
    "roll": _roll,
    "gather": _gather,
    **dict.fromkeys(("sum", "mean", "max", "min", "prod", "argmax", "argmin"), _reduction),
    "softmax": _along_axis,
    "log_softmax": _along_axis,
    "cumsum": _along_axis,
    "layer_norm": _without_last(1),
    "rms_norm": _without_last(1),
    "topk": _without_last(1),
    "moments": _without_last(2),
    "group_norm": _images(),
    "merged_moments": _images(),
    "matmul": _matmul,
    "attention": _attention,
    "conv2d": _images(),
    "conv_transpose2d": _images(),
    "max_pool2d": _images("channels"),
    "avg_pool2d": _images("channels"),
    "resize2d": _images("channels"),
    "grid_sample": _grid_sample,
}


# what only moves numbers, or makes them of another dtype
_MOVING = frozenset("identity reshape permute slice broadcast cast".split())


def place_of(call: Call) -> Place:
    """Where the result of an operator has the samples. Raises :class:`Mixed`."""
    steps = [place.step if place else 0 for place in call.places]
    if not any(steps):
        return rule_of(call.small.kind)(call)
    kind = call.small.kind
    places = tuple(replace(place, step=0) if place else None for place in call.places)
    plain = replace(call, places=places)
    if kind == "gather" and steps[0] == 0:
        return _own_rows(plain, steps[1])
    rule = elementwise if kind == "add" else rule_of(kind) if kind in _MOVING else None
    if rule is not None and (place := rule(plain)) is not None:
        return replace(place, step=sum(steps))
    raise Mixed("reads a constant that has other values for each sample")


def _own_rows(call: Call, step: int) -> Place:
    """Rows of a table that has ``step`` rows of each sample, one sample after the other: each
    sample's indices name rows of its own, if they are within the bounds that ONNX demands.
    """
    data, indices = call.places
    axis = call.small["axis"]
    if data is None or (data.axis, data.outer, data.inner) != (axis, 1, step):
        raise Mixed("looks samples up by the indices of other samples")
    assert indices is not None
    return indices.at(axis + indices.axis)


def rule_of(kind: str) -> Callable[[Call], Place]:
    """The rule for operators of this kind. Raises :class:`Mixed` if the kind has no rule."""
    rule = elementwise if kind in ELEMENTWISE_OPERATORS else RULES.get(kind)
    if rule is None:
        raise Mixed("may read several samples at once")
    return rule
