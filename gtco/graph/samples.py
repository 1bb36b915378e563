"""Proves that a model treats the samples of a batch each by itself.

The same model, lowered at two sizes n and m of one dimension, is walked operator by operator. A
size that differs between the two graphs must be the dimension times a number, so every tensor has
the samples along one axis, or is the same for all samples. Each operator has a rule that says where
its result has the samples, or why a sample of the result depends on several samples of the inputs.
If no rule objects, sample i of every output follows from the samples i of the inputs alone, by a
function that is the same for both sizes. A batch can then be computed in parts.

    matmul [2, 197, 192] x [192, 576] -> [2, 197, 576]      samples along axis 0, and so are the
    reshape [2, 8, 7, 8, 7, 96] -> [128, 49, 96]            result's: index (sample * 64 + window)
    mean over axis 0                                        mixes samples: refused by name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

import numpy as np

from gtco.graph.graph import Graph
from gtco.graph.sample_rules import Along, Call, Mixed, Place, place_of
from gtco.support.errors import ShapeError
from gtco.tensor.stage import Operator, TensorType

NARROW = frozenset(("int8", "uint8", "int16", "uint16", "int4"))


@dataclass(frozen=True)
class Samples:
    """Where a model has its samples.

    - ``axes``: the axis of each input and output that has the samples, by the tensor's name; it is
      the outermost one. None for a tensor that is the same for all samples;
    - ``graph``: the model at ``size`` samples;
    - ``places``: of every tensor that an operator of this graph makes or reads.
    """

    axes: Mapping[str, int | None]
    graph: Graph
    size: int
    places: Mapping[str, Place]

    def at(self, size: int) -> Graph:
        """The model at another number of samples."""
        return self._resized(self.graph, size, self.places)

    def like(self, graph: Graph, size: int) -> Graph | None:
        """Another model at ``size`` samples, if it has the same operators as this one and its
        samples at the same places. ``graph`` is that model at as many samples as this one: the same
        file at other sizes of other dimensions. It may be another model nevertheless, and
        :func:`samples_along` decides about both.
        """
        if len(graph.operators) != len(self.graph.operators):
            return None
        places: dict[str, Place] = {}
        names = dict(zip(self.graph.inputs, graph.inputs, strict=True))
        for op, twin in zip(self.graph.operators.values(), graph.operators.values(), strict=True):
            if op.kind != twin.kind or len(op.inputs) != len(twin.inputs):
                return None
            names |= zip(op.inputs, twin.inputs, strict=True)
            names[op.output] = twin.output
        for mine, its in names.items():
            place, shape = self.places.get(mine), graph.types[its].shape
            if place is not None:
                if place.axis >= len(shape):
                    return None
                factor, rest = divmod(int(shape[place.axis]), self.size)
                if rest or (place.outer > 1 and place.inner > 1):
                    return None
                one, several = (1, factor) if place.outer == 1 else (factor, 1)
                place = Along(place.axis, one, several)
                if graph.is_constant(its):
                    place = replace(place, step=_step(graph.constants[its], place, self.size) or 0)
            if places.setdefault(its, place) != place:
                return None
        return self._resized(graph, size, places)

    def _resized(self, graph: Graph, size: int, places: Mapping[str, Place]) -> Graph:
        """The graph at another size, with the samples at these places. A constant that repeats one
        sample does so as often as the size says.
        """
        made = graph.copy()
        for name, place in places.items():
            if place is None:
                continue
            shape = list(graph.types[name].sizes)
            shape[place.axis] = place.outer * size * place.inner
            made.types[name] = kind = TensorType(tuple(shape), graph.types[name].dtype)
            if name in made.operators:
                made.operators[name] = replace(made.operators[name], type=kind)
            elif graph.is_constant(name):
                made.constants[name] = _repeated(graph.constants[name], place, size)
        return made


def samples_along(
    small: Graph,
    large: Graph,
    sizes: tuple[int, int],
    name: str,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> Samples:
    """Where a model has its samples. ``small`` and ``large`` are one model at these two sizes (2 or
    more) of the dimension ``name``, as they were lowered. ``kinds``: the operators of the model's
    file by the names of their nodes, for the error.

    Raises :class:`ShapeError`, which names the operator, if a sample of an output depends on more
    than its own sample of the inputs, or if samples are not along the outermost axis.
    """
    walk = _Walk(small, large, sizes)
    found: dict[str, int | None] = {}
    for tensor, other in zip(small.inputs, large.inputs, strict=True):
        place = _differing(small.types[tensor], large.types[other], sizes)
        if isinstance(place, str) or (place and (place.outer, place.inner) != (1, 1)):
            raise ShapeError(f"input '{tensor}' has '{name}' on more than one axis")
        walk.places[tensor] = place
        _require_outermost("input", tensor, small.types[tensor], place, name)
        found[tensor] = None if place is None else place.axis
    if len(small.operators) != len(large.operators):
        raise ShapeError(
            f"the model has {len(small.operators)} operators at {name}={sizes[0]} and "
            f"{len(large.operators)} at {name}={sizes[1]}: it computes something else at each size"
        )
    for op, twin in zip(small.operators.values(), large.operators.values(), strict=True):
        try:
            walk.step(op, twin)
        except Mixed as reason:
            shape = "x".join(map(str, op.type.shape))
            node = f" (node {op.name})" if op.name else ""
            kind = kinds.get(op.name) or (op["op"] if op.kind == "relax" else op.kind)
            raise ShapeError(
                f"operator {kind}{node}, whose result is {shape} at {name}={sizes[0]}, {reason}"
            ) from None
    for tensor in small.outputs:
        place = walk.places[tensor]
        _require_outermost("output", tensor, small.types[tensor], place, name)
        found[tensor] = None if place is None else place.axis
    return Samples(found, small, sizes[0], {**walk.places, **walk.repeated})


def narrow(graph: Graph) -> bool:
    """True if the graph of a quantized model is not to be taken from one of another size: its
    integers are found behind constants, which a proof has folded.
    """
    return any(kind.dtype in NARROW for kind in graph.types.values())


def outermost(kind: TensorType, place: Along) -> bool:
    """True if the samples of a tensor lie one behind the other in memory."""
    return place.outer == 1 and prod(kind.sizes[: place.axis]) == 1


def _require_outermost(role: str, tensor: str, kind: TensorType, place: Place, name: str) -> None:
    if place is not None and place.step:
        raise ShapeError(f"{role} '{tensor}' has the numbers of its samples in it")
    if place is not None and not outermost(kind, place):
        raise ShapeError(
            f"{role} '{tensor}' has '{name}' on axis {place.axis}, which is not its outermost axis"
        )


class _Walk:
    """The places of the tensors that were reached so far, by their names in the small graph."""

    def __init__(self, small: Graph, large: Graph, sizes: tuple[int, int]) -> None:
        self.small, self.large, self.sizes = small, large, sizes
        self.places: dict[str, Place] = {}
        self.repeated: dict[str, Along] = {}  # constants that repeat one sample
        self.names: dict[str, str] = dict(zip(small.inputs, large.inputs, strict=True))

    def step(self, op: Operator, twin: Operator) -> None:
        if op.kind != twin.kind or len(op.inputs) != len(twin.inputs):
            raise Mixed(
                f"is {twin.kind} at the size {self.sizes[1]}: the model computes something else "
                "at each size"
            )
        wanted = None
        for source, other in zip(op.inputs, twin.inputs, strict=True):
            self._meet(source, other)
            wanted = wanted or self.places.get(source)
        places = [self._constant(s, op, wanted) for s in op.inputs]
        types = tuple(self.small.types[source] for source in op.inputs)
        call = Call(op, types, tuple(places), self.sizes, twin)
        place = self._place(call)
        _require_type(op.type, twin.type, place, self.sizes)
        self.places[op.output] = place
        self.names[op.output] = twin.output

    def _meet(self, source: str, other: str) -> None:
        """Notes that both graphs have a tensor in the same place. Constants are compared when an
        operator reads them.
        """
        if self.names.setdefault(source, other) != other:
            raise Mixed("reads other tensors at each size")
        if self.small.is_constant(source) != self.large.is_constant(other):
            raise Mixed(f"reads '{source}', which is a constant at one size alone")

    def _constant(self, source: str, op: Operator, wanted: Place) -> Place:
        """The place of an operator's input. A constant that grows with the dimension repeats one
        sample; where that may be read in two ways, it is read as the other operands are.
        """
        if source in self.places:
            return self.places[source]
        n, m = self.sizes
        a, b = self.small.constants[source], self.large.constants[self.names[source]]
        place = _differing(self.small.types[source], self.large.types[self.names[source]], (n, m))
        if isinstance(place, str):
            raise Mixed(f"reads a constant whose {place}")
        if place is None:
            if not equal_arrays(a, b):
                raise Mixed("reads a constant whose values depend on the size")
            self.places[source] = None
            return None
        factor = place.inner
        tries = [(1, factor), (factor, 1)]
        if wanted and wanted.outer * wanted.inner == factor:
            tries.insert(0, (wanted.outer, wanted.inner))
        for outer, inner in tries:
            one = one_sample(a, place.axis, outer, n, inner)
            two = one_sample(b, place.axis, outer, m, inner)
            if one is not None and two is not None and equal_arrays(one, two):
                found = Along(place.axis, outer, inner)
                self.repeated.setdefault(source, found)  # any other way to read it is as good
                return found
        for outer, inner in tries:
            found = Along(place.axis, outer, inner)
            step = _step(a, found, n)
            if step and step == _step(b, found, m):
                first, other = (_first(x, found, size) for x, size in ((a, n), (b, m)))
                if equal_arrays(first, other):
                    return self.repeated.setdefault(source, replace(found, step=step))
        raise Mixed("reads a constant that has other values for each sample")

    def _place(self, call: Call) -> Place:
        op = call.small
        if op.kind == "broadcast" and call.places[0] is None:
            place = _differing(op.type, call.large.type, self.sizes)
            if isinstance(place, str):
                raise Mixed(f"makes a tensor whose {place}")
            source = call.types[0].shape
            if place and place.axis >= len(op.type.shape) - len(source):
                if source[place.axis - len(op.type.shape) + len(source)] != 1:
                    raise Mixed("repeats its input as often as the size says")
            return place
        if op.attrs != call.large.attrs:
            raise Mixed("has attributes that depend on the size")
        if all(place is None for place in call.places):
            return None
        return place_of(call)


def equal_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    """True if both have the same type, shape and bytes."""
    same = a.dtype == b.dtype and a.shape == b.shape
    return a is b or (same and a.tobytes() == b.tobytes())


def one_sample(
    array: np.ndarray, axis: int, outer: int, size: int, inner: int
) -> np.ndarray | None:
    """The part of a constant that is the same for all samples; None if it is not."""
    apart = _apart(array, Along(axis, outer, inner), size)
    first = np.ascontiguousarray(apart[0])
    same = all(np.ascontiguousarray(one).tobytes() == first.tobytes() for one in apart[1:])
    return first if same else None


def _apart(array: np.ndarray, place: Along, size: int) -> np.ndarray:
    """A constant with its ``size`` samples along a first axis of their own."""
    axis = place.axis
    shape = (*array.shape[:axis], place.outer, size, place.inner, *array.shape[axis + 1 :])
    return np.moveaxis(array.reshape(shape), axis + 1, 0)


def _first(array: np.ndarray, place: Along, size: int) -> np.ndarray:
    return np.ascontiguousarray(_apart(array, place, size)[0])


def _step(array: np.ndarray, place: Along, size: int) -> int | None:
    """By how much the integers of a constant grow from each sample to the next; None if they do
    not, or not all alike.
    """
    if array.dtype.kind not in "iu" or not array.size:
        return None
    apart = _apart(array, place, size).astype(np.int64)
    steps = np.unique(apart[1:] - apart[:-1])
    return int(steps[0]) if steps.size == 1 and steps[0] > 0 else None


def _repeated(array: np.ndarray, place: Along, size: int) -> np.ndarray:
    """A constant that repeats one sample, or counts samples, for another number of them. Where it
    can be it is a view without memory of its own, as what broadcasts a constant makes.
    """
    if place.step:
        samples = array.shape[place.axis] // (place.outer * place.inner)
        numbers = np.arange(size, dtype=array.dtype) * array.dtype.type(place.step)
        first = _first(array, place, samples)
        made = first + numbers.reshape((size, *[1] * first.ndim))
        made = np.moveaxis(made, 0, place.axis + 1)
        whole = (place.outer * size * place.inner,)
        return made.reshape((*array.shape[: place.axis], *whole, *array.shape[place.axis + 1 :]))
    before, behind = array.shape[: place.axis], array.shape[place.axis + 1 :]
    samples = array.shape[place.axis] // (place.outer * place.inner)
    apart = array.reshape((*before, place.outer, samples, place.inner, *behind))
    one = apart[(*[slice(None)] * (place.axis + 1), slice(0, 1))]
    shape = (*before, place.outer, size, place.inner, *behind)
    return np.broadcast_to(one, shape).reshape((*before, place.outer * size * place.inner, *behind))


def _differing(a: TensorType, b: TensorType, sizes: tuple[int, int]) -> Along | str | None:
    """The axis whose size is the dimension times a number. A text if there is no such axis and the
    types are not equal.
    """
    if a == b:
        return None
    if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
        return "number of axes depends on the size"
    axes = [axis for axis, (x, y) in enumerate(zip(a.sizes, b.sizes, strict=True)) if x != y]
    if len(axes) != 1:
        return "sizes of several axes depend on the size"
    (axis,) = axes
    factor, rest = divmod(a.sizes[axis], sizes[0])
    if rest or not factor or b.sizes[axis] != factor * sizes[1]:
        return "size is not the dimension times a number"
    return Along(axis, 1, factor)


def _require_type(a: TensorType, b: TensorType, place: Place, sizes: tuple[int, int]) -> None:
    """Raises :class:`Mixed` unless a tensor with these types at both sizes has the samples at this
    place, and nothing else of it depends on the size.
    """
    found = _differing(a, b, sizes)
    if isinstance(found, str):
        raise Mixed(f"makes a tensor whose {found}")
    if (found is None) != (place is None):
        raise Mixed("makes a tensor whose size does not follow from its inputs' samples")
    if found and place and (found.axis, found.inner) != (place.axis, place.outer * place.inner):
        raise Mixed("moves samples to an axis that does not have their number")
