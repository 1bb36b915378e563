"""A graph under construction: ONNX nodes with known shapes, and the input arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Value = TypeVar("Value")
TYPES = {"float32": TensorProto.FLOAT, "bool": TensorProto.BOOL, "int64": TensorProto.INT64}
MOST = 6000  # elements of a tensor, about


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass
class Builder:
    """Nodes, constants and inputs. ``random`` makes every choice, so each seed gives one graph."""

    random: Random
    opset: int
    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    smooth: bool = True  # no rounding, comparison or sign: a small error stays small
    special: bool = True  # NaN and infinities mean the same to every engine
    numpy: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.numpy = np.random.default_rng(self.random.getrandbits(32))

    # choices --------------------------------------------------------------------------------------
    def pick(self, options: Sequence[Value]) -> Value:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def size(self, most: int = 9) -> int:
        """A size, rarely a large one. Vectors have 8 and 16 lanes, so sizes around these are
        likely.
        """
        if self.chance(0.2):
            return self.pick([1, 7, 8, 15, 16, 17, 31, 33])
        return self.random.randint(1, most)

    def split_of(self, number: int) -> int:
        """A divisor."""
        return self.pick([d for d in range(1, number + 1) if number % d == 0])

    # tensors --------------------------------------------------------------------------------------
    def fresh(self) -> str:
        return f"{self.prefix}t{len(self.nodes)}_{len(self.constants)}_{len(self.feeds)}"

    def constant(self, value: Any, dtype: str = "float32") -> Tensor:
        array = np.asarray(value, dtype)
        name = self.fresh() + "c"
        self.constants[name] = array
        return Tensor(name, array.shape, dtype)

    def ints(self, values: Sequence[int]) -> Tensor:
        return self.constant(np.asarray(values, np.int64).reshape(-1), "int64")

    def weight(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.constant(self.numpy.standard_normal(shape) * scale)

    def input(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        name = self.fresh() + "i"
        if dtype == "bool":
            share = self.pick([0.2, 0.5, 0.9])
            self.feeds[name] = np.asarray(self.numpy.random(tuple(shape)) < share)
        else:
            self.feeds[name] = np.asarray(self.numpy.standard_normal(tuple(shape)), dtype)
        return Tensor(name, tuple(shape), dtype)

    def add(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        shape: Sequence[int],
        dtype: str = "float32",
        **attrs: Any,
    ) -> Tensor:
        return self.several(kind, inputs, [shape], dtype, **attrs)[0]

    def several(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        shapes: Sequence[Sequence[int]],
        dtype: str = "float32",
        **attrs: Any,
    ) -> list[Tensor]:
        base = self.fresh()
        made = [Tensor(f"{base}_{i}", tuple(map(int, s)), dtype) for i, s in enumerate(shapes)]
        given = [t.name if t is not None else "" for t in inputs]
        self.nodes.append(helper.make_node(kind, given, [t.name for t in made], **attrs))
        return made

    # what most pieces need ------------------------------------------------------------------------
    def outputs(self, last: Tensor, inner: Sequence[Tensor], chance: float) -> tuple[Tensor, ...]:
        """The last tensor as the output of a node, and by ``chance`` one of the inner tensors."""
        if not self.nodes or last.name in self.feeds:
            last = self.unary("Identity", last)
        made = {name for node in self.nodes for name in node.output}
        if self.chance(chance):
            second = self.pick(inner)
            if second.name in made and second.name != last.name:
                return last, second
        return (last,)

    def used(self) -> dict[str, np.ndarray]:
        """The inputs that some node reads."""
        read = {name for node in self.nodes for name in node.input}
        return {name: value for name, value in self.feeds.items() if name in read}

    def unary(self, kind: str, x: Tensor, **attrs: Any) -> Tensor:
        return self.add(kind, [x], x.shape, x.dtype, **attrs)

    def binary(self, kind: str, a: Tensor, b: Tensor, dtype: str = "") -> Tensor:
        shape = np.broadcast_shapes(a.shape, b.shape)
        return self.add(kind, [a, b], shape, dtype or a.dtype)

    def number(self, value: float) -> Tensor:
        return self.constant(np.float32(value))

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        assert prod(shape) == x.size, f"{x} to {shape}"
        return self.add("Reshape", [x, self.ints(shape)], shape, x.dtype)

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        return self.add("Transpose", [x], [x.shape[a] for a in order], x.dtype, perm=list(order))

    def slice(self, x: Tensor, axis: int, begin: int, end: int, step: int = 1) -> Tensor:
        shape = list(x.shape)
        shape[axis] = len(range(*slice(begin, end, step).indices(shape[axis])))
        ends = [self.ints([v]) for v in (begin, end, axis, step)]
        return self.add("Slice", [x, *ends], shape, x.dtype)

    def reduce(self, kind: str, x: Tensor, axes: Sequence[int], keep: bool = True) -> Tensor:
        gone = {a % x.rank for a in axes}
        shape = [1 if a in gone else n for a, n in enumerate(x.shape) if keep or a not in gone]
        if self.opset >= 18 or kind == "ReduceSum":
            return self.add(kind, [x, self.ints(axes)], shape, keepdims=int(keep))
        return self.add(kind, [x], shape, axes=list(axes), keepdims=int(keep))

    def shaped(self, x: Tensor, rank: int) -> Tensor:
        """``x`` with this rank: leading axes are merged, or sizes are split and ones inserted."""
        shape = list(x.shape)
        while len(shape) > rank:
            at = self.random.randrange(len(shape) - 1)
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        while len(shape) < rank:
            at = self.random.randrange(len(shape) + 1)
            if at < len(shape) and self.chance(0.7):
                d = self.split_of(shape[at])
                shape[at : at + 1] = [d, shape[at] // d]
            else:
                shape.insert(at, 1)
        return x if tuple(shape) == x.shape else self.reshape(x, shape)

    def broadcastable(self, shape: Sequence[int]) -> list[int]:
        """A shape that broadcasts to ``shape``."""
        out = [1 if self.chance(0.4) else n for n in shape]
        return out[self.random.randint(0, len(out)) :] if self.chance(0.4) else out


@dataclass(frozen=True)
class Drawn:
    """A finished graph: that of ``seed`` under ``opset``."""

    seed: int
    opset: int
    nodes: tuple[onnx.NodeProto, ...]
    constants: dict[str, np.ndarray]
    feeds: dict[str, np.ndarray]
    outputs: tuple[Tensor, ...]
    smooth: bool

    @property
    def kinds(self) -> list[str]:
        return [n.op_type for n in self.nodes]


def model_of(graphs: Sequence[Drawn]) -> onnx.ModelProto:
    """The graphs side by side in one model."""
    dtype = {np.dtype(k): v for k, v in TYPES.items()}
    graph = helper.make_graph(
        [n for g in graphs for n in g.nodes],
        "random",
        [
            helper.make_tensor_value_info(k, dtype[v.dtype], v.shape)
            for g in graphs
            for k, v in g.feeds.items()
        ],
        [
            helper.make_tensor_value_info(t.name, TYPES[t.dtype], t.shape)
            for g in graphs
            for t in g.outputs
        ],
        [numpy_helper.from_array(v, k) for g in graphs for k, v in g.constants.items()],
    )
    opsets = [helper.make_opsetid("", graphs[0].opset)]
    others = sorted({n.domain for g in graphs for n in g.nodes} - {""})
    opsets += [helper.make_opsetid(domain, 1) for domain in others]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    return model
