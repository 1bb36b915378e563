"""The registers that the policy expects, compared with those that ptxas gives, for drawn configs of
every family of kernels and every architecture. The number of blocks on a multiprocessor decides:
the policy may expect fewer than there will be, and only rarely more.

``pytest -m scheduled -s`` of this file makes a long run with a new seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from gtco.codegen.cuda import gpu_code
from gtco.codegen.nvrtc import Image
from gtco.machine.gpu import ARCHITECTURES, GpuTarget, gpu_target
from gtco.search.gpu.policy import GpuPolicy, occupancy
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.space import Config, build
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage
from tests import stages
from tests.cuda.sketch.test_attention import MODELS, matched, merged_heads
from tests.cuda.sketch.test_drawn import CORES
from tests.cuda.sketch.test_drawn import RULES as STREAMING
from tests.cuda.sketch.test_gemm import sketch_of
from tests.cuda.sketch.test_gemm_images import STAGES
from tests.kernels import fresh_seed

BEST = 12  # configs with the least predicted time; half of the drawn configs are among them
# For each family: the share of configs that may hold fewer blocks than expected, and the mean
# difference allowed between the estimate and ptxas's registers.
OPTIMISTIC, APART = 0.05, {"gemm": 20.0, "attention": 28.0, "streaming": 24.0}


@dataclass(frozen=True)
class Reading:
    """A config's registers, expected and by ptxas, and the blocks that follow from each."""

    what: str
    reckoned: int
    registers: int
    expected: int
    blocks: int


def sketches(family: str, target: GpuTarget, random: Random) -> Iterator[tuple[str, Any]]:
    """Sketches of one stage after the other, without end; streaming kernels have drawn
    surroundings.
    """
    fixed = {"gemm": STAGES, "attention": MODELS}.get(family)
    while True:
        if fixed is not None:
            name = random.choice(list(fixed))
            stage = fixed[name]
            yield name, (
                sketch_of(stage, target) if family == "gemm" else matched(stage, target.name)
            )
            continue
        core = random.choice(CORES)
        stage = stages.drawn(core, Random(random.random()), Random(random.random()))
        found = next((s for s in (rule(stage, target) for rule in STREAMING) if s), None)
        if found is not None:
            yield stage.label, found


def drawn(sketch: Any, target: GpuTarget, random: Random) -> Config:
    """One of the best configs, or any config."""
    ranked: list[Config] = list(GpuPolicy(target).compared(sketch)[0])
    return random.choice(ranked[:BEST] if random.random() < 0.5 else ranked)


def readings(family: str, arch: str, count: int, seed: int) -> Iterator[Reading]:
    target, random = gpu_target(f"cuda:{arch}"), Random(seed)
    for _, (name, sketch) in zip(range(count), sketches(family, target, random), strict=False):
        config = drawn(sketch, target, random)
        image = compiled(sketch, config, target)
        launch: Any = sketch.workload(config)
        used = replace(launch, registers=image.registers)
        yield Reading(
            f"{arch} {name} {config.to_json()}",
            launch.registers,
            image.registers,
            occupancy(launch, target).blocks,
            occupancy(used, target).blocks,
        )


@cache
def compiled(sketch: Any, config: Config, target: GpuTarget) -> Image:
    program = build(sketch, config, "kernel_under_test")
    assert isinstance(program, CudaProgram), program
    images = gpu_code(program, target)
    assert isinstance(images, dict), images
    return images[target.arch]


def faults(family: str, found: list[Reading]) -> list[str]:
    """What is wrong with the readings."""
    optimistic = [one for one in found if one.expected > one.blocks]
    apart = sum(abs(one.reckoned - one.registers) for one in found) / len(found)
    print(f"{family}: {len(found)} configs, {len(optimistic)} with fewer blocks, {apart:.1f} apart")
    wrong = [str(one) for one in optimistic] if len(optimistic) > OPTIMISTIC * len(found) else []
    return [*wrong, f"{apart:.1f} registers apart"] if apart > APART[family] else wrong


@pytest.mark.parametrize("family", APART)
def test_drawn_configs(family: str) -> None:
    found = [one for arch in ARCHITECTURES for one in readings(family, arch, 3, seed=1)]
    assert not (wrong := faults(family, found)), "\n".join(wrong)


# An attention that gets 130 registers from ptxas if one block must fit, and 123 if four must.
ROOMY = dict(
    columns=64, query="registers", tiles=1, keys=32, warps=4, split=1, heads=1, stages=2
)  # fmt: skip


def test_a_kernel_makes_room_for_the_blocks_that_its_price_has() -> None:
    """It is compiled once more with bounds, if the first image leaves room for fewer blocks."""
    target = gpu_target("cuda:sm_80")
    sketch = matched(merged_heads(8, 16, 197, 64, "float16", "as it is"), target.name)
    config = Config(sketch.name, tuple(ROOMY.items()))
    program = build(sketch, config, "kernel_under_test")
    assert isinstance(program, CudaProgram), program
    blocks = []
    for reckoned in (0, 126):
        images = gpu_code(replace(program, registers=reckoned), target)
        assert isinstance(images, dict) and not images["sm_80"].spills, images
        used = replace(sketch.workload(config), registers=images["sm_80"].registers)
        blocks.append(occupancy(used, target).blocks)
    assert blocks == [3, 4]


def test_no_more_registers_are_reckoned_with_than_a_block_has() -> None:
    """Rows that 1024 threads share, and a concatenation of more parts than a thread has registers.
    If they were expected to need so many registers, only the fallback would be left.
    """
    row, each = TensorType((64, 32768)), TensorType((8, 64))
    names = tuple(f"x{i}" for i in range(200))
    joined, axis = TensorType((8, 64 * len(names))), make_attrs(axis=1)
    norm = Operator("layer_norm", ("x", "g", "b"), "y", row, make_attrs(epsilon=1e-5))
    vector = TensorType((32768,))
    concat = Operator("concat", names, "c", joined, axis)
    relu = Operator("relu", ("c",), "y", joined, make_attrs())
    long = make_stage([norm], {"x": row, "g": vector, "b": vector}, [])
    many = make_stage([concat, relu], dict.fromkeys(names, each), [])
    for architecture in ARCHITECTURES:
        policy = GpuPolicy(gpu_target(f"cuda:{architecture}"))
        assert policy.choose(long).sketch.name == "rows"
        assert policy.choose(many).sketch.name == "elementwise"


@pytest.mark.scheduled
@pytest.mark.parametrize("family", APART)
def test_many_drawn_configs(family: str) -> None:
    seed, found = fresh_seed(), defaultdict(list)
    for arch in ARCHITECTURES:
        found[arch] = list(readings(family, arch, 40, seed))
        print(arch)
        faults(family, found[arch])
    every = [one for some in found.values() for one in some]
    assert not (wrong := faults(family, every)), "\n".join(wrong)
