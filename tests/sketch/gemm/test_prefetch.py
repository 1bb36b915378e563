"""The lines that a contraction prefetches: of its operands, its result and a residual."""

from __future__ import annotations

import pytest

from gtco.machine.target import target
from gtco.search.learning.statements import statements
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Config, Program
from gtco.tensor.stage import TensorType as T
from gtco.tensor.stage import make_stage
from tests.kernels import config_with, runnable, targets
from tests.sketch.gemm.test_gemm import dense, op


def prefetches(sketch: gemm.Gemm, config: Config) -> int:
    """The number of lines that a run of the kernel prefetches."""
    program = sketch.build(config, "k")
    assert isinstance(program, Program)
    found = statements(program, sketch.stage, 4 * sketch.target.lanes)
    return round(sum(s.runs * s.operations.get("prefetch", 0) for s in found))


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(("m", "tile"), [(1, "1x4"), (5, "5x2"), (48, "6x2")])
def test_lines_that_are_asked_for(m: int, tile: str, name: str) -> None:
    """The kernel prefetches every line of a panel while it computes the panel before, however few
    blocks of rows share it, and every line of the result. With ``both`` it also prefetches each
    line that an iteration reads.
    """
    machine, k, n = runnable(name), 96, 128
    sketch = gemm.match(dense(m, k, n), machine)
    row = MicroKernel.parse(tile, machine.lanes)
    lines = k * n * 4 / 64
    asked = {}
    for how in ("next", "none", "both"):
        config = config_with(sketch, tile=tile, chunks_m=1, chunks_n=1, a="direct", prefetch=how)
        asked[how] = prefetches(sketch, config)
    blocks, panels = -(-m // row.rows), -(-n // row.columns)
    rows = blocks * panels * k if m > 1 else 0  # the lines of A, one an iteration
    rows += m * n * 4 // 64  # the lines of the result
    assert asked["none"] == 0
    assert asked["next"] - rows >= lines
    if blocks == 1:
        assert asked["next"] - rows == lines
    assert asked["both"] - asked["next"] == blocks * lines


@pytest.mark.parametrize("name", targets())
def test_lines_of_a_residual_are_asked_for(name: str) -> None:
    """One line for each line of the result. None is for the bias, which stays in the cache."""
    m, k, n = 48, 32, 64
    residual = make_stage(
        [*dense(m, k, n).operators, op("add", ("d", "r"), "y", (1, m, n))],
        {"x": T((1, m, k)), "w": T((k, n)), "b": T((n,)), "r": T((1, m, n))},
        ["w", "b"],
    )
    asked = []
    for stage in (dense(m, k, n), residual):
        sketch = gemm.match(stage, target(name))
        assert sketch is not None
        asked.append(prefetches(sketch, config_with(sketch, tile="6x2", prefetch="next")))
    assert asked[1] - asked[0] == m * n * 4 // 64
