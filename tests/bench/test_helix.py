"""``python -m bench helix``: its products, and its table."""

from __future__ import annotations

import pytest

from bench.kernels import helix
from bench.kernels.helix import Case, Reading


def test_products_are_those_of_the_paper_but_for_large_ones_that_are_sampled() -> None:
    with helix.SHAPES.open() as file:
        assert len(file.readlines()) - 1 == 1213
    every = helix.cases()
    assert len(set(every)) == len(every) < 1213
    assert {case.group for case in every} == set(helix.GROUPS)
    assert all(case.flops <= helix.LARGE for case in helix.cases(["cnn"], 5))
    assert helix.cases(sample=20) == every[:20]
    assert 1 <= sum(case.flops > helix.LARGE for case in every) <= 1213 // helix.EVERY


def test_a_reading_is_a_line() -> None:
    one = Reading(Case(1, 2, 3, "cnn"), {"gtco": 1e-6, "onednn": 2e-6, "onnxruntime": 3e-6})
    assert Reading.from_json(one.to_json()) == one


def test_large_products_count_for_those_that_are_left_out() -> None:
    small, large = Case(1, 2, 3, "cnn"), Case(10**4, 10**4, 10**3, "cnn")
    assert large.flops > helix.LARGE
    readings = [
        Reading(small, {"gtco": 1.0, "onednn": 4.0, "onnxruntime": 4.0}),
        Reading(large, {"gtco": 1.0, "onednn": 0.5, "onnxruntime": 1.0}),
    ]
    rows = {line.split(" | ")[0].strip("| "): line for line in helix.table(readings).splitlines()}
    assert "| 4.00 | 100% |" in rows["cnn"] and "| 0.50 | 0% |" in rows["cnn, large"]
    mean = (4.0 * 0.5**helix.EVERY) ** (1 / (helix.EVERY + 1))
    ahead = 1 / (helix.EVERY + 1)
    assert f"| {mean:.2f} | {ahead:.0%} |" in rows["all"]


@pytest.mark.parametrize("bytes_of_one, copies", [(64e6, 1), (1e9, 1), (16e6, 4), (4.0, 8)])
def test_large_weights_have_fewer_copies(bytes_of_one: float, copies: int) -> None:
    assert Case(1, round(bytes_of_one / 4), 1, "cnn").copies == copies
