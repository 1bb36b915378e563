"""A nest: loops that are not possible are refused when it is made; scratch follows from it."""

from dataclasses import replace

import pytest

from gtco.tensor.intrinsics.table import KINDS, MicroKernel
from gtco.tensor.nest.nest import Nest, Placed

ROW = MicroKernel(6, 2, 16)
NEST = Nest(
    (1, 40, 64, 96), ROW, (2, 1), 32, None, "panels",
    Placed("packed", "float32"), Placed("panels", "float32"),
)  # fmt: skip
DIRECT = Placed("direct", "float32", 96)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kc": 97}, "kc=97"),
        ({"kc": 33, "row": MicroKernel(6, 2, 16, KINDS["bf16"])}, "multiple of 2"),
        ({"extents": (1, 0, 64, 96)}, "positive"),
        ({"order": "columns"}, "order=columns"),
        ({"order": "rows", "mc": 2}, "mc=2"),
        ({"order": "rows", "b": Placed("packed", "float32")}, "order=rows"),
        ({"order": "rows", "b": Placed("widened", "float16")}, "order=rows"),
        ({"prefetch": "next", "b": Placed("packed", "float32")}, "constant B"),
        ({"prefetch": "both", "b": Placed("widened", "float16")}, "not widened"),
        ({"a": DIRECT, "row": MicroKernel(6, 2, 16, KINDS["bf16"])}, "A of float32"),
        ({"b": DIRECT, "extents": (1, 40, 65, 96)}, "65 columns"),
        ({"a": Placed("panels", "float32")}, "A cannot be panels"),
    ],
)
def test_impossible_loops_are_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(NEST, **wrong)  # type: ignore[arg-type]


def test_tiles_of_partial_sums_are_kept_for_all_blocks_of_a_task() -> None:
    blocks, panels = NEST.shape.task_blocks, NEST.shape.task_panels
    assert {p.name: p.shape for p in NEST.pieces()}["tiles"] == (blocks * panels, 6, 32)
    whole = replace(NEST, kc=96)
    assert {p.name: p.shape for p in whole.pieces()}["tiles"] == (1, 6, 32)
