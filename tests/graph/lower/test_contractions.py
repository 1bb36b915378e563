"""Einsum and convolutions of all ranks as canonical operators: which operators they become, and
their values against ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.graph import Graph
from gtco.graph.layout import channels_last
from gtco.graph.lower.einsum import parse
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites import canonicalize
from tests.few_nodes import compare, model, normal
from tests.kernels import fresh_seed

# equation, shapes, and the kinds that do the work
EINSUMS = [
    ("bhwc,hkc->bhwk", [(2, 3, 4, 5), (3, 6, 5)], {"matmul"}),  # SAM: positions of rows
    ("bhwc,wkc->bhwk", [(2, 3, 4, 5), (4, 6, 5)], {"matmul"}),  # and of columns
    ("bythwc,hkc->bythwk", [(2, 3, 2, 4, 3, 5), (4, 6, 5)], {"matmul"}),  # MViT
    ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 6, 3, 4)], {"matmul"}),
    ("bhqk,bkhd->bqhd", [(2, 3, 5, 6), (2, 6, 3, 4)], {"matmul"}),
    ("bqc,bchw->bqhw", [(2, 5, 4), (2, 4, 3, 3)], {"matmul"}),  # Mask2Former's masks
    ("...ij,...jk->...ik", [(2, 5, 3, 4), (2, 5, 4, 6)], {"matmul"}),
    ("...ij,jk", [(2, 3, 4), (4, 6)], {"matmul"}),
    ("ij,jk", [(3, 4), (4, 5)], {"matmul"}),
    ("ba,cb", [(4, 3), (5, 4)], {"matmul"}),  # the result's axes are in alphabetical order
    ("abc,cd->da", [(2, 3, 4), (4, 5)], {"matmul", "sum"}),  # b is summed on one side only
    ("ij,kl->ijkl", [(2, 3), (4, 5)], {"multiply"}),
    ("bij,bij->b", [(2, 3, 4), (2, 3, 4)], {"matmul"}),
    ("i,i->", [(5,), (5,)], {"matmul"}),
    ("i,ij->j", [(5,), (5, 3)], {"matmul"}),
    ("ii->i", [(4, 4)], set()),
    ("bii->b", [(3, 4, 4)], {"sum"}),
    ("bii,ic->bc", [(3, 4, 4), (4, 5)], {"matmul"}),
    ("abc->ca", [(2, 3, 4)], {"sum"}),
    ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)], {"matmul"}),
    ("b i j, b j k -> b i k", [(2, 3, 4), (2, 4, 5)], {"matmul"}),
]
WORK = {"matmul", "multiply", "sum", "relax", "conv2d", "conv_transpose2d"}


def graph_of(node: onnx.NodeProto, feeds: dict, constants: dict) -> tuple[Graph, np.ndarray]:
    """The canonical graph of one node, and ONNX Runtime's result."""
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, v.shape) for n, v in feeds.items()]
    initializers = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    made = helper.make_model(
        helper.make_graph(
            [node],
            "g",
            info,
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            initializers,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    made = onnx.shape_inference.infer_shapes(made)
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return canonicalize(lower(load_onnx(made, simplify=False))), session.run(None, feeds)[0]


def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}


def agree(graph: Graph, feeds: dict[str, np.ndarray], want: np.ndarray) -> None:
    (got,) = graph.evaluate(feeds).values()
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("equation", "shapes", "kinds"), EINSUMS)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], kinds: set[str]) -> None:
    values = draw({f"x{n}": shape for n, shape in enumerate(shapes)})
    node = helper.make_node("Einsum", list(values), ["y"], equation=equation)
    graph, want = graph_of(node, values, {})
    assert set(graph.histogram()) & WORK == kinds
    agree(graph, values, want)


def test_weights_of_an_einsum_stand_on_the_right() -> None:
    """Weights on the right are packed when the model is compiled."""
    values = draw({"w": (5, 4), "x": (2, 3, 4)})
    node = helper.make_node("Einsum", ["w", "x"], ["y"], equation="oc,bnc->bno")
    graph, want = graph_of(node, {"x": values["x"]}, {"w": values["w"]})
    (product,) = (op for op in graph.operators.values() if op.kind == "matmul")
    assert graph.is_constant(product.inputs[1])
    agree(graph, {"x": values["x"]}, want)


def test_the_ellipsis_is_written_out_from_the_right() -> None:
    assert parse("...a,b...->...", [3, 2]) == ([("1", "0", "a"), ("b", "0")], ("1", "0"))
    assert parse("cb,a...", [2, 2]) == ([("c", "b"), ("a", "0")], ("0", "a", "b", "c"))


# operator, x, w, attributes
CONVOLUTIONS = [
    ("Conv", (2, 6, 9), (8, 3, 4), dict(strides=[2], pads=[1, 2], group=2)),
    ("Conv", (1, 4, 6, 7, 8), (6, 4, 2, 3, 3), dict(pads=[0, 1, 1, 1, 1, 0])),
    ("Conv", (1, 3, 4, 8, 8), (5, 3, 2, 4, 4), dict(strides=[2, 4, 4])),
    (
        "Conv",
        (1, 4, 7, 5, 6),
        (6, 2, 3, 2, 2),
        dict(dilations=[2, 1, 2], strides=[1, 2, 1], group=2),
    ),
    ("ConvTranspose", (2, 6, 9), (6, 4, 4), dict(strides=[3], pads=[1, 0])),
    ("ConvTranspose", (2, 6, 5, 4), (6, 4, 2, 2), dict(strides=[2, 2])),
    ("ConvTranspose", (1, 6, 5, 4), (6, 2, 3, 3), dict(strides=[2, 2], pads=[1] * 4, group=3)),
    ("ConvTranspose", (1, 4, 5, 4), (4, 3, 3, 2), dict(strides=[2, 3], dilations=[2, 2])),
    (
        "ConvTranspose",
        (1, 4, 5, 4),
        (4, 3, 3, 3),
        dict(strides=[2, 3], pads=[1, 0, 2, 1], output_padding=[1, 2]),
    ),
    ("ConvTranspose", (2, 4, 3, 4, 5), (4, 3, 2, 2, 2), dict(strides=[2, 2, 2])),
    ("ConvTranspose", (2, 4, 3, 4, 5), (4, 3, 2, 2, 2), dict(strides=[2, 2, 2], group=2)),
    (
        "ConvTranspose",
        (2, 4, 3, 4, 2),
        (4, 3, 3, 3, 3),
        dict(strides=[2, 2, 2], pads=[1] * 6, output_padding=[1, 1, 1]),
    ),
    (
        "ConvTranspose",
        (1, 4, 3, 4, 2),
        (4, 3, 2, 2, 3),
        dict(strides=[2, 1, 2], pads=[0, 1, 0, 0, 0, 1], output_padding=[1, 0, 1], group=2),
    ),
    (
        "ConvTranspose",
        (1, 4, 3, 4, 2),
        (4, 3, 4, 3, 2),
        dict(strides=[3, 1, 2], pads=[4] + [0] * 5),
    ),
    ("ConvTranspose", (1, 4, 3, 4, 2), (4, 3, 3, 2, 1), dict(dilations=[2, 2, 1])),
    (
        "ConvTranspose",
        (1, 4, 1, 4, 2),
        (4, 3, 3, 2, 1),
        dict(strides=[3, 1, 1], dilations=[2, 1, 1]),
    ),
]


@pytest.mark.parametrize(("kind", "x", "w", "attrs"), CONVOLUTIONS)
def test_convolutions(kind: str, x: tuple, w: tuple, attrs: dict) -> None:
    """Before and after the layout pass; nothing is left to the fallback."""
    outputs = w[0] if kind == "Conv" else w[1] * attrs.get("group", 1)
    values = draw({"x": x, "w": w, "b": (outputs,)})
    feeds = {"x": values.pop("x")}
    graph, want = graph_of(helper.make_node(kind, ["x", "w", "b"], ["y"], **attrs), feeds, values)
    last = channels_last(graph)
    for form in (graph, last):
        assert "relax" not in form.histogram()
        agree(form, feeds, want)
    convolutions = [op for op in last.operators.values() if op.kind.startswith("conv")]
    assert convolutions and all(op["layout"] == "NHWC" for op in convolutions)
    for op in convolutions:
        if op.kind == "conv_transpose2d":
            assert all(n % s == 0 for n, s in zip(op.type.shape[1:3], op["strides"], strict=True))


# A filter with an extent of 1 along some axes, or whose planes do not overlap, is one convolution
# of two axes. w, attributes:
FLAT = [
    ((6, 4, 3, 1, 1), dict(pads=[1, 0, 0, 1, 0, 0])),
    ((6, 4, 3, 1, 1), dict(strides=[2, 1, 1], dilations=[2, 1, 1])),
    ((6, 2, 1, 1, 3), dict(group=2, pads=[0, 0, 1, 0, 0, 1])),
    ((6, 4, 1, 1, 1), dict(strides=[1, 2, 1])),
    ((6, 4, 1, 3, 1), dict()),
    ((6, 4, 1, 3, 3), dict(pads=[0, 1, 1, 0, 1, 1], strides=[2, 1, 1])),
    ((6, 4, 3, 2, 1), dict(pads=[1, 0, 0, 1, 1, 0], strides=[2, 1, 3])),
    ((4, 1, 3, 1, 2), dict(group=4, pads=[0, 1, 0, 0, 0, 1])),
    ((6, 4, 2, 3, 3), dict(strides=[2, 1, 2])),
]


@pytest.mark.parametrize(("w", "attrs"), FLAT)
def test_volumes_are_one_convolution_of_two_axes(w: tuple, attrs: dict) -> None:
    convolved(w, (2, w[1] * attrs.get("group", 1), 7, 6, 5), attrs)


def convolved(w: tuple, x: tuple, attrs: dict, count: int | None = 1) -> None:
    """The values of a 3-D convolution agree; it is ``count`` convolutions of two axes."""
    values = draw({"x": x, "w": w, "b": (w[0],)})
    feeds = {"x": values.pop("x")}
    graph, want = graph_of(helper.make_node("Conv", ["x", "w", "b"], ["y"], **attrs), feeds, values)
    last = channels_last(graph)
    agree(graph, feeds, want)
    agree(last, feeds, want)
    kinds = last.histogram()
    assert "relax" not in kinds
    assert count is None or kinds["conv2d"] + kinds.get("matmul", 0) == count


def test_drawn_volumes() -> None:
    """Any extents, strides, dilations, paddings and groups."""
    print(f"seed {(seed := fresh_seed())}")
    rng = np.random.default_rng(seed)
    for _ in range(25):
        extents, strides = (tuple(map(int, rng.integers(1, 4, 3))) for _ in range(2))
        dilations = tuple(map(int, rng.integers(1, 3, 3)))
        pads = [int(n) for n in rng.integers(0, 2, 6)]
        group, inputs, outputs = (int(rng.integers(1, 4)) for _ in range(3))
        sizes = [
            (k - 1) * d + int(rng.integers(1, 5)) for k, d in zip(extents, dilations, strict=True)
        ]
        convolved(
            (outputs * group, inputs, *extents),
            (int(rng.integers(1, 3)), inputs * group, *sizes),
            dict(strides=strides, dilations=dilations, pads=pads, group=group),
            1 if 1 in extents else None,
        )


@pytest.mark.parametrize("ends", [0, 1])
def test_output_padding_behind_planes_that_do_not_overlap(ends: int) -> None:
    """The planes of the output that it adds are read by no plane of the filter: they are 0."""
    made = helper.make_node(
        "ConvTranspose",
        ["x", "w"],
        ["y"],
        strides=[2, 2, 2],
        pads=[0, 0, 0, 0, 0, 0],
        output_padding=[ends, 0, 0],
    )
    arrays, constants = {"x": normal(1, 2, 3, 4, 3, 3)}, {"w": normal(2, 3, 5, 2, 2, 2)}
    compare(model([made], arrays, constants), arrays)
