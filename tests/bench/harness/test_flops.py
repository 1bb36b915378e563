"""The FLOPs that a benchmark counts in an ONNX model."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from bench.harness.flops import count_flops
from tests.bench.harness.onnx_files import one, save_graph

CHAIN = [
    helper.make_node("MatMul", ["x", "w"], ["h"]),
    helper.make_node("Transpose", ["h"], ["t"], perm=[1, 0]),
    helper.make_node("MatMul", ["h", "t"], ["y"]),
]


@pytest.mark.parametrize(
    ("op", "shapes", "out", "attributes", "multiply_adds"),
    [
        ("MatMul", [(2, 197, 64), (2, 64, 30)], (2, 197, 30), {}, 2 * 197 * 64 * 30),
        ("Gemm", [(7, 5), (7, 11)], (5, 11), {"transA": 1}, 5 * 7 * 11),
        ("Gemm", [(5, 7), (11, 7)], (5, 11), {"transB": 1}, 5 * 7 * 11),
        ("Conv", [(1, 8, 10, 10), (16, 4, 3, 3)], (1, 16, 8, 8), {"group": 2}, 16 * 64 * 4 * 9),
        (
            "ConvTranspose",
            [(1, 8, 5, 5), (8, 6, 2, 2)],
            (1, 6, 10, 10),
            {"strides": [2, 2]},
            8 * 25 * 6 * 4,
        ),
        (
            "Einsum",
            [(2, 3, 5, 4), (2, 3, 6, 4)],
            (2, 3, 5, 6),
            {"equation": "bhid,bhjd->bhij"},
            6 * 5 * 6 * 4,
        ),
        ("Relu", [(100,)], (100,), {}, 0),
    ],
)
def test_flops_are_two_a_multiply_add(tmp_path, op, shapes, out, attributes, multiply_adds):
    path = one(tmp_path / "m.onnx", op, shapes, out, **attributes)
    assert count_flops(path) == (2.0 * multiply_adds, [])


def test_flops_use_inferred_shapes_and_name_what_is_unknown(tmp_path):
    path = save_graph(
        tmp_path / "a.onnx",
        CHAIN,
        [("x", TensorProto.FLOAT, (4, 3))],
        [("y", (4, 4))],
        [("w", (3, 5))],
    )
    assert count_flops(path) == (2.0 * (4 * 3 * 5 + 4 * 5 * 4), [])
    path = one(tmp_path / "b.onnx", "MatMul", [("n", 3), (3, 5)], ("n", 5))
    assert count_flops(path) == (0.0, ["MatMul y"])


def test_flops_of_symbolic_dimensions_follow_their_sizes(tmp_path):
    """This includes outputs that name a dimension of their own, and axes that have no name."""
    path = save_graph(
        tmp_path / "a.onnx",
        CHAIN,
        [("x", TensorProto.FLOAT, ("rows", 3))],
        [("y", ("rows", "other"))],
        [("w", (3, 5))],
    )
    assert count_flops(path) == (0.0, ["MatMul h", "MatMul y"])
    for sizes in ({"rows": 7}, {"x.0": 7}, {"x": (7, 3)}):
        assert count_flops(path, sizes) == (2.0 * (7 * 3 * 5 + 7 * 5 * 7), [])
