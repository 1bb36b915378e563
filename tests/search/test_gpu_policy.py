"""The policy for GPUs on synthetic sketches: its preferences follow from the machine alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np
import pytest

from gtco.machine.gpu import GPUS, GpuTarget
from gtco.search.gpu.policy import LAUNCH, GpuPolicy, occupancy
from gtco.tensor.cuda.program import Launch
from gtco.tensor.space import Config, Decision, Option
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

A100, H100 = GPUS["cuda:a100"], GPUS["cuda:h100"]
TILES = ("32x32", "64x64", "128x128", "256x128")


@dataclass(frozen=True)
class Product:
    """An m x n x k product of float16 in blocks of a tile, with a loop over k in staged steps of
    32.
    """

    m: int
    n: int
    k: int
    unit: str = "mma:float16"
    name: str = "product"
    structure = "SSSRRSRS"

    @property
    def stage(self) -> Stage:
        types = {
            "x": TensorType((self.m, self.k), "float16"),
            "w": TensorType((self.k, self.n), "float16"),
        }
        made = [Operator("matmul", ("x", "w"), "y", TensorType((self.m, self.n)))]
        return make_stage(made, types, ["w"])

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        for name, role, options in (
            ("tile", "block", TILES),
            ("stages", "overlap", (3, 1)),
            ("split", "parallel", (1, 4)),
        ):
            if name not in chosen:
                return Decision(name, role, options)
        return None

    def workload(self, config: Config) -> Launch:
        tm, tn = map(int, config["tile"].split("x"))
        blocks = ceil(self.m / tm) * ceil(self.n / tn) * config["split"]
        threads = max(32, tm * tn // 64 if tm * tn <= 128 * 128 else 256)
        steps = ceil(self.k / 32 / config["split"])
        loads = blocks * steps * (tm + tn) * 32 * 2.0
        return Launch(
            blocks=blocks,
            threads=threads,
            shared=config["stages"] * (tm + tn) * 32 * 2,
            registers=min(255, 40 + tm * tn // threads),
            unit=self.unit,
            work=2.0 * blocks * tm * tn * steps * 32,
            vector=4.0 * blocks * tm * tn,
            read=2.0 * self.k * (self.m + self.n),
            written=4.0 * self.m * self.n * config["split"],
            traffic=loads,
            flops=2.0 * self.m * self.n * self.k,
            overlapped=config["stages"] > 1,
            staged=2 * loads,
            steps=steps,
        )

    def build(self, config: Config, symbol: str) -> None:
        raise AssertionError("a policy builds nothing")


def best(sketch: Product, target: GpuTarget = A100) -> Mapping[str, Option]:
    (pick,) = GpuPolicy(target).picks(sketch)  # type: ignore[arg-type]
    return pick.config.by_name


def area(tile: Option) -> int:
    m, n = map(int, str(tile).split("x"))
    return m * n


def test_large_products_take_large_tiles_and_small_ones_small_tiles():
    areas = [area(best(Product(197 * batch, 768, 768))["tile"]) for batch in (1, 8, 64, 256)]
    assert areas == sorted(areas) and areas[0] < areas[-1]
    assert areas[-1] >= 128 * 128


def test_loads_are_under_way_while_a_block_computes():
    for rows in (64, 197, 12608):
        assert best(Product(rows, 768, 768))["stages"] == 3


def test_a_long_k_of_few_blocks_is_split_and_one_of_many_is_not():
    assert best(Product(64, 64, 8192))["split"] == 4
    assert best(Product(8192, 8192, 1024))["split"] == 1


def test_tensor_cores_are_not_worth_padding_of_tiny_products():
    """Helix, Figure 12: if tiles are mostly padding, CUDA cores win, since they multiply only real
    elements.
    """
    policy, tensor = GpuPolicy(A100), Product(197, 64, 64)
    config = Config("product", (("tile", "64x64"), ("stages", 3), ("split", 1)))
    wide = tensor.workload(config)
    exact = replace(wide, unit="fma", work=wide.flops)
    assert policy.seconds(exact) > policy.seconds(wide)  # almost no padding
    padded = replace(wide, work=64 * wide.work, staged=64 * wide.staged)
    assert policy.seconds(padded) > policy.seconds(exact)


def test_a_launch_is_the_least_that_anything_takes():
    policy = GpuPolicy(H100)
    tiny = Launch(1, 32, 0, 16, "fma", 0.0, 32.0, 128.0, 128.0, 256.0, 32.0)
    assert LAUNCH < policy.seconds(tiny) < 4 * LAUNCH


def test_a_last_partial_wave_takes_as_long_as_its_blocks_do():
    policy = GpuPolicy(A100)
    one = Launch(108, 256, 160 << 10, 128, "mma:float16", 1e9, 0, 1e3, 1e3, 2e3, 1e9, steps=20)
    more = replace(one, blocks=109, work=one.work * 109 / 108)
    assert occupancy(one, A100).blocks == 1
    loops = [policy.seconds(x) - policy.seconds(replace(x, work=0.0, steps=0)) for x in (one, more)]
    assert loops[1] == pytest.approx(2 * loops[0], rel=0.05)


@pytest.mark.parametrize(
    ("change", "blocks", "limit"),
    [
        ({}, 8, "threads"),
        ({"shared": 40 << 10}, 4, "shared memory"),
        ({"registers": 128}, 2, "registers"),
        ({"registers": 121}, 2, "registers"),
        ({"threads": 32}, 32, "blocks"),
        ({"shared": 164 << 10}, 0, "shared memory"),
        ({"registers": 255, "threads": 1024}, 0, "registers"),
    ],
)
def test_occupancy(change, blocks, limit):
    launch = replace(Launch(1, 256, 1 << 10, 32, "fma", 1, 1, 1, 1, 1, 1), **change)
    found = occupancy(launch, A100)
    assert (found.blocks, found.limit) == (blocks, limit)


def test_what_cannot_be_launched_is_never_picked():
    policy = GpuPolicy(GPUS["cuda:2080ti"])
    launch = Launch(8, 256, 65 << 10, 64, "mma:float16", 1, 1, 1, 1, 1, 1)
    assert policy.seconds(launch) == inf
    assert policy.seconds(replace(launch, shared=0, unit="mma:bfloat16")) == inf
    assert policy.picks(Product(64, 64, 64, unit="mma:bfloat16")) == []


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_no_price_is_below_the_floor_or_the_peak(gpu):
    policy = GpuPolicy(gpu)
    for m, n, k in ((197, 768, 768), (1, 1000, 768), (6304, 3072, 768), (64, 64, 64)):
        sketch = Product(m, n, k)
        op = sketch.stage.operators[0]
        types = {i.name: i.type for i in sketch.stage.inputs}
        configs, seconds = policy.compared(sketch)  # type: ignore[arg-type]
        assert len(configs) > 4 and np.all(np.isfinite(seconds))
        assert seconds.min() >= policy.floor(op, types) >= LAUNCH
        assert sketch.workload(configs[0]).flops / seconds.min() < policy.peak("float16")


def test_more_memory_bandwidth_is_never_slower():
    sketch = Product(32, 4096, 4096)
    assert best(sketch, H100) and best(sketch, GPUS["cuda:h200"])
    slow, fast = (GpuPolicy(gpu).picks(sketch)[0].seconds for gpu in (H100, GPUS["cuda:h200"]))
    assert fast <= slow


def test_stages_of_one_signature_share_the_ranking():
    @dataclass(frozen=True)
    class Counted(Product):
        signature = "the same loops"

        def workload(self, config: Config) -> Launch:
            asked.append(config)
            return super().workload(config)

    asked: list[Config] = []
    policy = GpuPolicy(A100)
    first = policy.picks(Counted(197, 768, 768))[0]
    assert len(asked) >= 16
    asked.clear()
    assert policy.picks(Counted(197, 768, 768))[0].config == first.config
    assert len(asked) <= 17


# (threads, registers, shared): blocks of a multiprocessor on sm_75, sm_80, sm_89 and sm_90a, as the
# vendor's calculator (cuda_occupancy.h of CUDA 13.0) says.
CALCULATED = {
    (128, 64, 20480): (3, 7, 4, 8),
    (128, 40, 0): (8, 12, 12, 12),
    (32, 32, 0): (16, 32, 24, 32),
    (256, 128, 49152): (1, 2, 2, 2),
    (96, 96, 1000): (6, 6, 6, 6),
    (224, 168, 8192): (1, 1, 1, 1),
    (128, 168, 33000): (1, 3, 3, 3),
    (64, 24, 5000): (12, 27, 16, 32),
    (1024, 64, 16384): (1, 1, 1, 1),
    (128, 255, 65000): (1, 2, 1, 2),
    (288, 80, 10300): (2, 2, 2, 2),
    (160, 208, 100): (1, 1, 1, 1),
    (128, 64, 98304): (0, 1, 1, 2),
    (672, 96, 0): (0, 0, 0, 0),
}


@pytest.mark.parametrize("asked", CALCULATED)
def test_occupancy_is_the_vendors(asked):
    threads, registers, shared = asked
    launch = Launch(1, threads, shared, registers, "fma", 0, 0, 0, 0, 0, 0)
    gpus = (GPUS[f"cuda:{name}"] for name in ("2080ti", "a100", "rtx4090", "h100"))
    assert tuple(occupancy(launch, gpu).blocks for gpu in gpus) == CALCULATED[asked]
