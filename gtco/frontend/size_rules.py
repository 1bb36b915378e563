"""Rules about sizes that ONNX has and its shape inference does not check. A node that breaks one
fails in TVM, or it would be compiled for tensors that no other engine makes. Most such nodes are
right at one size of the model's inputs, and the user asked for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy
import onnx
from onnx import helper

Shape = tuple[int, ...]
Values = Mapping[str, numpy.ndarray]  # of small constants
Rule = Callable[[onnx.NodeProto, Sequence[Shape | None], Values], str]


def broken_rule(node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Values) -> str:
    """Which rule the node breaks, in words; "" if none. ``inputs``: the shapes of its inputs, None
    where they are not known. ``values``: by name.
    """
    rule = _RULES.get(node.op_type)
    return rule(node, inputs, values) if rule is not None and node.domain in ("", "ai.onnx") else ""


def negative_size(name: str, shape: Sequence[int]) -> str:
    """The rule that an output of this shape breaks; "" if it has no negative size."""
    axis = next((axis for axis, size in enumerate(shape) if size < 0), None)
    if axis is None:
        return ""
    return (
        f"its output '{name}' would have the size {shape[axis]} on axis {axis}: the input is too "
        "small for it"
    )


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    found = next((a for a in node.attribute if a.name == name), None)
    return default if found is None else int(helper.get_attribute_value(found))


def _list(node: onnx.NodeProto, name: str, count: int, default: int) -> list[int]:
    found = next((a for a in node.attribute if a.name == name), None)
    return (
        [default] * count if found is None else [int(n) for n in helper.get_attribute_value(found)]
    )


def _layer_norm(node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Values) -> str:
    x, *parameters = inputs
    if x is None:
        return ""
    for name, shape in zip(node.input[1:], parameters, strict=True):
        if shape is not None and not _broadcasts(shape, x):
            return f"'{name}' has the shape {list(shape)}, and what it scales {list(x)}"
    return ""


def _broadcasts(shape: Shape, wanted: Shape) -> bool:
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in pairs)


def _conv(node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Values) -> str:
    x, w = inputs[:2]
    if x is None or w is None or len(x) < 3 or len(w) < 3:
        return ""
    group = _attribute(node, "group", 1)
    if x[1] != w[1] * group:
        return f"its input has {x[1]} channels, and its weights are for {w[1] * group}"
    return _window(node, x[2:], w[2:])


def _window(node: onnx.NodeProto, sizes: Shape, kernel: Shape) -> str:
    """The rule that a window lies inside the padded image. (ONNX's inference rounds towards 0, and
    finds one pixel where less than a stride is missing.)
    """
    mode = next((a.s.decode() for a in node.attribute if a.name == "auto_pad"), "NOTSET")
    if mode.startswith("SAME"):
        return ""
    rank = len(sizes)
    pads = _list(node, "pads", 2 * rank, 0) if mode == "NOTSET" else [0] * 2 * rank
    dilations = _list(node, "dilations", rank, 1)
    for axis, (n, k, d) in enumerate(zip(sizes, kernel, dilations, strict=True)):
        reach, padding = (k - 1) * d + 1, pads[axis] + pads[axis + rank]
        if reach > n + padding:
            padded = f" and {padding} of padding" if padding else ""
            return (
                f"its window has {reach} elements along axis {axis + 2}, and the input {n}"
                f"{padded}: the input is too small for it"
            )
    return ""


def _einsum(node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Values) -> str:
    equation = next(helper.get_attribute_value(a) for a in node.attribute if a.name == "equation")
    terms = equation.decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=False):
        if shape is None or "." in term or len(term) != len(shape):
            continue
        for letter, size in zip(term, shape, strict=True):
            known = sizes.get(letter, 1)
            if 1 not in (size, known) and size != known:
                return f"'{letter}' of its equation is {known} and {size}"
            sizes[letter] = max(size, known)
    return ""


def _gather(node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Values) -> str:
    x, places = inputs[0], values.get(node.input[1])
    if x is None or places is None or not x:
        return ""
    axis = _attribute(node, "axis", 0)
    size = x[axis]
    outside = [int(p) for p in places.flat if not -size <= p < size]
    if outside:
        return f"it picks element {outside[0]} along axis {axis}, which has {size}"
    return ""


_RULES: Mapping[str, Rule] = {
    "LayerNormalization": _layer_norm,
    "Conv": _conv,
    "ConvInteger": _conv,
    "Einsum": _einsum,
    "Gather": _gather,
}
