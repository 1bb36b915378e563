"""The loops of any kernel, read from its program."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from gtco.machine.target import cpu_target
from gtco.tensor.emit import lines as lines_module
from gtco.tensor.emit.lines import program_lines
from gtco.tensor.loops import THREADS
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Program
from tests.stages import CORES, Drawing

TARGET = cpu_target("x86-64-v3")


def program(d: Drawing, sketch: str = "") -> Program | None:
    """The first config of this sketch, or of the stage's first sketch if none is named. None if the
    stage has no such sketch.
    """
    space = space_of(d.stage(), TARGET)
    found = next((c for c in space.configs() if sketch in ("", c.sketch)), None)
    if found is None:
        return None
    made = space.build(found, "kernel")
    assert isinstance(made, Program)
    return made


def test_loops_vectors_and_where_they_store() -> None:
    d = Drawing(Random(0), Random(0), 0)
    d.add("gelu", d.input((40, 30)))
    made = program(d, "elementwise")
    lines = program_lines(made.function, made.tasks)
    task, *inner = map(str, lines)
    assert task == f"for task in {made.tasks} (threads):"
    # 1200 elements as 50 rows of 24: three vectors of 8, which one loop over lanes covers
    assert inner[-1].strip().endswith("float32 -> output") and "vector" in inner[-1]
    assert all(line.startswith("  ") for line in inner)


def test_sums_are_in_registers() -> None:
    d = Drawing(Random(0), Random(0), 0)
    d.add("softmax", d.input((6, 64)), axis=1)
    made = program(d, "rows")
    texts = [line.text for line in program_lines(made.function, made.tasks) if not line.loop]
    assert any(text.endswith("-> registers") for text in texts)
    assert texts[-1].endswith("-> output")


def test_a_fallback_has_scalar_loops() -> None:
    d = Drawing(Random(0), Random(0), 0)
    d.add("gelu", d.input((5, 7)))
    made = program(d, "fallback")
    found = [str(line) for line in program_lines(made.function, made.tasks)]
    assert found == [
        "for task in 1 (threads):",
        "  for i in 5:",
        "    for i in 7:",
        "      1 float32 -> output",
    ]


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_every_family_has_a_loop_over_tasks_and_stores_its_output(core) -> None:
    made, seed = None, 0
    while made is None:  # some drawings are stages that no kernel computes alone
        d, seed = Drawing(Random(seed), Random(seed), 0), seed + 1
        core(d)
        made = program(d)
    lines = program_lines(made.function, made.tasks)
    shared = [line for line in lines if line.runs == THREADS]
    if shared or made.tasks > 1:  # what Relax writes in one task has no loop over tasks
        assert [line.extent for line in shared] == [made.tasks]
    assert any("-> output" in line.text for line in lines)
    assert lines[0].depth == 0
    for before, line in pairwise(lines):
        assert line.depth <= before.depth + 1


def test_a_long_program_is_cut(monkeypatch) -> None:
    monkeypatch.setattr(lines_module, "MOST_LINES", 2)
    d = Drawing(Random(0), Random(0), 0)
    d.add("gelu", d.input((5, 7)))
    made = program(d, "fallback")
    *_, last = program_lines(made.function, made.tasks)
    assert last.text == "and 2 more lines" and last.depth == 0
