"""Weights of a few bits in packed bytes: which tensors are nothing else, and tables with blocks
along any axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.nbits import Packed, packed_weights, unpack
from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from tests.frontend.quantized.nodes import MICROSOFT, Case, model_of

BLOCK = 16
U8, F = np.uint8, np.float32


# tables -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "quantize_axis", "gather_axis"),
    [
        ((40, 3), 0, 0),
        ((40, 3), 0, 1),
        ((3, 40), 1, 0),
        ((3, 40), 1, 1),
        ((2, 40, 3), 1, 0),
        ((2, 40, 3), 1, 2),
    ],
)
@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_blocks_along_any_axis_and_rows_of_any_axis(
    kind: str, shape: tuple[int, ...], quantize_axis: int, gather_axis: int
) -> None:
    """The last block is not full, and some ids count from the end."""
    rng = np.random.default_rng(3)
    blocks, rows = list(shape), shape[gather_axis]
    blocks[quantize_axis] = -(-shape[quantize_axis] // BLOCK)
    bounds = ml_dtypes.iinfo(kind)
    steps = rng.integers(bounds.min, int(bounds.max) + 1, shape)
    scales = rng.uniform(0.5, 2, blocks).astype(F)
    ids = np.concatenate([np.arange(rows), -1 - np.arange(rows)]).reshape(2, rows)
    case = Case("GatherBlockQuantized", ["b", "ids", "s"], {"ids": ids}, {}, "float32", MICROSOFT)
    case.attrs = {
        **{"bits": 4, "block_size": BLOCK},
        **{"quantize_axis": quantize_axis, "gather_axis": gather_axis},
    }
    case.constants = {"b": steps.astype(getattr(ml_dtypes, kind)), "s": scales}
    (got,) = lower(load_onnx(model_of([case]), simplify=False)).evaluate(case.inputs).values()
    each = scales.repeat(BLOCK, quantize_axis).take(range(shape[quantize_axis]), quantize_axis)
    np.testing.assert_allclose(got, np.take(steps * each, ids, gather_axis), rtol=1e-6)


def rows_of(output: str, scales: str, block: int = BLOCK) -> onnx.NodeProto:
    attrs = {"bits": 4, "block_size": block}
    inputs = ["t", "ids", scales]
    return helper.make_node("GatherBlockQuantized", inputs, [output], domain=MICROSOFT, **attrs)


ONE, TWO = np.ones((3, 1), F), np.ones((3, 2), F)


@pytest.mark.parametrize(
    ("bytes_", "readers", "columns"),
    [
        (16, {"y": TWO}, 32),
        (16, {"y": ONE}, 16),  # a number in each byte
        (16, {"y": TWO, "z": TWO}, 32),
        (4, {"y": ONE}, 4),  # 4 and 8 columns have one scale a row
    ],
)
def test_tables_are_unpacked_where_all_readers_take_them_as_packed(
    bytes_: int, readers: dict[str, np.ndarray], columns: int
) -> None:
    table = np.zeros((3, bytes_), U8)
    nodes = [rows_of(output, f"scales_{output}") for output in readers]
    scales = {f"scales_{output}": value for output, value in readers.items()}
    model = helper.make_model(graph_of(nodes, list(readers), **scales))
    _, weights = unpack(model, {"t": table})
    assert weights["t"].shape == (3, columns)


def test_no_table_is_unpacked_whose_readers_do_not_agree() -> None:
    """One reads a number in each byte, the other one two."""
    nodes = [rows_of("y", "two"), rows_of("z", "one")]
    for rows in range(1, 9):
        scales = {"two": np.ones((rows, 2), F), "one": np.ones((rows, 1), F)}
        model = helper.make_model(graph_of(nodes, ["y", "z"], **scales))
        table = np.zeros((rows, 16), U8)
        assert unpack(model, {"t": table}) == (model, {"t": table})


# matrices -----------------------------------------------------------------------------------------
def graph_of(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], **constants: Any
) -> onnx.GraphProto:
    return helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 32))],
        [helper.make_value_info(name, onnx.TypeProto()) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )


def product(output: str, block: int = BLOCK) -> onnx.NodeProto:
    """By weights "b", of 32 rows and 3 columns in 4 bits."""
    attrs = {"K": 32, "N": 3, "bits": 4, "block_size": block}
    return helper.make_node("MatMulNBits", ["x", "b", "s"], [output], domain=MICROSOFT, **attrs)


SIZES = {"K": 8, "N": 3, "block_size": BLOCK}
SHAPE_OF = helper.make_node("Shape", ["b"], ["z"])
TURNED = helper.make_node("MatMulNBits", ["b", "w", "s"], ["z"], domain=MICROSOFT, **SIZES)
ALONE = {"b": Packed(3, 2, BLOCK, 4)}


@pytest.mark.parametrize(
    ("nodes", "outputs", "found"),
    [
        ([product("y")], ["y"], ALONE),
        ([product("y"), product("z")], ["y", "z"], ALONE),
        ([product("y"), product("z", block=32)], ["y", "z"], {}),
        ([product("y")], ["y", "b"], {}),
        ([product("y"), SHAPE_OF], ["y", "z"], {}),
        ([product("y"), TURNED], ["y", "z"], {"w": Packed(3, 1, BLOCK, 4)}),
    ],
    ids=["one", "two alike", "two blocks", "an output", "another node", "another operand"],
)
def test_packed_weights_are_those_that_products_alone_read_and_all_alike(
    nodes: list[onnx.NodeProto], outputs: list[str], found: dict[str, Packed]
) -> None:
    assert packed_weights(graph_of(nodes, outputs)) == found
