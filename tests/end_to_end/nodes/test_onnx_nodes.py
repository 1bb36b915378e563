"""ONNX's own backend tests, one operator each, compiled, linked, loaded and run.

:mod:`tests.end_to_end.nodes.cases` says which tests are run. :mod:`tests.end_to_end.nodes.failures`
says which may fail, and why. Three things are errors: a failure that is not in the table, a failure
for another reason than the table's, and a test that passes although the table says that it fails.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.nodes import runner
from tests.end_to_end.nodes.cases import GROUP, OPERATORS, NodeCase, cases, groups, kinds
from tests.end_to_end.nodes.failures import EXPECTED_FAILURES
from tests.end_to_end.nodes.results import run_all, run_some
from tests.end_to_end.nodes.runner import compare


@pytest.mark.parametrize("names", [kinds, pytest.param(cases, marks=pytest.mark.scheduled)])
def test_operators_agree_with_onnx(
    names: Callable[[], Iterable[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    table = {name: row for row in EXPECTED_FAILURES for name in row.tests}
    assert len(table) == sum(len(row.tests) for row in EXPECTED_FAILURES), "a test in two rows"
    assert table.keys() <= cases().keys(), "the table names tests that are not run"
    run = set(names())
    expected = {name: row for name, row in table.items() if name in run}
    results = run_all(groups(run, expected), len(os.sched_getaffinity(0)))
    assert results.keys() == run
    passed = [name for name, failure in results.items() if not failure]
    with capsys.disabled():
        print(
            f"\nONNX node tests: {len(passed)} of {len(results)} pass, {len(expected)} fail as "
            f"expected, {len(OPERATORS)} operators"
        )
    wrong = [f"{name}: passes, but is in the table" for name in passed if name in expected]
    for name, failure in results.items():
        if failure and (name not in expected or not re.search(expected[name].message, failure)):
            wrong.append(f"{name}: {failure}")
    assert not wrong, "\n".join(wrong)


def test_every_operator_of_the_table_is_run() -> None:
    run = {node.op_type for case in cases().values() for node in case.model.graph.node}
    assert OPERATORS <= run


def test_an_operator_is_left_out_only_where_it_is_written_out_again() -> None:
    left = cases().keys() - set(kinds())
    assert left and all("_expanded" in name for name in left)
    run = {name.partition("_expanded")[0].split("_")[1] for name in kinds() if "_expanded" in name}
    assert {name.split("_")[1] for name in left} <= run


def test_a_dead_child_costs_one_test(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import os, sys, json\n"
        "for line in sys.stdin:\n"
        "    if 'b' in line.split(): os.kill(os.getpid(), 11)\n"
        "    for name in line.split():\n"
        "        print(json.dumps({'name': name, 'failure': ''}), flush=True)\n"
    )
    died = "its process died with status -11"
    for lines in [["a"], ["b"], ["c"]], [["a", "b", "c"]], [["a", "c"], ["b"]]:
        found = run_some(lines, (sys.executable, str(script)))
        assert found == {"a": "", "b": died, "c": ""}


def test_a_group_that_fails_is_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_and_run(group: Sequence[NodeCase]) -> dict[str, list[np.ndarray]]:
        if any(case.name == "refused" for case in group):
            raise ValueError("no such type")
        return {case.name: [np.float32([1])] for case in group}

    monkeypatch.setattr(runner, "compiled_and_run", compiled_and_run)
    model = next(iter(cases().values())).model
    wanted = {"right": np.float32([1]), "refused": np.float32([1]), "wrong": np.float32([2])}
    group = [NodeCase(name, model, {}, [out], 1e-3, 1e-7) for name, out in wanted.items()]
    assert runner.run(group) == {
        "right": "",
        "refused": "ValueError: no such type",
        "wrong": "output 0 is wrong by 1",
    }


def test_groups_hold_every_test_once() -> None:
    one = min(cases())
    found = groups(cases(), {one})
    assert [one] in found
    assert sorted(name for group in found for name in group) == sorted(cases())
    assert max(map(len, found)) == GROUP


@pytest.mark.parametrize(
    ("got", "wanted", "wrong"),
    [
        (np.float32([1, 2]), np.float32([1, 2]), ""),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), ""),
        (np.float32([1, 2.1]), np.float32([1, 2]), "output 0 is wrong by 0.1"),
        (np.float16([1 + 2**-9]), np.float16([1]), ""),
        (np.float16([1 + 2**-7]), np.float16([1]), "output 0 is wrong by 0.00781"),
        (np.float32([1 + 2**-9]), np.float32([1]), "output 0 is wrong by 0.00195"),
        (np.float64([1, 2]), np.float32([1, 2]), "output 0 is float64(2,), not float32(2,)"),
        (np.float32([[1, 2]]), np.float32([1, 2]), "output 0 is float32(1, 2), not float32(2,)"),
    ],
)
def test_comparison(got: np.ndarray, wanted: np.ndarray, wrong: str) -> None:
    case = NodeCase("test", next(iter(cases().values())).model, {}, [wanted], 1e-3, 1e-7)
    assert list(compare([got], case)) == ([wrong] if wrong else [])
