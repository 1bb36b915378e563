"""What an ONNX graph says of its inputs: which index a table, and which are masks.

Each input is followed forward through movement, casts and element-wise arithmetic, until an
operator shows what it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mask = Literal["binary", "additive", "either"]

_MOVES = frozenset(
    "Identity Reshape Unsqueeze Squeeze Flatten Transpose Expand Tile Slice Concat Split Pad Cast "
    "CastLike".split()
)
_ARITHMETIC = frozenset("Add Sub Mul Div Neg Max Min Clip Abs Sum".split())
_COMPARES = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsInf".split())
_GATHERS = {"Gather": "axis", "GatherElements": "axis", "GatherND": None, "ScatterND": None}
_ATTENTION_MASK = 3  # the place of attn_mask among the inputs of ONNX's Attention


@dataclass(frozen=True)
class Role:
    """What one input is for.

    ``index``: it indexes a table, of ``bound`` entries where that is known. ``mask``: ``binary``
    (zero means masked, or not masked), ``additive`` (added to the scores before a softmax: zero or
    a huge negative number), ``either`` (a mask by its name alone); None for what is no mask.
    """

    index: bool = False
    bound: int | None = None
    mask: Mask | None = None


def onnx_roles(graph: Any) -> dict[str, Role]:
    """The role of each input of a ``GraphProto`` that is no initializer, by name."""
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    readers: dict[str, list[tuple[Any, int]]] = {}
    constants = set(sizes)
    for node in graph.node:
        for position, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, position))
        if all(name in constants or not name for name in node.input):
            constants.update(node.output)
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    sizes[node.output[0]] = tuple(attribute.t.dims)
    return {
        value.name: _role(value.name, readers, sizes, constants)
        for value in graph.input
        if value.name not in constants
    }


@dataclass(frozen=True)
class _Place:
    """A tensor on the way from an input. ``computed``: not the input's own values any more;
    ``added``: scores that the input was added to.
    """

    tensor: str
    computed: bool = False
    added: bool = False


def _role(
    name: str,
    readers: Mapping[str, list[tuple[Any, int]]],
    sizes: Mapping[str, tuple[int, ...]],
    constants: set[str],
) -> Role:
    index, bounds, masks = False, list[int](), set[Mask]()
    seen: set[_Place] = set()
    open_: list[_Place] = [_Place(name)]
    while open_:
        place = open_.pop()
        if place in seen:
            continue
        seen.add(place)
        for node, position in readers.get(place.tensor, ()):
            mask: Mask = "binary" if place.computed else "additive"
            if node.op_type in _GATHERS and position == 1:
                index = True
                if not place.computed:
                    bounds += _table(node, sizes)
            elif _decides(node, position):
                masks.add("binary")
            elif node.op_type in ("Softmax", "LogSoftmax"):
                masks |= {mask} if place.added else set()
            elif node.op_type == "Attention" and position == _ATTENTION_MASK:
                masks.add(mask)
            else:
                open_ += _next(place, node, position, constants)
    return Role(
        index,
        min(bounds, default=None),
        None if index or not masks else "additive" if masks == {"additive"} else "binary",
    )


def _decides(node: Any, position: int) -> bool:
    """Does the operator ask of each element whether, and not how much?"""
    return (
        node.op_type in _COMPARES
        or (node.op_type == "Where" and position == 0)
        or (node.op_type == "Cast" and _attribute(node, "to", 0) == 9)  # TensorProto.BOOL
    )


def _next(place: _Place, node: Any, position: int, constants: set[str]) -> Iterator[_Place]:
    """The places behind an operator that passes values on."""
    computed, added = place.computed, place.added
    if node.op_type in _MOVES or node.op_type in _GATHERS:
        if position != 0 and node.op_type != "Concat":
            return
    elif node.op_type in _ARITHMETIC or node.op_type == "Where":
        others = [n for p, n in enumerate(node.input) if p != position and n]
        meets = node.op_type in ("Add", "Sum") and not all(n in constants for n in others)
        if meets:
            added = True
        elif not added:
            computed = True
    else:
        return
    for output in node.output:
        yield _Place(output, computed, added)


def _table(node: Any, sizes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """Entries of the table that a gather reads, where its size is known."""
    dims = sizes.get(node.input[0])
    kind = _GATHERS[node.op_type]
    if dims is None or kind is None:
        return []
    axis = _attribute(node, kind, 0)
    return [dims[axis]] if -len(dims) <= axis < len(dims) else []


def _attribute(node: Any, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)
