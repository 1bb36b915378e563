"""The loops of kernels for GPUs in words: they are those that are launched, and do all the work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import ceil, prod
from random import Random
from typing import Any

import pytest

from gtco.machine.gpu import gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.loops import BLOCKS, REGISTERS, THREADS, WARPS, Line
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config
from gtco.tensor.stage import Stage
from tests import stages
from tests.cuda.sketch.test_attention import heads
from tests.cuda.sketch.test_gemm import conv, dense
from tests.cuda.sketches import some

TARGETS = ("cuda:sm_75", "cuda:sm_80", "cuda:sm_90a")
CONFIGS = 3  # of a sketch


def made(
    stage: Stage, target: str, most: int = CONFIGS
) -> Iterator[tuple[Any, Config, CudaProgram]]:
    """Sketch, config and program of some configs of every sketch of the stage."""
    for sketch in space_of(stage, gpu_target(target)).sketches:
        for config in some(sketch, most):
            program: Any = sketch.build(config, "kernel")
            assert isinstance(program, CudaProgram), program
            yield sketch, config, program


def statements(lines: Sequence[Line]) -> Iterator[tuple[Line, list[Line]]]:
    """Each statement with the loops and choices around it, the outermost first."""
    around: list[Line] = []
    for line in lines:
        assert line.depth <= len(around), "a line is at most one deeper than what is around it"
        del around[line.depth :]
        if line.loop or line.text.endswith(":"):
            around.append(line)
        else:
            yield line, list(around)


def many(around: Sequence[Line], *runs: str) -> int:
    """How often a statement runs in these loops; with ``runs``, only in loops that run so."""
    loops = [line for line in around if line.loop]
    return prod(line.extent or 0 for line in loops if not runs or line.runs in runs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("core", stages.CORES, ids=lambda core: core.__name__)
def test_blocks_and_threads_are_those_of_the_launch(core: Any, target: str) -> None:
    stage = stages.drawn(core, Random(3), Random(5))
    for sketch, config, program in made(stage, target):
        found = list(statements(program.lines))
        assert any("-> output" in line.text for line, _ in found), config
        if sketch.name == "fallback" and not sketch.by_elements:
            continue  # loops of TVM
        for line, around in found:
            whole = not any(loop.loop == "part" for loop in around)
            split = int(config.by_name.get("split", 1)) if sketch.name == "gemm" and whole else 1
            # behind the parts, the block that comes last does the tile
            assert many(around, BLOCKS) * split == prod(program.grid), (config, line)
            runs = {loop.runs for loop in around}
            if WARPS in runs:
                multiplying = program.threads - sketch.workload(config).copying
                assert many(around, WARPS) * 32 == multiplying, (config, line)
            if THREADS in runs:
                assert many(around, THREADS) == program.threads, (config, line)


@pytest.mark.parametrize(
    "stage",
    [
        dense(197, 192, 768, "float16", out="float16"),
        dense(50, 30, 4096, "bfloat16"),
        dense(70, 60, 100, "float32", constant=False),
        conv(14, 24, 40, 3, "float16", groups=1),
    ],
    ids=lambda stage: stage.label,
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_product_multiplies_what_its_price_says(stage: Stage, target: str) -> None:
    """Of split tiles the blocks may have slices more and less: the lines say the most."""
    for sketch, config, program in made(stage, target, 12):
        if sketch.name != "gemm":
            continue
        (line, around), *others = (x for x in statements(program.lines) if x[0].text[:3] == "C +")
        m, k, same, n = map(int, re.findall(r"\d+", line.text)[:4])
        assert not others and k == same and around[-1].runs in (REGISTERS, WARPS, ""), config
        products, work = many(around) * m * k * n, sketch.workload(config).work / 2
        tiles = sketch.tiles(config.by_name)
        rest = ceil(tiles.slices / tiles.split) * tiles.split / tiles.slices
        assert products == round(work * rest), config


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_attention_multiplies_every_query_with_every_key(dtype: str) -> None:
    b, (m, n, d, e) = 6, (50, 70, 40, 64)
    for sketch, config, program in made(heads((2, 3), (m, n, d, e), dtype), "cuda:sm_80", 8):
        if sketch.name != "attention":
            continue
        sums = {}
        for line, around in statements(program.lines):
            if "+=" in line.text:
                rows, inner, _, columns = map(int, re.findall(r"\d+", line.text.partition("=")[2]))
                sums[line.text[:1]] = many(around) * rows * inner * columns
        assert sums.keys() == {"s", "C"}, config
        assert b * m * n * d <= sums["s"] and b * m * n * e <= sums["C"], config
        most = sketch.blocks(block := sketch.blocking(config.by_name))
        padded = prod(most) * block.heads * block.rows * ceil(n / block.step) * block.step
        assert sums["s"] == padded * block.depth and sums["C"] == padded * block.columns, config


@pytest.mark.parametrize("core", [stages.softmax, stages.norm, stages.reduction, stages.moments])
def test_a_team_reads_its_whole_row(core: Any) -> None:
    for seed in range(6):
        stage = stages.drawn(core, Random(seed), Random(seed))
        for sketch, config, program in made(stage, "cuda:sm_80"):
            if sketch.name not in ("rows", "moments", "counts"):
                continue
            along = [line for line in program.lines if line.loop in ("piece", "position")]
            length = sketch.length if sketch.name == "rows" else sketch.shape[-2]
            by_rows = sketch.name == "rows" and sketch.view.by_rows
            together = config["threads"] * (config["vector"] if by_rows else 1)
            for line in along:
                assert line.step == together and line.extent is not None
                assert (line.extent - 1) * line.step < length <= line.extent * line.step, config
            assert along or length <= together, config


def test_lines_are_plain() -> None:
    stage = dense(197, 192, 768, "float16")
    (_, _, program), *_ = made(stage, "cuda:sm_80", 1)
    texts = [str(line) for line in program.lines]
    assert texts[0].startswith("for tile in ") and "(blocks)" in texts[0]
    assert any("B packed when it was compiled" in text for text in texts)
    assert texts[-1].endswith("C, add -> output, float32")
