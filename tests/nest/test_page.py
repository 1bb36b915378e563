"""``docs/nest.md`` shows what the compiler does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gtco.machine.target import cpu_target
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Config, Program
from tests.nest.test_counts import Case, executed, product

PAGE = (Path(__file__).parents[2] / "docs/nest.md").read_text()
CONFIG = Config(
    "gemm",
    (
        ("tile", "4x1"), ("chunks_m", 1), ("chunks_n", 1), ("a", "packed"), ("kc", 32),
        ("order", "panels"), ("prefetch", "none"),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def case() -> Case:
    sketch = gemm.match(product(8, 64, 24, constant=True), cpu_target("x86-64-v3"))
    assert sketch is not None
    return Case(sketch, CONFIG, sketch.nest(CONFIG))


def test_the_code_is_what_is_emitted(case: Case) -> None:
    program = case.sketch.build(CONFIG, "product")
    assert isinstance(program, Program)
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    emitted = iter(program.function.script().splitlines())
    for line in shown.splitlines():
        if line.strip() != "...":
            assert any(line.strip() == other.strip() for other in emitted), f"not emitted: {line}"


def test_the_counts_are_those_of_the_loops(case: Case) -> None:
    row = r"^\| ([^|:]+?)(?::[^|]*| \([^|]*)? \|[^|]+\|[^|]+\| ([\d,]+) \|$"
    rows = re.findall(row, PAGE, re.M)
    shown = {name: int(count.replace(",", "")) for name, count in rows}
    counts, got, wanted = executed(case.sketch, case.config, 1)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
    tiles = counts.loads["tiles"] - got.size + counts.stores["tiles"] - got.size
    assert shown == {
        "products": counts.products,
        "A, as the row reads it": counts.loads["rows"],
        "B, as the row reads it": counts.loads["input 1"],
        "partial sums": tiles,
        "A, out of memory": counts.loads["input 0"],
        "A, packed": counts.stores["rows"],
        "output": counts.stores["output"],
    }
