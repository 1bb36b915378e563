"""Kernels of every family for AArch64, run by qemu-user and compared with float64. Each set of
features runs on an emulated CPU that has no others, where any other instruction would end the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from gtco.tensor.sketch import RULES, family, space_of
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.space import Config, Rejection
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.arm.emulation import Batch, Job, featured
from tests.kernels import allowed, assert_close, fresh_seed, random_inputs, reference
from tests.stages import CORES, drawn

T = TensorType
# Features, the CPU that has them (qemu 7.2 has none with bf16 and i8mm but ``max``), and what its
# rows of products are called
CPUS = {
    (): ("cortex-a53", {"fma", "widened", "fcvtl", "byte", "nibble"}),
    ("dotprod",): ("cortex-a76", {"fma", "widened", "fcvtl", "byte", "nibble", "sdot"}),
    ("dotprod", "bf16", "i8mm"): (
        "max",
        {"fma", "bfmmla", "bfdot", "widened", "fcvtl", "byte", "nibble", "sdot", "smmla"},
    ),
}


def product(kind: str, x: T, w: T, out: T, **attrs: object) -> Stage:
    """A product by a constant."""
    op = Operator(kind, ("x", "w"), "y", out, make_attrs(**attrs))
    return make_stage([op], {"x": x, "w": w, "y": out}, ["w"])


def products() -> list[Stage]:
    """Products of every number format, with odd sizes and with those of whole steps."""
    sizes = ((29, 23, 72), (7, 64, 33), (1, 40, 5))
    window = dict(strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1, layout="NHWC")
    found = []
    for a, b, c in (
        ("float32", "float32", "float32"),
        ("float32", "float16", "float32"),
        ("float32", "int8", "float32"),
        ("float32", "int4", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("int8", "int8", "int32"),
    ):
        found += [product("matmul", T((m, k), a), T((k, n), b), T((m, n), c)) for m, k, n in sizes]
        image, weight = T((1, 8, 9, 16), a), T((40, 16, 3, 3), b)
        found.append(product("conv2d", image, weight, T((1, 6, 7, 40), c), **window))
    return found


def moments() -> Stage:
    """Mean and variance of rows that a split reduction computes in parts."""
    types = {"x": T((1, 5, 49, 100)), "y": T((1, 5, 2, 100))}
    return make_stage([Operator("moments", ("x",), "y", types["y"], make_attrs())], types, [])


def fixed() -> list[tuple[str, Stage]]:
    """Families that a few draws may miss."""
    column = product("matmul", T((9, 40)), T((40, 1)), T((9, 1)))
    return [("moments", moments()), ("dot", column)]


def stages(seed: int, per_core: int) -> list[tuple[str, Stage]]:
    """Drawn stages of every family."""
    found = []
    for number in range(per_core * len(CORES)):
        what = f"{seed}:{number}"
        core, depth = CORES[number % len(CORES)], Random(what + "d").choice((0, 1, 2))
        found.append((what, drawn(core, Random(what), Random(what + "l"), depth)))
    return found


def row_of(config: Config) -> str:
    """The kind of micro-kernel of a config; "" if it has none."""
    tile = dict(config.choices).get("tile")
    return "" if tile is None else str(tile).rpartition(":")[0] or "fma"


def run(
    features: tuple[str, ...], chosen: list[tuple[str, Stage]], samples: int, folder: Path
) -> tuple[Counter[str], Counter[str]]:
    """Builds configs of the stages, runs all in one process, and compares them. Gives how many were
    right by sketch, and by kind of micro-kernel.
    """
    batch = Batch(featured(*features), CPUS[features][0])
    checks: list[tuple[str, Config, Stage, Job, list[np.ndarray]]] = []
    for what, stage in chosen:
        random = Random(what)
        space = space_of(stage, batch.target)
        own = [sketch for sketch in space.sketches if sketch.name != "fallback"]
        # the fallback can take most stages, and its code is TVM's
        every = own if own and random.random() < 0.8 else space.sketches
        narrowed = [replace(space, sketches=(sketch,)) for sketch in every]
        drawn_configs = [one.sample(random) for one in narrowed for _ in range(samples)]
        for config in dict.fromkeys(drawn_configs):
            program = space.build(config, f"k{len(checks)}")
            if isinstance(program, Rejection):
                assert config.sketch == "fallback", program
                continue
            inputs = random_inputs(stage, random.randrange(1 << 30))
            job = batch.add(stage, program, inputs)
            checks.append((what, config, stage, job, inputs))
    batch.run(folder)
    built: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for what, config, stage, job, inputs in checks:
        assert job.result is not None
        exact = stage.output.type.dtype == "int32"
        tolerance = 0.0 if exact else allowed(stage, inputs)
        try:
            assert_close(job.result.astype(np.float64), reference(stage, inputs), tolerance)
        except AssertionError as error:
            error.add_note(f"stage {what} {stage.label}, {config.to_json()}, {features}")
            raise
        built[config.sketch] += 1
        rows[row_of(config)] += 1
    return built, rows


@pytest.fixture(autouse=True)
def shared_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of attention may share passes over small K and V too."""
    monkeypatch.setattr(attention, "LARGE", 0)


@pytest.mark.parametrize("features", [(), ("dotprod", "bf16", "i8mm")], ids="+".join)
def test_kernels_of_every_family_are_right(features: tuple[str, ...], tmp_path: Path) -> None:
    chosen = [*stages(3, 2), *fixed()]
    chosen += [(f"product {n}", stage) for n, stage in enumerate(products())]
    built, rows = run(features, chosen, 1, tmp_path)
    families = {family(rule) for rule in RULES}
    assert families <= built.keys(), families - built.keys()
    assert rows.keys() - {""} <= CPUS[features][1]


def test_every_row_of_products_is_right(tmp_path: Path) -> None:
    """The rows of a CPU with SDOT alone on one without anything else."""
    chosen = [(f"int8 {n}", s) for n, s in enumerate(products()) if "int32" in str(s.output.type)]
    _, rows = run(("dotprod",), chosen, 3, tmp_path)
    assert rows["sdot"] >= 4, rows


@pytest.mark.scheduled
@pytest.mark.parametrize("features", CPUS, ids="+".join)
def test_many_kernels_are_right(features: tuple[str, ...], tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    seen: Counter[str] = Counter()
    for part in range(6):
        chosen = [*stages(seed + part, 4), *fixed()]
        chosen += [(f"{seed + part} product {n}", s) for n, s in enumerate(products())]
        built, rows = run(features, chosen, 3, tmp_path / str(part))
        seen.update({**built, **rows})
    wanted = {family(rule) for rule in RULES} | CPUS[features][1]
    assert wanted <= seen.keys(), wanted - seen.keys()
