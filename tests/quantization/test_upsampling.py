"""1x1 convolutions that move before upsampling: models compute what they did, by fewer products.

Models are drawn, as heads that fuse maps of several scales, and compared in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import OnnxSource, read_onnx
from gtco.frontend.weights import whole
from gtco.quantization.products import Product, products_of
from gtco.quantization.upsampling import before_upsampling, products_before_upsampling
from gtco.quantization.weights_only import quantize_weights
from tests.few_nodes import by_onnxruntime, typed
from tests.kernels import fresh_seed

SIDE = 8  # of the largest map; others have a half, a quarter
TOLERANCE = 1e-5  # of the largest output: sums in another order


class Head:
    """Maps of several scales, from tokens or images, resized, concatenated and convolved.

    - ``channels`` of each map, and ``tokens``: whether it comes from a projection
    - ``outputs`` of the convolution
    - ``sizes``: how the Resize is told: ``sizes``, ``scales``, ``shape``, the sizes computed, or
      ``axes``, the sizes of some axes
    """

    def __init__(self, random: Random) -> None:
        self.random, self.rng = random, np.random.default_rng(random.getrandbits(32))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs = random.choice((4, 6))
        self.sizes = random.choice(("sizes", "scales", "shape", "axes"))
        self.extra: list[str] = []  # tensors that are outputs of the model too

    def constant(self, name: str, value: object) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def map(self, n: int, channels: int, side: int, tokens: bool) -> str:
        """[2, channels, side, side]"""
        normal = self.rng.standard_normal
        if not tokens:
            self.inputs[f"x{n}"] = normal((2, channels, side, side), dtype=np.float32)
            return self.node("Relu", [f"x{n}"], f"map{n}")
        self.inputs[f"x{n}"] = normal((2, side * side, 5), dtype=np.float32)
        weight = self.constant(f"p.{n}.weight", normal((5, channels), dtype=np.float32))
        y = self.node("MatMul", [f"x{n}", weight], f"product{n}")
        if self.random.random() < 0.7:
            bias = self.constant(f"p.{n}.bias", normal(channels, dtype=np.float32))
            order = [y, bias] if self.random.random() < 0.5 else [bias, y]
            y = self.node("Add", order, f"sum{n}")
        y = self.node("Transpose", [y], f"swapped{n}", perm=[0, 2, 1])
        shape = self.constant(f"shape{n}", [2, channels, side, side])
        return self.node("Reshape", [y, shape], f"map{n}")

    def resized(self, n: int, x: str, channels: int, side: int) -> str:
        mode = self.random.choice(("linear", "nearest", "cubic"))
        inputs, known = [x, "", "", ""], {}
        if self.sizes == "axes":
            sizes = {1: channels, 2: SIDE, -1: SIDE}
            known = {"axes": self.random.choice(([2, -1], [-1, 1, 2], [1, 2, -1]))}
            inputs[3] = self.constant(f"sizes{n}", [sizes[axis] for axis in known["axes"]])
        elif self.sizes == "scales":
            inputs = [x, "", self.constant(f"scales{n}", np.float32([1, 1, *[SIDE / side] * 2]))]
        elif self.sizes == "sizes":
            inputs[3] = self.constant(f"sizes{n}", [2, channels, SIDE, SIDE])
        else:
            shape = self.node("Shape", [x], f"all{n}", start=0, end=2)
            inputs[3] = self.node("Concat", [shape, "sides"], f"sizes{n}", axis=0)
        return self.node("Resize", inputs, f"resized{n}", mode=mode, **known)

    def model(self) -> onnx.ModelProto:
        self.constant("sides", [SIDE, SIDE])
        parts, widths = [], []
        for n in range(self.random.choice((1, 2, 3, 4))):
            side, channels = self.random.choice((8, 4, 2)), self.random.choice((4, 6))
            part = self.map(n, channels, side, self.random.random() < 0.6)
            if side < SIDE or self.random.random() < 0.5:
                if self.random.random() < 0.15:
                    self.extra.append(part)
                part = self.resized(n, part, channels, side)
            if self.random.random() < 0.15:
                self.extra.append(part)
            parts.append(part)
            widths.append(channels)
        x = parts[0]
        if len(parts) > 1:
            x = self.node("Concat", parts, "joined", axis=self.random.choice((1, -3)))
        shape = self.outputs, sum(widths), 1, 1
        inputs = [x, self.constant("fuse.weight", self.rng.standard_normal(shape, np.float32))]
        if self.random.random() < 0.5:
            bias = self.rng.standard_normal(self.outputs, np.float32)
            inputs.append(self.constant("fuse.bias", bias))
        self.node("Conv", inputs, "fused")
        self.node("Relu", ["fused"], "y")
        graph = helper.make_graph(
            self.nodes,
            "head",
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)
                for name, x in self.inputs.items()
            ],
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
                for name in ("y", *self.extra)
            ],
            self.constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def multiplied(source: OnnxSource, shapes: dict[str, tuple[int, ...]]) -> int:
    """Multiply-adds of the model's products."""
    model = onnx.shape_inference.infer_shapes(
        whole(source.skeleton, source.weights), data_prop=True
    )
    sizes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*model.graph.value_info, *model.graph.output)
    }
    return sum(int(np.prod(sizes[p.output])) * p.depth for p in products_of(source))


def test_drawn_heads() -> None:
    random, moved = Random(fresh_seed()), 0
    for _ in range(60):
        head = Head(random)
        given = head.model()
        wanted = by_onnxruntime(given, head.inputs)
        source = read_onnx(typed(given, wanted))
        shapes = {name: x.shape for name, x in head.inputs.items()}
        made, count = before_upsampling(source, shapes)
        if not count:
            assert made is source
            continue
        moved += 1
        model = whole(made.skeleton, made.weights)
        onnx.checker.check_model(model, full_check=True)
        for got, one in zip(by_onnxruntime(model, head.inputs), wanted, strict=True):
            assert np.abs(got - one).max() <= TOLERANCE * np.abs(one).max()
        assert multiplied(made, shapes) <= multiplied(source, shapes)
    assert moved > 20


def moved_products(
    source: OnnxSource, shapes: dict[str, tuple[int, ...]], exclude: Sequence[str] = ()
) -> tuple[OnnxSource, list[Product], int]:
    return products_before_upsampling(source, products_of(source, exclude), shapes, exclude)


def segformer_like() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Two projections whose maps are resized, and the convolution that fuses them."""
    head = Head(Random(0))
    head.sizes = "shape"
    head.constant("sides", [SIDE, SIDE])
    parts = [head.resized(n, head.map(n, 6, side, True), 6, side) for n, side in ((0, 2), (1, 8))]
    x = head.node("Concat", parts, "joined", axis=1)
    weight = head.rng.standard_normal((6, 12, 1, 1), np.float32)
    head.node("Conv", [x, head.constant("fuse.weight", weight)], "fused")
    scores = head.rng.standard_normal((3, 6, 1, 1), np.float32)
    head.node("Conv", ["fused", head.constant("classifier.weight", scores)], "y")
    graph = helper.make_graph(
        head.nodes,
        "head",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)
            for name, x in head.inputs.items()
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 3, SIDE, SIDE))],
        head.constants,
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), head.inputs


def test_a_convolution_becomes_a_part_of_the_projections() -> None:
    model, inputs = segformer_like()
    shapes = {name: x.shape for name, x in inputs.items()}
    made, products, moved = moved_products(read_onnx(model), shapes)
    assert moved == 1
    assert [p.kind for p in products] == ["MatMul", "MatMul", "Conv"]
    assert products[0].names[0] == products[0].label and products[0].label.endswith("p.0")
    assert sum(node.op_type == "Conv" for node in made.skeleton.graph.node) == 1


@pytest.mark.parametrize("name", ["fuse", "fuse.weight"])
def test_an_excluded_convolution_stays(name: str) -> None:
    model, inputs = segformer_like()
    source = read_onnx(model)
    shapes = {name: x.shape for name, x in inputs.items()}
    made, products, moved = moved_products(source, shapes, [name])
    assert (moved, made) == (0, source)
    assert [p.label for p in products if p.float_because == "excluded"] == ["fuse"]


def test_weights_alone() -> None:
    """Without samples the file's own shapes count."""
    model, inputs = segformer_like()
    found = quantize_weights(model, exclude=["p.1"])
    assert [p.kind for p in found.products] == ["MatMul", "MatMul", "Conv"]
    (wanted,), (got,) = by_onnxruntime(model, inputs), by_onnxruntime(found.model, inputs)
    assert 0 < np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["p.0", "p.*", "p.0.weight"])
def test_moved_projections_keep_their_names(name: str) -> None:
    model, _ = segformer_like()
    found = quantize_weights(model, exclude=[name])
    assert any(p.float_because == "excluded" for p in found.products)
