"""1x1 convolutions before the upsampling that they read, and as a part of the projection before it.

before: y = Conv(Concat(Resize(x1), x2, ...), [W1 W2 ...]), x1 = Reshape(Transpose(t1 A1 + b1))
after:  y = Resize(x1') + x2' + ..., x1' = Reshape(Transpose(t1 (A1 W1) + b1 W1))

Heads that fuse the maps of several scales, as SegFormer's, have such a convolution. In float gtco
moves it itself (``graph/rewrites/convolutions/pointwise_before_upsampling.py``,
``graph/rewrites/compose_products.py``). In a quantized model it could not: the roundings between
the operators are part of that model. So the model is rewritten before it is quantized.
Interpolation mixes positions and a 1x1 convolution mixes channels, both linearly, so they commute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import onnx
from numpy.typing import NDArray
from onnx import helper

from gtco.frontend.onnx import OnnxSource
from gtco.graph.rewrites.convolutions.pointwise_before_upsampling import ELEMENT
from gtco.quantization.insertion import Edit
from gtco.quantization.products import EXCLUDED, Constants, Product, products_of, reads

Array = NDArray[Any]
_CHANNELS = 1  # the axis of NCHW


@dataclass(frozen=True)
class _Part:
    """A tensor that the convolution reads, ``weights`` [outputs, channels] of it, and the Resize
    behind which these move; None if they stay here.
    """

    tensor: str
    weights: Array
    resize: onnx.NodeProto | None


def products_before_upsampling(
    model: OnnxSource,
    products: list[Product],
    shapes: Mapping[str, Sequence[int]],
    exclude: Sequence[str],
) -> tuple[OnnxSource, list[Product], int]:
    """As :func:`before_upsampling`, with the model's ``products``, which are found again if some
    moved. Those that ``exclude`` names stay.
    """
    stay = {product.output for product in products if product.float_because == EXCLUDED}
    model, moved = before_upsampling(model, shapes, stay)
    return model, products_of(model, exclude) if moved else products, moved


def before_upsampling(
    model: OnnxSource, shapes: Mapping[str, Sequence[int]], stay: Collection[str] = ()
) -> tuple[OnnxSource, int]:
    """The model with its 1x1 convolutions before their upsampling where that saves products, and
    how many there were. ``shapes``: of the inputs. ``stay``: outputs of convolutions that are left
    as they are.
    """
    rewriting = _Rewriting(model, shapes)
    moved = 0
    for node in rewriting.edit.given:
        if node.op_type == "Conv" and node.output[0] not in stay and rewriting.move(node):
            moved += 1
        else:
            rewriting.edit.nodes.append(node)
    return (rewriting.edit.finish(), moved) if moved else (model, 0)


class _Rewriting:
    def __init__(self, model: OnnxSource, shapes: Mapping[str, Sequence[int]]) -> None:
        self.edit = Edit(model)
        self.constants = Constants(model.skeleton.graph, model.weights)
        self.shapes = _shapes(model.skeleton, shapes)
        self.outputs = {value.name for value in model.skeleton.graph.output}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.edit.given:
            self.makers.update({name: node for name in node.output})
            for name in dict.fromkeys(reads(node)):
                self.readers[name].append(node)

    def move(self, conv: onnx.NodeProto) -> bool:
        """Puts what does the same in the place of the convolution; False if it stays."""
        weights = self.constants.value(conv.input[1])
        if not _is_pointwise(conv) or weights is None or weights.shape[2:] != (1, 1):
            return False
        parts = self.parts(conv, weights[:, :, 0, 0])
        if not any(part.resize is not None for part in parts):
            return False
        here = [part for part in parts if part.resize is None]
        terms = []
        if here:
            x, weights = here[0].tensor, numpy.concatenate([part.weights for part in here], axis=1)
            if len(here) > 1:
                names = [part.tensor for part in here]
                x = self.edit.add("Concat", names, f"{conv.output[0]}_parts", axis=_CHANNELS)
            terms.append(self.multiplied(x, weights, conv))
        for part in parts:
            if (resize := part.resize) is None:
                continue
            given = [self.multiplied(resize.input[0], part.weights, conv), *resize.input[1:]]
            if len(given) > 3 and given[3] and len(part.weights) != part.weights.shape[1]:
                given[3] = self.with_channels(given[3], _axes(resize), len(part.weights))
            made = self.edit.name(f"{conv.output[0]}_resized")
            copy = helper.make_node("Resize", given, [made], name=self.edit.name(f"{made}_Resize"))
            copy.attribute.extend(resize.attribute)
            self.edit.nodes.append(copy)
            terms.append(made)
        if len(conv.input) > 2 and conv.input[2]:
            shape = self.edit.constant(numpy.array([1, -1, 1, 1]), f"{conv.output[0]}_bias_shape")
            terms.append(self.edit.add("Reshape", [conv.input[2], shape], f"{conv.input[2]}_wide"))
        for term in terms[1:-1]:
            terms[0] = self.edit.add("Add", [terms[0], term], f"{conv.output[0]}_sum")
        last = "Add" if len(terms) > 1 else "Identity"
        ends = [terms[0], terms[-1]] if len(terms) > 1 else terms
        node = helper.make_node(last, ends, [conv.output[0]], name=f"{conv.name}_{last}")
        self.edit.nodes.append(node)
        return True

    def parts(self, conv: onnx.NodeProto, weights: Array) -> list[_Part]:
        """What the convolution reads; empty where its channels are not known."""
        concat = self.makers.get(conv.input[0])
        if concat is None or concat.op_type != "Concat":
            return [self.part(conv.input[0], weights, conv)]
        if next(a.i for a in concat.attribute if a.name == "axis") not in (_CHANNELS, -3):
            return []
        every = [self.shapes.get(name, ()) for name in concat.input]
        if not all(len(shape) == 4 for shape in every):
            return []
        ends = numpy.cumsum([shape[_CHANNELS] for shape in every])
        if ends[-1] != weights.shape[1]:
            return []
        split = numpy.split(weights, ends[:-1], axis=1)
        alone = self.read_once(concat.output[0])
        return [
            self.part(name, one, concat) if alone else _Part(name, one, None)
            for name, one in zip(concat.input, split, strict=True)
        ]

    def part(self, tensor: str, weights: Array, reader: onnx.NodeProto) -> _Part:
        """With its Resize, if the weights move before it: products are fewer there, and resizing
        the outputs takes less than they save.
        """
        stays, resize = _Part(tensor, weights, None), self.makers.get(tensor)
        if resize is None or resize.op_type != "Resize" or not self.read_once(tensor):
            return stays
        before, after = (self.shapes.get(name, ()) for name in (resize.input[0], tensor))
        if len(before) != 4 or len(after) != 4 or before[:2] != after[:2] or not _linear(resize):
            return stays
        outputs, channels = weights.shape
        sizes = resize.input[3] if len(resize.input) > 3 else ""
        if outputs != channels and sizes and sizes not in self.constants:
            return stays
        fewer = int(numpy.prod(after[2:]) - numpy.prod(before[2:])) * outputs * channels
        more = ELEMENT * int(numpy.prod(after[2:])) * max(outputs - channels, 0)
        return _Part(tensor, weights, resize) if fewer >= more else stays

    def multiplied(self, x: str, weights: Array, conv: onnx.NodeProto) -> str:
        """Channels of x by the weights: as a part of the projection that makes x, or as a
        convolution.
        """
        if self.projected(x, weights):
            return x
        name = self.edit.constant(weights[:, :, None, None], f"{conv.input[1]}_part")
        return self.edit.add("Conv", [x, name], f"{conv.output[0]}_part")

    def projected(self, x: str, weights: Array) -> bool:
        """Makes the square weights a part of ``x = Reshape(Transpose(MatMul(t, a) + b))`` if x is
        that and nobody else reads it.
        """
        reshape = self.maker("Reshape", x)
        transpose = self.maker("Transpose", reshape.input[0]) if reshape else None
        if transpose is None or not self.keeps_channels(transpose.output[0], x):
            return False
        linear, place, b = self.maker("Add", transpose.input[0]), 0, None
        product = transpose.input[0]
        if linear is not None:
            place = 0 if linear.input[0] in self.constants else 1
            b, product = self.constants.value(linear.input[place]), linear.input[1 - place]
            if b is None:
                return False
        matmul = self.maker("MatMul", product)
        a = self.constants.value(matmul.input[1]) if matmul else None
        outputs, channels = weights.shape
        if matmul is None or a is None or a.ndim != 2 or a.dtype != numpy.float32:
            return False
        if outputs != channels or a.shape[1] != channels:
            return False
        if b is not None and b.shape != (channels,):
            return False
        wide = weights.astype(numpy.float64).T
        matmul.input[1] = self.constant(a @ wide, matmul.input[1])
        if linear is not None and b is not None:
            linear.input[place] = self.constant(b @ wide, linear.input[place])
        return True

    def maker(self, kind: str, tensor: str) -> onnx.NodeProto | None:
        """The node of this kind that makes the tensor for one reader."""
        node = self.makers.get(tensor)
        if node is None or node.op_type != kind or not self.read_once(tensor):
            return None
        return node

    def keeps_channels(self, tokens: str, maps: str) -> bool:
        """True if the transposed ``tokens`` [samples, channels, positions] become one map of
        channels a sample.
        """
        before, after = self.shapes.get(tokens, ()), self.shapes.get(maps, ())
        given = [list(a.ints) for a in self.makers[tokens].attribute if a.name == "perm"]
        swaps = given == [[0, 2, 1]]
        return swaps and len(before) == 3 and len(after) == 4 and before[:2] == after[:2]

    def read_once(self, tensor: str) -> bool:
        """True if one node reads the tensor, besides those that ask for its shape."""
        readers = [node for node in self.readers[tensor] if node.op_type != "Shape"]
        return len(readers) == 1 and tensor not in self.outputs

    def with_channels(self, sizes: str, axes: list[int], channels: int) -> str:
        """The sizes of these axes for a map of so many channels."""
        known = self.constants.value(sizes)
        assert known is not None
        if _CHANNELS not in axes:
            return sizes
        wide = known.copy()
        wide[axes.index(_CHANNELS)] = channels
        return self.edit.constant(wide, f"{sizes}_resized")

    def constant(self, value: Array, name: str) -> str:
        """Named after the one that it replaces, so that people find it by that."""
        return self.edit.constant(value.astype(numpy.float32), f"merged.{name}")


def _axes(resize: onnx.NodeProto) -> list[int]:
    """The axes of a Resize of maps that its sizes are of."""
    given = [list(a.ints) for a in resize.attribute if a.name == "axes"]
    return [axis % 4 for axis in given[0]] if given else [*range(4)]


def _is_pointwise(conv: onnx.NodeProto) -> bool:
    known = {a.name: helper.get_attribute_value(a) for a in conv.attribute}
    return (
        conv.domain in ("", "ai.onnx")
        and known.get("group", 1) == 1
        and {*known.get("strides", ())} <= {1}
        and not any(known.get("pads", ()))
    )


def _linear(resize: onnx.NodeProto) -> bool:
    """True if each output of the Resize is a sum of inputs by constant factors."""
    known = {a.name: a.s for a in resize.attribute if a.type == onnx.AttributeProto.STRING}
    return known.get("coordinate_transformation_mode") != b"tf_crop_and_resize"


def _shapes(
    skeleton: onnx.ModelProto, given: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that have numbers alone, for inputs of these shapes."""
    model = onnx.ModelProto()
    model.CopyFrom(skeleton)
    del model.graph.value_info[:]
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, given.get(value.name, ()), strict=False):
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except onnx.shape_inference.InferenceError:
        return {}
    found = {}
    for value in (*inferred.value_info, *inferred.output, *inferred.input):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
            found[value.name] = tuple(d.dim_value for d in kind.shape.dim)
    return found
