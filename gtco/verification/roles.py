"""The role of each input by its ONNX graph: index of a table, mask, or data.

Each input is followed forward through movement, casts and element-wise arithmetic, until an
operator shows its role. An input is data if a product or a function takes it, or if it is compared
with other values than 0 and 1, even if other operators test it for zero: ids are compared with the
id of padding, bytes with every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Mask = Literal["binary", "additive", "either"]

_MOVES = frozenset(
    "Identity Reshape Unsqueeze Squeeze Flatten Transpose Expand Tile Slice Concat Split Pad Cast "
    "CastLike Resize Upsample MaxPool".split()
)
_ARITHMETIC = frozenset("Add Sub Mul Div Neg Max Min Clip Abs Sum".split())
_COMPARES = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())
_LOGIC = frozenset("And Or Xor Not IsInf IsNaN".split())
_GATHERS = {"Gather": "axis", "GatherElements": "axis", "GatherND": None, "ScatterND": None}
# Operators that count elements or read shapes: they tell nothing about the values.
_COUNTS = frozenset(
    "Shape Size ReduceSum ReduceMax ReduceMin ReduceMean CumSum NonZero ConstantOfShape".split()
)
_ATTENTION_MASK = 3  # the place of attn_mask among the inputs of ONNX's Attention
_BOOL = 9  # TensorProto.BOOL
_MASKS_TELL = {0.0, 0.5, 1.0}  # the values with which masks are compared
# The most special values of an input. If it is compared with more values, they are its range.
_SPECIAL = 16
_SMALL = 1 << 16  # constants of up to so many elements are read


@dataclass(frozen=True)
class Role:
    """The role of one input.

    - ``index``: it indexes a table;
    - ``low`` to ``bound`` (exclusive): the values that index a table, or with which it is compared
      all at once, if they are known;
    - ``mask``: ``binary`` (zero means masked, or not masked), ``additive`` (added to the scores
      before a softmax: zero or a huge negative number), ``either`` (a mask only by its name); None
      if it is not a mask;
    - ``data``: it is computed with;
    - ``told``: the few values that it is compared with, such as padding.
    """

    index: bool = False
    bound: int | None = None
    mask: Mask | None = None
    low: int = 0
    data: bool = False
    told: tuple[float, ...] = ()


def onnx_roles(graph: Any) -> dict[str, Role]:
    """The role of each input of a ``GraphProto`` that is not an initializer, by name."""
    known = _Known.of(graph)
    return {
        value.name: _role(value.name, known)
        for value in graph.input
        if value.name not in known.constants
    }


@dataclass(frozen=True)
class _Known:
    """Facts about tensors: the ``readers`` of each, with its place among their inputs; ``sizes``
    and small ``values`` of constants; the names of all ``constants``.
    """

    readers: dict[str, list[tuple[Any, int]]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: dict[str, NDArray[Any]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    @staticmethod
    def of(graph: Any) -> _Known:
        known = _Known()
        known.add(graph)
        return known

    def add(self, graph: Any) -> None:
        """Adds the graph and those inside it. Inner graphs read its tensors by name."""
        for tensor in graph.initializer:
            self._constant(tensor.name, tensor)
        for node in graph.node:
            for position, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((node, position))
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs):
                    self.add(inner)
                if node.op_type == "Constant" and attribute.name == "value":
                    self._constant(node.output[0], attribute.t)
            if all(name in self.constants or not name for name in node.input):
                self.constants.update(node.output)
                if node.op_type in _MOVES and node.input and node.input[0] in self.values:
                    self.values[node.output[0]] = self.values[node.input[0]]

    def _constant(self, name: str, tensor: Any) -> None:
        from onnx import numpy_helper
        from onnx.external_data_helper import uses_external_data

        self.constants.add(name)
        self.sizes[name] = tuple(tensor.dims)
        if np.prod(tensor.dims) <= _SMALL and not uses_external_data(tensor):
            self.values[name] = numpy_helper.to_array(tensor)

    def made_of(self, name: str) -> set[str]:
        """The tensors that are computed only from this one and constants."""
        own, open_ = {name}, [name]
        while open_:
            for node, _ in self.readers.get(open_.pop(), ()):
                if all(n in own or n in self.constants or not n for n in node.input):
                    new = set(node.output) - own
                    own |= new
                    open_ += new
        return own

    def scalar(self, name: str) -> float | None:
        value = self.values.get(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


@dataclass(frozen=True)
class _Place:
    """A tensor on the way from an input.

    - ``computed``: it no longer has the input's own values, but ``times`` * value + ``plus``, if
      that is not None;
    - ``added``: it is scores to which the input was added;
    - ``met``: values that were computed from the input and other tensors.
    """

    tensor: str
    computed: bool = False
    added: bool = False
    met: bool = False
    times: float | None = 1.0
    plus: float = 0.0

    def back(self, value: float) -> float | None:
        """The value of the input for which this tensor is ``value``."""
        return None if not self.times else (value - self.plus) / self.times


def _role(name: str, known: _Known) -> Role:
    index, data, ranges = False, False, list[tuple[int, int]]()
    masks, told = set[Mask](), set[float]()
    own = known.made_of(name)
    seen: set[_Place] = set()
    open_: list[_Place] = [_Place(name)]
    while open_:
        place = open_.pop()
        if place in seen:
            continue
        seen.add(place)
        for node, position in known.readers.get(place.tensor, ()):
            kind = node.op_type
            mask: Mask = "binary" if place.computed else "additive"
            if _indexes(node, position):
                index = True
                ranges += _table(place, node, known)
            elif kind in _COMPARES:
                values = _compared(place, node, position, known)
                if values and len(values) > _SPECIAL:  # all of its values, not a special one
                    ranges.append((ceil(min(values)), floor(max(values)) + 1))
                else:
                    told |= values or set()
                if values is not None and values <= _MASKS_TELL:
                    masks.add("binary")
                else:
                    data = True
            elif _decides(node, position):
                masks.add("binary")
            elif kind in ("Softmax", "LogSoftmax") and place.added:
                masks.add(mask)
            elif kind == "Attention" and position == _ATTENTION_MASK:
                masks.add(mask)
            elif kind not in _COUNTS:
                following = list(_next(place, node, position, own, known))
                open_ += following
                moves = kind in _MOVES or kind in _GATHERS
                data = data or not (following or place.met or moves)
    low, bound = _intersection(ranges)
    style: Mask | None = None
    if masks and not index:
        style = "additive" if masks == {"additive"} else "binary"
    return Role(index, bound, style, low, data, tuple(sorted(told)))


def _indexes(node: Any, position: int) -> bool:
    return position == 1 if node.op_type in _GATHERS else (node.op_type, position) == ("OneHot", 0)


def _decides(node: Any, position: int) -> bool:
    """True if the operator asks a yes-no question of each element, not an amount."""
    return (
        node.op_type in _LOGIC
        or (node.op_type == "Where" and position == 0)
        or (node.op_type == "Cast" and _attribute(node, "to", 0) == _BOOL)
    )


def _compared(place: _Place, node: Any, position: int, known: _Known) -> set[float] | None:
    """The values of the input that the other side has; an empty set if they are not known; None if
    the other side is not a constant.
    """
    other = node.input[1 - position]
    if other not in known.constants:
        return None
    found = {place.back(float(v)) for v in np.unique(known.values.get(other, np.empty(0)))}
    return {v for v in found if v is not None}


def _next(
    place: _Place, node: Any, position: int, own: set[str], known: _Known
) -> Iterator[_Place]:
    """The places after an operator that passes values on."""
    computed, added, met = place.computed, place.added, place.met
    times, plus = place.times, place.plus
    if node.op_type in _MOVES or node.op_type in _GATHERS:
        if position != 0 and node.op_type != "Concat":
            return
    elif node.op_type in _ARITHMETIC or node.op_type == "Where":
        others = [n for p, n in enumerate(node.input) if p != position and n]
        if node.op_type in ("Add", "Sum") and not all(n in known.constants for n in others):
            added = True
        elif not added:
            computed = True
        met = met or not all(n in own or n in known.constants for n in others)
        times, plus = _affine(place, node, position, known)
    else:
        return
    for output in node.output:
        yield _Place(output, computed, added, met, times, plus)


def _affine(place: _Place, node: Any, position: int, known: _Known) -> tuple[float | None, float]:
    """The new times and plus after an addition or multiplication of one constant."""
    times, plus = place.times, place.plus
    other = known.scalar(node.input[1 - position]) if len(node.input) == 2 else None
    kind = node.op_type
    if times is None:
        return None, 0.0
    if kind == "Neg":
        return -times, -plus
    if other is None or (kind == "Div" and (position or not other)):
        return None, 0.0
    if kind in ("Add", "Sum"):
        return times, plus + other
    if kind == "Sub":
        return (-times, other - plus) if position else (times, plus - other)
    if kind == "Mul":
        return times * other, plus * other
    if kind == "Div":
        return times / other, plus / other
    return None, 0.0


def _table(place: _Place, node: Any, known: _Known) -> list[tuple[int, int]]:
    """The ranges of the input's values that index the table of a gather, each from one value to
    below another.
    """
    if node.op_type == "OneHot":
        depth = known.scalar(node.input[1])
        size = None if depth is None else int(depth)
    else:
        dims, axis_name = known.sizes.get(node.input[0]), _GATHERS[node.op_type]
        size = None
        if dims is not None and axis_name is not None:
            axis = _attribute(node, axis_name, 0)
            size = dims[axis] if -len(dims) <= axis < len(dims) else None
    ends = [place.back(v) for v in (0, size - 1)] if size else [None]
    if any(end is None for end in ends):
        return []
    least, most = sorted(end for end in ends if end is not None)
    return [(ceil(least - 1e-6), floor(most + 1e-6) + 1)]


def _intersection(ranges: list[tuple[int, int]]) -> tuple[int, int | None]:
    """The range that all of them contain; from 0, without an end, if there is none."""
    if not ranges:
        return 0, None
    low, bound = max(low for low, _ in ranges), min(high for _, high in ranges)
    return (low, bound) if low < bound else (0, None)


def _attribute(node: Any, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)
