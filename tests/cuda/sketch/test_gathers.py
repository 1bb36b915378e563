"""Gathers in front of and behind operators that need loops, on a GPU: emulated, against the float64
reference.
"""

from __future__ import annotations

from typing import Any

import pytest

from gtco.tensor.sketch.attention import cuda as attention
from gtco.tensor.sketch.elementwise import cuda as elementwise
from gtco.tensor.sketch.gemm import cuda as gemm
from gtco.tensor.sketch.pool import cuda as pool
from gtco.tensor.sketch.resize import cuda as resize
from gtco.tensor.sketch.rows import cuda as rows
from gtco.tensor.stage import TensorType
from tests.cuda.sketches import check, matched, program
from tests.sketch.formats.test_bfloat16 import chain

T = TensorType
IDS = T((2, 5), "int64")  # drawn from -9 to 8, and the tables have 12 rows
NORM = ("layer_norm", "g w v", "y", T((2, 5, 64)), {"epsilon": 1e-5})
ROW: dict[str, Any] = {"t": T((12, 64)), "i": IDS, "w": T((64,)), "v": T((64,))}
TAKEN = ("gather", "t i", "g", T((2, 5, 64)), {"axis": 0})
STAGES = {
    "norm": (rows.match, chain(ROW, TAKEN, NORM)),
    "norm of rows that are named twice": (
        rows.match,
        chain(
            {**ROW, "j": T((12,), "int32")},
            ("gather", "j i", "k", T((2, 5), "int32"), {"axis": 0}),
            ("gather", "t k", "g", T((2, 5, 64)), {"axis": 0}),
            NORM,
        ),
    ),
    # one gather is read at two places
    "norm of a sum of two rows": (
        rows.match,
        chain(
            ROW,
            ("gather", "t i", "h", T((2, 5, 64)), {"axis": 0}),
            ("roll", "h", "r", T((2, 5, 64)), {"shifts": (0, 1, 0)}),
            ("add", "h r", "g", T((2, 5, 64)), {}),
            NORM,
        ),
    ),
    # the rows of the first part are not those of the whole
    "norm behind a concatenation": (
        rows.match,
        chain(
            {**ROW, "i": T((2, 4), "int64"), "c": T((2, 1, 64))},
            ("gather", "t i", "h", T((2, 4, 64)), {"axis": 0}),
            ("concat", "c h", "g", T((2, 5, 64)), {"axis": 1}),
            NORM,
        ),
    ),
    # another place at every element of a row
    "sum along the gathered axis": (
        rows.match,
        chain(
            {"t": T((3, 40)), "i": T((64,), "int32")},
            ("gather", "t i", "g", T((3, 64)), {"axis": 1}),
            ("sum", "g", "y", T((3,)), {"axes": (1,), "keepdims": False}),
        ),
    ),
    "attention over rows of rows": (
        attention.match,
        chain(
            {"t": T((12, 9)), "i": T((16,), "int32"), "j": IDS, "q": T((2, 5, 16))},
            ("gather", "t i", "h", T((16, 9)), {"axis": 0}),
            ("permute", "h", "p", T((9, 16)), {"axes": (1, 0)}),
            ("gather", "p j", "g", T((2, 5, 16)), {"axis": 0}),
            ("attention", "q g g", "y", T((2, 5, 16)), {"scale": 0.25}),
        ),
    ),
    # the place of the first gather is another one at every step
    "product of columns of columns": (
        gemm.match,
        chain(
            {"t": T((9, 12)), "i": T((16,), "int32"), "j": T((48,), "int64"), "w": T((48, 24))},
            ("gather", "t i", "h", T((9, 16)), {"axis": 1}),
            ("gather", "h j", "g", T((9, 48)), {"axis": 1}),
            ("matmul", "g w", "y", T((9, 24)), {}),
        ),
    ),
    "product": (
        gemm.match,
        chain(
            {"t": T((12, 48)), "i": T((9,), "int64"), "w": T((48, 24))},
            ("gather", "t i", "g", T((9, 48)), {"axis": 0}),
            ("matmul", "g w", "y", T((9, 24)), {}),
        ),
    ),
    "product with a residual": (
        gemm.match,
        chain(
            {"x": T((9, 48)), "w": T((48, 24)), "t": T((12, 24)), "i": T((9,), "int64")},
            ("matmul", "x w", "m", T((9, 24)), {}),
            ("gather", "t i", "g", T((9, 24)), {"axis": 0}),
            ("add", "m g", "y", T((9, 24)), {}),
        ),
    ),
    "attention": (
        attention.match,
        chain(
            {"q": T((2, 5, 16)), "t": T((12, 16)), "i": IDS, "x": T((2, 5, 16))},
            ("gather", "t i", "g", T((2, 5, 16)), {"axis": 0}),
            ("attention", "q g x", "y", T((2, 5, 16)), {"scale": 0.25}),
        ),
    ),
    "pool": (
        pool.match,
        chain(
            {"t": T((12, 6, 8)), "i": T((2, 5), "int64")},
            ("gather", "t i", "g", T((2, 5, 6, 8)), {"axis": 0}),
            ("max_pool2d", "g", "y", T((2, 4, 5, 8)),
             {"kernel": (2, 2), "strides": (1, 1), "padding": (0,) * 4, "dilation": (1, 1),
              "layout": "NHWC"}),
        ),
    ),
    "resize": (
        resize.match,
        chain(
            {"t": T((12, 6, 8)), "i": T((2, 5), "int64")},
            ("gather", "t i", "g", T((2, 5, 6, 8)), {"axis": 0}),
            ("resize2d", "g", "y", T((2, 10, 12, 8)),
             {"method": "linear", "coordinates": "half_pixel", "rounding": "round_prefer_floor",
              "cubic_alpha": -0.75, "layout": "NHWC"}),
        ),
    ),
}  # fmt: skip


def test_gathered_rows_are_copied_side_by_side() -> None:
    """A thread finds the place of a row in its loop over neighbours and loads them one by one. So
    it takes one, and threads side by side take neighbours.
    """
    stage = chain(ROW, TAKEN, ("relu", "g", "y", T((2, 5, 64)), {}))
    sketch = matched(elementwise.match, stage)
    assert sketch.neighbours == () and sketch.moved(1).in_order and not sketch.moved(4).in_order
    assert sketch.moved(4).lines > sketch.moved(1).lines == 0
    check(elementwise.match, stage, 4)


@pytest.mark.parametrize("name", STAGES)
def test_gathers_around_loops(name: str) -> None:
    rule, stage = STAGES[name]
    check(rule, stage, 4)


@pytest.mark.parametrize(
    "name",
    ["norm", "norm of rows that are named twice", "norm of a sum of two rows", "product"],
)
def test_a_gathered_row_is_read_by_whole_accesses(name: str) -> None:
    sketch = matched(*STAGES[name])
    text = program(sketch).source  # the widest vectors come first
    table = [i.name for i in sketch.stage.inputs].index("t")
    assert f"gtco::load<4>(in{table} + row" in text, text
