"""The products by constant weights of an ONNX graph: which there are, what they are called, and
which of them stay in float whatever they cost.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from gtco.frontend.onnx import OnnxSource
from gtco.support.errors import ModelError, OptionError
from gtco.support.later import Later, read
from gtco.support.onnx_messages import nodes as all_nodes
from gtco.support.onnx_messages import subgraphs

Array = NDArray[Any]

KINDS = ("MatMul", "Gemm", "Conv")
# Sums of more terms of uint8 by int8 may leave int32, with room for zero points
# (gtco/graph/rewrites/quantized/integer_products.py).
_DEEPEST = 26_000
_MIXED = 8  # groups of fewer inputs are not products of matrices (tensor/analysis/window.py)
# A classifier's scores pass through these on their way to an output.
_PASSING = frozenset(
    """Identity Reshape Flatten Squeeze Unsqueeze Transpose Cast Sigmoid Softmax LogSoftmax Relu
    Clip Resize Slice Gather Split Add Sub Mul Div ArgMax TopK""".split()
)
_JOINING = frozenset(("Add", "Sub", "Mul", "Div"))  # unless they join two computed tensors

EXCLUDED = "excluded"
READS_INPUT = "reads the input"
MAKES_OUTPUT = "makes the output"
DEPTHWISE = "depthwise"
DEEP = "too deep"


@dataclass(frozen=True)
class Product:
    """A MatMul, Gemm or Conv whose second operand is constant.

    - ``node``: its name in the graph, and ``output``: what it makes, which no other node does
    - ``label``: what people call it; ``names``: all by which ``exclude`` finds it
    - ``tensor``: the first operand, which is quantized
    - ``weight`` and ``weights``: the second operand, name and value, and ``axis``: its output
      channels
    - ``float_because``: why it stays in float; "" if it may be quantized
    """

    node: str
    kind: str
    output: str
    label: str
    names: tuple[str, ...]
    tensor: str
    weight: str
    weights: Array = field(repr=False)
    axis: int
    group: int = 1
    float_because: str = ""

    @property
    def depth(self) -> int:
        """Terms of each sum."""
        return self.weights.size // max(1, self.weights.shape[self.axis])


def products_of(source: OnnxSource, exclude: Sequence[str] = ()) -> list[Product]:
    """The products in order. Raises :class:`ModelError` if there is none that could be quantized,
    and :class:`OptionError` for a name in ``exclude`` that no product has.
    """
    graph = source.skeleton.graph
    constants = Constants(graph, source.weights)
    edges = Edges(graph, constants)
    found = [p for node in graph.node if (p := _product(node, constants, edges)) is not None]
    if not found:
        raise ModelError(_nothing(source))
    labels = Counter(product.label for product in found)  # a bias of zeros may be one for many
    found = [p if labels[p.label] == 1 else replace(p, label=p.node) for p in found]
    excluded = _excluded(found, exclude)
    reasons = {p.output: _kept(p, edges) for p in found}
    ends = (READS_INPUT, MAKES_OUTPUT)
    if not any(reasons[p.output] == "" and p.output not in excluded for p in found):
        # a model of nothing but ends has them quantized
        reasons = {output: "" if r in ends else r for output, r in reasons.items()}
    marked = [
        replace(p, float_because=EXCLUDED if p.output in excluded else reasons[p.output])
        for p in found
    ]
    if not any(p.float_because == "" for p in marked):
        listed = "; ".join(f"'{p.label}' is {p.float_because}" for p in marked[:5])
        raise ModelError(f"no product is left to quantize: {listed}")
    return marked


def _nothing(source: OnnxSource) -> str:
    half = any(t.data_type in (10, 16) for t in source.skeleton.graph.initializer)
    if half or any(value.dtype.itemsize == 2 for value in source.weights.values()):
        return (
            "the model has no product by float32 weights: it is of float16 or bfloat16. Quantize "
            "the float32 model that it was made from"
        )
    return (
        "the model has no product to quantize: no MatMul, Gemm or Conv of it has constant float32 "
        "weights"
    )


class Constants:
    """The values of constants by name: ``weights``, initializers, Constant nodes, and what Identity
    and Transpose make of them. No large one is copied.
    """

    def __init__(self, graph: onnx.GraphProto, weights: Mapping[str, Array | Later]) -> None:
        self._weights = weights
        self._given = {tensor.name: tensor for tensor in graph.initializer}
        self._made = {
            node.output[0]: node
            for node in graph.node
            if node.op_type in ("Constant", "Identity", "Transpose") and node.output
        }
        self._known: dict[str, Array | None] = {}

    def __contains__(self, name: str) -> bool:
        return self.value(name) is not None

    def value(self, name: str) -> Array | None:
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def source(self, name: str) -> str:
        """The initializer that the value comes from."""
        given = self._given.keys() | self._weights.keys()
        while name not in given and name in self._made and self._made[name].input:
            name = self._made[name].input[0]
        return name

    def _find(self, name: str) -> Array | None:
        if name in self._weights:
            return read(self._weights[name])
        if name in self._given:
            return numpy_helper.to_array(self._given[name])
        node = self._made.get(name)
        if node is None:
            return None
        if node.op_type == "Constant":
            values = [a.t for a in node.attribute if a.name == "value"]
            return numpy_helper.to_array(values[0]) if values else None
        inner = self.value(node.input[0])
        if inner is None or node.op_type == "Identity":
            return inner
        order = [list(a.ints) for a in node.attribute if a.name == "perm"]
        return inner.transpose(order[0] if order else None)


class Edges:
    """Who makes and who reads each tensor; which tensors lie behind and before a product."""

    def __init__(self, graph: onnx.GraphProto, constants: Constants) -> None:
        self.constants = constants
        self.outputs = {value.name for value in graph.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.behind: set[str] = set()  # tensors that some product has a part in
        for node in graph.node:
            for name in dict.fromkeys(reads(node)):
                self.readers[name].append(node)
            if node.op_type in KINDS or any(name in self.behind for name in reads(node)):
                self.behind.update(node.output)

    def ends_in_scores(self, tensor: str) -> bool:
        """True if the tensor reaches outputs, and nothing but what a classifier has behind it."""
        seen, open_, arrives = set(), [tensor], False
        while open_:
            name = open_.pop()
            arrives = arrives or name in self.outputs
            for node in self.readers[name]:
                if node.op_type not in _PASSING or node.domain not in ("", "ai.onnx"):
                    return False
                others = [n for n in node.input if n and n != name]
                if node.op_type in _JOINING and any(n not in self.constants for n in others):
                    return False
                open_ += [o for o in node.output if o not in seen]
                seen.update(node.output)
        return arrives


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """All names that the node reads, those of its subgraphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in subgraphs(attribute):
            yield from (value.name for value in graph.output)
            for inner in all_nodes(graph):
                yield from (name for name in inner.input if name)


def _product(node: onnx.NodeProto, constants: Constants, edges: Edges) -> Product | None:
    if node.op_type not in KINDS or node.domain not in ("", "ai.onnx"):
        return None
    x, w = node.input[:2]
    weights = constants.value(w)
    if weights is None or weights.dtype != numpy.float32 or not weights.size or x in constants:
        return None
    if weights.ndim != (4 if node.op_type == "Conv" else 2):
        return None
    attributes = {a.name: a.i for a in node.attribute}
    if node.op_type == "Gemm" and attributes.get("transA", 0):
        return None
    if not bool(numpy.isfinite(weights).all()):
        raise ModelError(f"the weights '{w}' of '{node.name}' hold NaN or infinity")
    across = node.op_type == "Gemm" and attributes.get("transB", 0)
    axis = 0 if node.op_type == "Conv" or across else 1
    source = constants.source(w)
    names = [source, source.removeprefix("merged."), w, node.name, node.output[0]]
    if len(node.input) > 2 and node.input[2] in constants:
        names.append(constants.source(node.input[2]))
    names += _bias(node.output[0], edges)
    label = next((n for n in names if _says_where(n)), node.name)
    label = re.sub(r"\.(weight|bias)$", "", label)
    return Product(
        node.name,
        node.op_type,
        node.output[0],
        label,
        tuple(dict.fromkeys([label, *names])),
        x,
        w,
        weights,
        axis,
        attributes.get("group", 1),
    )


def _bias(output: str, edges: Edges) -> list[str]:
    """The name of the constant that alone is added to the product: a linear layer's bias."""
    readers = edges.readers[output]
    if len(readers) != 1 or readers[0].op_type != "Add":
        return []
    return [edges.constants.source(n) for n in readers[0].input if n in edges.constants]


def _says_where(name: str) -> bool:
    """True for the name of a module's parameter (``blocks.0.mlp.fc1.weight``)."""
    return bool(re.fullmatch(r"[^:/]+\.(weight|bias)", name))


def _kept(product: Product, edges: Edges) -> str:
    if product.group > 1 and product.weights.shape[1] <= _MIXED:
        return DEPTHWISE
    if product.depth > _DEEPEST:
        return DEEP
    if product.tensor not in edges.behind:
        return READS_INPUT
    return MAKES_OUTPUT if edges.ends_in_scores(product.output) else ""


def _excluded(products: Sequence[Product], exclude: Sequence[str]) -> Collection[str]:
    found: set[str] = set()
    for wanted in exclude:
        matching = [p.output for p in products if any(_matches(n, wanted) for n in p.names)]
        if not matching:
            near = difflib.get_close_matches(wanted, [p.label for p in products], 3, 0.4)
            few = [p.label for p in products[:5]]
            raise OptionError(
                f"exclude: no product is called '{wanted}'. "
                f"{'Near it are' if near else 'There are'} {', '.join(near or few)}; gtco "
                "quantize --all without it lists all"
            )
        found.update(matching)
    return found


def _matches(name: str, wanted: str) -> bool:
    """True for the whole name, a pattern of it (``blocks.0.*``), or some of its parts in a row
    (``blocks.0``, ``head``).
    """
    if name == wanted or fnmatch.fnmatchcase(name, wanted):
        return True
    parts, asked = (re.split(r"[./]", text.strip("./")) for text in (name, wanted))
    spans = (parts[n : n + len(asked)] for n in range(len(parts) - len(asked) + 1))
    return asked in spans


def by_tensor(products: Sequence[Product]) -> Mapping[str, list[Product]]:
    """The products that may be quantized, by the tensor that they read."""
    found: dict[str, list[Product]] = {}
    for product in products:
        if not product.float_because:
            found.setdefault(product.tensor, []).append(product)
    return found
