"""Writes QuantizeLinear and DequantizeLinear into an ONNX graph, or switches for them.

before: y = MatMul(x, w)
after:  q = QuantizeLinear(x, s, z) {uint8}; d = DequantizeLinear(q, s, z)
        v = DequantizeLinear(w {int8}, t, 0, axis = 1); y = MatMul(d, v)

All products that read x read the one d. s and z are of the whole tensor; t has a scale for each
output channel, by which the largest weight of that channel is 127.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from gtco.frontend.identity import identity
from gtco.frontend.onnx import OnnxSource
from gtco.frontend.weights import LARGE
from gtco.quantization.observers import Range
from gtco.quantization.products import Product, by_tensor, reads
from gtco.support.onnx_messages import nodes as all_nodes
from gtco.support.version import __version__

Array = NDArray[Any]
_LARGEST = 127  # the largest weight; -128 is left out, so that the steps are symmetric
_PARAMETERS = ("scale", "zero_point")
# A block's scale is made for one of these shares of its largest magnitude.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)



def steps_of(weights: Array, axis: int) -> tuple[Array, Array]:
    """The weights in int8, and the scale of each channel on ``axis``."""
    others = tuple(n for n in range(weights.ndim) if n != axis)
    largest = numpy.abs(weights).max(axis=others)
    scales = (largest / _LARGEST).astype(numpy.float32)
    # a channel of zeros, or of numbers that no scale in float32 tells from 0
    scales[scales < numpy.finfo(numpy.float32).tiny] = 1.0
    wide = scales.reshape([-1 if n == axis else 1 for n in range(weights.ndim)])
    steps = numpy.clip(numpy.rint(weights / wide), -_LARGEST, _LARGEST)
    return steps.astype(numpy.int8), scales


def steps_of_blocks(weights: Array, axis: int, bits: int, block: int) -> tuple[Array, Array]:
    """A matrix of weights in so many bits, in a byte each, and the scales of each ``block`` of its
    other axis, of each channel on ``axis``.

    By the first scale tried the largest magnitude is the least step, whatever its sign, so that all
    steps are used. Smaller ones clip it and round the others less; the one with the least square
    error stays. Scales are numbers of float16 where that holds their size, so that a reader may
    store them in two bytes.
    """
    columns = numpy.moveaxis(weights, axis, 1)
    depth, count = columns.shape
    apart = numpy.pad(columns, [(0, -depth % block), (0, 0)]).reshape(-1, block, count)
    least = -(2 ** (bits - 1))
    largest = numpy.take_along_axis(apart, numpy.abs(apart).argmax(axis=1)[:, None], axis=1)
    best, kept, error = numpy.zeros(apart.shape, numpy.int8), numpy.ones_like(largest), numpy.inf
    for share in _SHARES:
        scale = (largest * (share / least)).astype(numpy.float32)
        short = numpy.abs(scale) >= numpy.finfo(numpy.float16).smallest_normal
        with numpy.errstate(over="ignore"):
            half = scale.astype(numpy.float16).astype(numpy.float32)
        scale = numpy.where(short & numpy.isfinite(half), half, scale)
        scale[numpy.abs(scale) < numpy.finfo(numpy.float32).tiny] = 1.0
        steps = numpy.clip(numpy.rint(apart / scale), least, -least - 1)
        wide = steps * scale.astype(numpy.float64) - apart  # squares leave float32
        off = (wide**2).sum(axis=1, keepdims=True)
        better = off < error
        best = numpy.where(better, steps.astype(numpy.int8), best)
        kept = numpy.where(better, scale, kept)
        error = numpy.minimum(off, error)
    steps, scales = best.reshape(-1, count)[:depth], kept[:, 0]
    return tuple(numpy.ascontiguousarray(numpy.moveaxis(x, 1, axis)) for x in (steps, scales))  # type: ignore[return-value]


def insert(
    model: OnnxSource, products: Sequence[Product], ranges: Mapping[str, Range]
) -> OnnxSource:
    """The model with these products quantized, and everything else as it was. ``ranges``: of the
    tensors that they read.
    """
    edit = Edit(model)
    wanted = {product.output: product for product in products}
    moved: dict[str, str] = {}
    for node in edit.given:
        product = wanted.get(node.output[0]) if node.output else None
        if product is not None:
            x = product.tensor
            if x not in moved:
                scale = edit.constant(numpy.float32(ranges[x].scale), f"{x}_scale")
                zero = edit.constant(numpy.uint8(ranges[x].zero), f"{x}_zero_point")
                moved[x] = edit.pair(x, scale, zero)
            node.input[0] = moved[x]
            node.input[1] = edit.stored(product)
        edit.nodes.append(node)
    return _finished(edit)


def _finished(edit: Edit) -> OnnxSource:
    made = edit.finish()
    made.skeleton.producer_name, made.skeleton.producer_version = "gtco", __version__
    onnx.checker.check_model(made.skeleton)
    return made


def with_weights(
    model: OnnxSource, products: Sequence[Product], bits: int = 8, block: int = 0
) -> OnnxSource:
    """The model with the weights of these products quantized, and everything else as it was.
    Matrices have so many ``bits``, and scales for each ``block`` along k if it is not 0. The
    weights of convolutions have 8 bits and a scale for each channel.
    """
    edit = Edit(model, bits, block)
    wanted = {product.output: product for product in products}
    for node in edit.given:
        product = wanted.get(node.output[0]) if node.output else None
        if product is not None:
            node.input[1] = edit.stored(product)  # what dequantizes them comes first
        edit.nodes.append(node)
    return _finished(edit)


@dataclass(frozen=True)
class Switched:
    """A model in which each product may be computed in float or quantized, run by run.

    It has more inputs, each of one number: of each of ``tensors`` the scale (float32) and the zero
    point (uint8), and of each of ``products`` a bool, true if it is quantized. ``scales``,
    ``zeros`` and ``chosen`` are their names. Numbers of one vector would make each layer a kernel
    of its own, which reads it elsewhere. Its outputs have ``tensors`` as well, by the names in
    ``observed``.
    """

    model: OnnxSource
    tensors: tuple[str, ...]
    products: tuple[Product, ...]
    scales: tuple[str, ...]
    zeros: tuple[str, ...]
    chosen: tuple[str, ...]
    observed: Mapping[str, str]

    def settings(
        self, ranges: Mapping[str, Range], quantized: Collection[str]
    ) -> dict[str, Array]:
        """The values of these inputs. ``quantized``: outputs of products."""
        unused = Range(0.0, 1.0)
        chosen = [ranges.get(name, unused) for name in self.tensors]
        values = (
            *(numpy.float32(r.scale) for r in chosen),
            *(numpy.uint8(r.zero) for r in chosen),
            *(numpy.bool_(p.output in quantized) for p in self.products),
        )
        names = (*self.scales, *self.zeros, *self.chosen)
        return {n: numpy.array(v) for n, v in zip(names, values, strict=True)}


def with_switches(model: OnnxSource, products: Sequence[Product]) -> Switched:
    """The model with switches for those products that may be quantized.

    before: y = MatMul(x, w)
    after:  y = Where(chosen, MatMul(dequantize(quantize(x)), v), MatMul(x, w))
    """
    edit = Edit(model)
    wanted = {p.output: p for p in products if not p.float_because}
    tensors = tuple(by_tensor(products))
    scales, zeros = (tuple(edit.name(f"{x}_{what}") for x in tensors) for what in _PARAMETERS)
    chosen = {y: edit.name(f"{y}_chosen") for y in wanted}
    moved: dict[str, str] = {}
    for node in edit.given:
        product = wanted.get(node.output[0]) if node.output else None
        if product is None:
            edit.nodes.append(node)
            continue
        x, y = product.tensor, node.output[0]
        if x not in moved:
            number = tensors.index(x)
            moved[x] = edit.pair(x, scales[number], zeros[number])
        quantized = onnx.NodeProto()
        quantized.CopyFrom(node)
        quantized.name = edit.name(f"{node.name}_quantized")
        quantized.input[0], quantized.input[1] = moved[x], edit.stored(product)
        quantized.output[0] = edit.name(f"{y}_quantized")
        node.output[0] = edit.name(f"{y}_float")
        edit.nodes += [quantized, node]
        edit.nodes.append(
            helper.make_node(
                "Where",
                [chosen[y], quantized.output[0], node.output[0]],
                [y],
                name=edit.name(f"{y}_switch"),
            )
        )
    observed = {x: edit.add("Identity", [x], f"{x}_observed") for x in tensors}
    graph = edit.model.graph
    kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8, onnx.TensorProto.BOOL)
    for names, kind in zip((scales, zeros, chosen.values()), kinds, strict=True):
        graph.input.extend(helper.make_tensor_value_info(name, kind, []) for name in names)
    for name in observed.values():
        graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    found = tuple(wanted.values())
    switches = tuple(chosen.values())
    return Switched(edit.finish(), tensors, found, scales, zeros, switches, observed)


class Edit:
    """A copy of a model, with new nodes, and constants by what is in them. Its weights are those of
    the model, which are not copied, and new ones.
    """

    def __init__(self, source: OnnxSource, bits: int = 8, block: int = 0) -> None:
        self.bits, self.block = bits, block
        self.source, self.weights = source, dict(source.weights)
        self.model = onnx.ModelProto()
        self.model.CopyFrom(source.skeleton)
        self.given = list(self.model.graph.node)
        self.nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._stored: dict[tuple[str, int, tuple[int, ...]], str] = {}
        self._taken = {name for node in all_nodes(self.model.graph) for name in _all(node)}
        self._taken |= {t.name for t in self.model.graph.initializer}
        self._taken |= {v.name for v in (*self.model.graph.input, *self.model.graph.output)}

    def name(self, wanted: str) -> str:
        """The name, or one like it that is not taken yet."""
        found, n = wanted, 1
        while found in self._taken:
            found, n = f"{wanted}_{n}", n + 1
        self._taken.add(found)
        return found

    def constant(self, value: Any, name: str) -> str:
        name, array = self.name(name), numpy.asarray(value)
        if array.nbytes < LARGE:
            self._constants.append(numpy_helper.from_array(array, name))
        else:
            self.weights[name] = array
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            made = helper.make_tensor_value_info(name, kind, array.shape)
            self.model.graph.input.append(made)
        return name

    def add(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        output = self.name(output)
        name = self.name(f"{output}_{kind}")
        self.nodes.append(helper.make_node(kind, inputs, [output], name=name, **attributes))
        return output

    def pair(self, x: str, scale: str, zero: str) -> str:
        """The tensor after QuantizeLinear and DequantizeLinear."""
        q = self.add("QuantizeLinear", [x, scale, zero], f"{x}_quantized")
        return self.add("DequantizeLinear", [q, scale, zero], f"{x}_dequantized")

    def stored(self, product: Product) -> str:
        """The product's weights behind DequantizeLinear; products that share weights share it."""
        key = (product.weight, product.axis, product.weights.shape)
        if key not in self._stored:
            w = product.weight
            if self.block and product.kind != "Conv":
                self._stored[key] = self.blocks(product)
                return self._stored[key]
            steps, scales = steps_of(product.weights, product.axis)
            self._stored[key] = self.add(
                "DequantizeLinear",
                [
                    self.constant(steps, f"{w}_int8"),
                    self.constant(scales, f"{w}_scale"),
                    self.constant(numpy.zeros(len(scales), numpy.int8), f"{w}_zero_point"),
                ],
                f"{w}_dequantized",
                axis=product.axis,
            )
        return self._stored[key]

    def blocks(self, product: Product) -> str:
        """A matrix of weights with scales of blocks behind DequantizeLinear, whose zero points
        are 0.
        """
        w, bits = product.weight, self.bits
        steps, scales = steps_of_blocks(product.weights, product.axis, bits, self.block)
        narrow = ml_dtypes.int4 if bits == 4 else numpy.int8
        inputs = [
            self.constant(steps.astype(narrow), f"{w}_int{bits}"),
            self.constant(scales, f"{w}_scale"),
        ]
        along = {"axis": 1 - product.axis, "block_size": self.block}
        return self.add("DequantizeLinear", inputs, f"{w}_dequantized", **along)

    def finish(self) -> OnnxSource:
        """The copy with the new nodes, without what nothing reads any more."""
        graph = self.model.graph
        wanted = {value.name for value in graph.output}
        kept: list[onnx.NodeProto] = []
        for node in reversed(self.nodes):
            if any(o in wanted for o in node.output):
                kept.append(node)
                wanted.update(reads(node))
        del graph.node[:]
        graph.node.extend(reversed(kept))
        tensors = [t for t in (*graph.initializer, *self._constants) if t.name in wanted]
        del graph.initializer[:]
        graph.initializer.extend(tensors)
        weights = {name: value for name, value in self.weights.items() if name in wanted}
        inputs = [v for v in graph.input if v.name in weights or v.name not in self.weights]
        del graph.input[:]
        graph.input.extend(inputs)
        # a program of PyTorch's has none
        known = identity(self.model, weights) if self.source.identity else ""
        return OnnxSource(self.model, weights, known, self.source.files)


def _all(node: onnx.NodeProto) -> Iterable[str]:
    yield from node.input
    yield from node.output
    yield node.name
