"""Features of built programs. The counts of statements are exact where the answer is known. The
vector tells programs apart, is finite for every kind of stage, and is the same in every process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from random import Random

import numpy as np
import pytest

from gtco.machine.target import TARGETS, Target, cpu_target
from gtco.search.learning.features import NAMES, features
from gtco.search.learning.statements import statements
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Program, Space
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.conftest import ROOT
from tests.stages import CORES, drawn

V4 = cpu_target("x86-64-v4")


def product(m: int, k: int, n: int) -> Stage:
    types = {"x": TensorType((m, k)), "w": TensorType((k, n))}
    y = Operator("matmul", ("x", "w"), "y", TensorType((m, n)))
    return make_stage([y], types, ["w"]).canonical


def gemm(stage: Stage, machine: Target = V4, **choices: int | str) -> tuple[Space, Config]:
    """A config of the stage's product that has these choices, if they are options."""
    space = space_of(stage, machine)
    chosen: dict[str, int | str] = {"sketch": "gemm"}
    while decision := space.next_decision(chosen):
        wanted = choices.get(decision.name, decision.options[0])
        assert wanted in decision.options, (decision, wanted)
        chosen[decision.name] = wanted
    return space, Config.from_json(chosen)


def vector(space: Space, config: Config, seconds: float = 1e-5) -> dict[str, float]:
    program = space.build(config, "k")
    assert isinstance(program, Program)
    found = features(program, space.stage, space.target, seconds)
    return dict(zip(NAMES, found.tolist(), strict=True))


@pytest.mark.parametrize(("m", "k", "n", "tile"), [(48, 64, 96, "6x2"), (50, 33, 64, "7x2")])
def test_what_a_product_computes_and_touches(m: int, k: int, n: int, tile: str) -> None:
    """Every multiply-add counts once, in vectors of 16, also if rows are cut into blocks of two
    heights. All elements of the operands and of the result are touched.
    """
    space, config = gemm(product(m, k, n), tile=tile, a="direct", kc=k)
    program = space.build(config, "k")
    assert isinstance(program, Program)
    found = statements(program, space.stage, 64)
    operations: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for statement in found:
        for kind, count in statement.operations.items():
            operations[kind] += round(statement.runs * count)
        for access in statement.accesses:
            assert access.lanes in (1, 16)
            if access.write:
                written[access.place] += round(statement.runs * access.lanes)
    assert operations["fma"] == m * k * n / 16
    assert written["output"] == m * n and not written["input"] and not written["weight"]
    values = vector(space, config)
    assert values["weight_unique"] == pytest.approx(np.log2(1 + 4 * k * n), abs=0.01)
    assert values["output_written"] == pytest.approx(np.log2(1 + 4 * m * n), abs=0.01)
    assert values["elements"] >= np.log2(2 * m * k * n)
    assert values["lanes"] == pytest.approx(32)  # a multiply-add is two operations


def test_what_the_tile_unit_computes_and_touches() -> None:
    """A product of two tiles counts as a vector instruction for each of 16 rows, and a tile as 16
    lines of 64 bytes.
    """
    m, k, n = 48, 64, 64
    x, w, y = TensorType((m, k), "bfloat16"), TensorType((k, n), "bfloat16"), TensorType((m, n))
    stage = make_stage([Operator("matmul", ("x", "w"), "y", y)], {"x": x, "w": w}, ["w"]).canonical
    space, config = gemm(stage, TARGETS["graniterapids"], tile="tiles:32x2", a="direct", kc=k)
    program = space.build(config, "k")
    assert isinstance(program, Program)
    fma, read = 0.0, Counter[str]()
    for statement in statements(program, space.stage, 64):
        fma += statement.runs * statement.operations.get("fma", 0.0)
        for access in statement.accesses:
            if not access.write:
                read[access.place] += round(statement.runs * access.lanes * access.item)
    assert fma == m // 16 * (n // 16) * (k // 32) * 16
    # every row for each of two panels, and every panel for each of two blocks of rows
    assert (read["input"], read["weight"]) == (2 * 2 * m * k, 2 * 2 * k * n)
    values = vector(space, config)
    assert values["weight_unique"] == pytest.approx(np.log2(1 + 2 * k * n), abs=0.01)


def test_each_decision_shows() -> None:
    """Prefetching, packing, a smaller block of k and more tasks each change the expected
    numbers.
    """
    stage = product(96, 256, 256)
    plain = vector(*gemm(stage, tile="8x2", a="direct", kc=256, prefetch="none"))
    prefetched = vector(*gemm(stage, tile="8x2", a="direct", kc=256, prefetch="next"))
    assert prefetched["op_prefetch"] > plain["op_prefetch"] == 0
    packed = vector(*gemm(stage, tile="8x2", a="packed", kc=256, prefetch="none"))
    assert packed["scratch_written"] > plain["scratch_written"]
    assert packed["scratch"] > plain["scratch"]
    cut = vector(*gemm(stage, tile="8x2", chunks_m=4, a="direct", kc=256, prefetch="none"))
    assert cut["tasks"] > plain["tasks"]
    larger = vector(*gemm(stage, tile="14x2", a="direct", kc=256, prefetch="none"))
    assert larger["body"] > plain["body"] and larger["local"] > plain["local"]
    assert larger["weight_read"] < plain["weight_read"]  # once for each block of rows


def test_different_programs_have_different_features() -> None:
    """In a sample of one stage, no two configs look the same to a model."""
    space, rng = space_of(product(50, 96, 160), V4), Random(0)
    configs = {space.sample(rng) for _ in range(25)}
    rows = {tuple(vector(space, config).values()) for config in configs}
    assert len(rows) == len(configs)


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_every_kind_of_stage_has_finite_features(core: object) -> None:
    """The program of any sketch, whatever surrounds the operator."""
    seen = 0
    for seed in range(12):
        what = f"{core.__name__}{seed}"  # type: ignore[attr-defined]
        stage = drawn(core, Random(what), Random(what + "l"), seed % 2)  # type: ignore[arg-type]
        space = space_of(stage, V4)
        if not space.sketches:
            continue
        config = space.sample(Random(what + "c"))
        program = space.build(config, "k")
        if not isinstance(program, Program):
            continue
        seen += 1
        found = features(program, stage, V4, 1e-6)
        assert found.shape == (len(NAMES),) and np.isfinite(found).all(), (what, config)
        named = dict(zip(NAMES, found, strict=True))
        assert (found >= 0).all(), {n: x for n, x in named.items() if x < 0}
        assert named["tasks"] == pytest.approx(np.log2(1 + program.tasks), rel=1e-5)
        assert named["output_written"] > 0
        assert named["idle"] < 1 and named["output_scalar"] <= 1
        assert (features(program, stage, V4, 1e-6) == found).all()
    assert seen, "no kernel of its own for any of them"


def drawn_vectors() -> list[list[float]]:
    space, rng = space_of(product(50, 33, 70), V4), Random(3)
    return [list(vector(space, space.sample(rng)).values()) for _ in range(6)]


def test_the_same_in_every_process() -> None:
    """The numbers do not depend on the hashes of objects."""
    code = "from tests.search.test_features import drawn_vectors; print(drawn_vectors())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(drawn_vectors())
