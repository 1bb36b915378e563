"""The loops of a product in words are those that are emitted."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from gtco.machine.target import cpu_target
from gtco.tensor.emit.lines import program_lines
from gtco.tensor.loops import REGISTERS, THREADS, Line
from gtco.tensor.nest.lines import nest_lines
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Config, Program
from tests.kernels import fresh_seed, targets
from tests.nest.test_counts import DRAWN, product

PAGE = (Path(__file__).parents[2] / "docs/nest.md").read_text()
OF_NEST = ("task", "part", "kb", "panel", "position", "line", "block")


def loops(lines: tuple[Line, ...]) -> list[tuple[str, int | None]]:
    return [(line.loop, line.extent) for line in lines if line.loop in OF_NEST]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("family", DRAWN)
def test_the_loops_are_those_of_the_program(family: str, name: str) -> None:
    random = Random(fresh_seed())
    for _ in range(20):
        case = DRAWN[family](random, name)
        program = case.sketch.build(case.config, "kernel")
        if not isinstance(program, Program):  # the space has no such blocks
            continue
        said = loops(nest_lines(case.nest))
        emitted = loops(program_lines(program.function, program.tasks))
        assert [n for n, _ in said] == [n for n, _ in emitted], case.nest
        for (_, most), (_, extent) in zip(said, emitted, strict=True):
            # the last task may have fewer panels and blocks, which the program then looks up
            assert extent in (most, None), case.nest
        assert loops(program.lines) == said


def test_what_is_packed_and_kept() -> None:
    """The product of docs/nest.md."""
    sketch = gemm.match(product(8, 64, 24, constant=True), cpu_target("x86-64-v3"))
    chosen = {"tile": "4x1", "chunks_m": 1, "chunks_n": 1, "a": "packed", "kc": 32}
    config = Config("gemm", (*chosen.items(), ("order", "panels"), ("prefetch", "none")))
    lines = sketch.build(config, "product").lines
    shown = PAGE.partition("## In words")[2].partition("## How")[0]
    assert [str(line) for line in lines] == re.findall("^    (.*)$", shown, re.M)
    assert lines[0].runs == THREADS and lines[6].runs == REGISTERS
    assert [Line.from_json(line.to_json()) for line in lines] == [*lines]
