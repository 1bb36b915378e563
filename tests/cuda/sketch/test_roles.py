"""Warp roles of products by warp groups (device/gtco/roles.cuh): emulated against float64, with
each part of the hand-over left out in turn, which must be found; machine code and registers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import gtco.driver.linking.persistent
from gtco.codegen.cuda import gpu_code
from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import MachineCode, machine_code
from gtco.driver.linking.persistent import persistent
from gtco.machine.gpu import gpu_target
from gtco.search.gpu.launches import MOST_THREADS, narrow
from gtco.search.gpu.policy import GpuPolicy, occupancy
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Record, Records
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import has_roles
from gtco.tensor.cuda.tensor_core import EMITTED_COLUMNS
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.gemm.cuda import CudaGemm
from gtco.tensor.sketch.gemm.cuda_roles import NONE, PRODUCER, ROLES
from gtco.tensor.space import Config, Pick, Rejection, build, configs
from gtco.tensor.space import check as refusal
from gtco.tensor.stage import Stage
from tests.cuda.emulate import emulate
from tests.cuda.emulated_objects import DEVICE, Fault
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sketch.test_gemm import STAGES, N, T, chain, check, conv, dense, inputs, sketch_of
from tests.cuda.sketch.test_gemm_groups import HOPPER, LARGE, ROW, by_groups
from tests.cuda.sketch.test_split import Force, force  # noqa: F401 (a fixture)
from tests.cuda.whole import emulated, outputs, prepared
from tests.kernels import fresh_seed
from tests.models.test_models import seeded

TARGET = gpu_target(HOPPER)


def with_roles(sketch: CudaGemm, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Every config with a producer, however much of a small product it wastes."""
    return [c for c in by_groups(sketch, monkeypatch) if c[ROLES] == PRODUCER]


SMALL = {
    "odd": dense(101, 45, 136, "float16"),
    "two_slices": dense(64, 32, 72, "float16"),
    "rounded": dense(70, 100, 200, "bfloat16", out="bfloat16"),
    "many_slices": dense(77, 61, 840, "bfloat16"),
    "stored_by_heads": dense(129, 67, 264, "float16", out="float16"),
    "transposed": STAGES["transposed"],
    "heads": STAGES["heads"],
    "conv3x3": conv(6, 16, 24, 3, "float16"),
    "strided": conv(9, 16, 17, 3, "bfloat16", strides=(2, 1)),
}


def test_a_stage_takes_no_roles_that_only_an_earlier_one_of_its_sizes_has() -> None:
    """Where rows lie unevenly apart a producer needs more registers, and some tiles leave it too
    few.
    """
    m, n, k = 2048, 1024, 512
    turned = ("permute", "b", "t", N(k, n), {"axes": (1, 0)})
    product = ("matmul", "x t", "y", T(m, n), {})
    even = chain({"x": N(m, k), "b": N(n, k)}, turned, product)
    cut = {"begin": (0, 1, 0), "strides": (1, 1, 1)}
    uneven = chain(
        {"x2": N(2, m // 2 + 1, k), "b2": N(2, n // 2 + 1, k)},
        ("slice", "x2", "x1", N(2, m // 2, k), cut),
        ("reshape", "x1", "x", N(m, k), {}),
        ("slice", "b2", "b1", N(2, n // 2, k), cut),
        ("reshape", "b1", "b", N(n, k), {}),
        turned,
        product,
    )
    first, second = sketch_of(even, HOPPER), sketch_of(uneven, HOPPER)
    assert first.signature == second.signature
    policy = GpuPolicy(TARGET)
    ranked, _ = policy.compared(first)
    assert any(refusal(second, config) for config in ranked), "the test would not see it"
    left, _ = policy.compared(second)
    assert left and not any(refusal(second, config) for config in left)


@pytest.mark.parametrize("stage", SMALL.values(), ids=SMALL)
def test_products(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a config that is drawn."""
    seed = fresh_seed()
    sketch = sketch_of(stage, HOPPER)
    if found := with_roles(sketch, monkeypatch):
        assert not check(sketch, Random(seed).choice(found), seed).conflicts
    else:  # one slice only
        every = by_groups(sketch, monkeypatch)
        assert every and all(sketch.tiles(c.by_name).slices == 1 for c in every)


@pytest.mark.parametrize("columns", EMITTED_COLUMNS)
def test_every_tile(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all columns, with one and two groups of consumers, and three and four slots."""
    seed = fresh_seed()
    sketch = sketch_of(dense(129, columns + 5, 328, "float16"), HOPPER)
    found = [c for c in with_roles(sketch, monkeypatch) if c["row"] == ROW.format(columns)]
    seen = {(str(c["block"]).split("x")[0], c["stages"]) for c in found}
    assert {rows for rows, _ in seen} == {"64", "128"} and {s for _, s in seen} >= {3, 4}
    check(sketch, Random(seed).choice(found), seed)


@pytest.mark.parametrize("blocks", [2, 3])
def test_split(blocks: int, force: Force, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Parts of k of different sizes, one after the other in one counter."""
    force(blocks)
    seed = fresh_seed()
    sketch = sketch_of(dense(70, 45, 456, "float16"), HOPPER)  # 8 slices
    drawn = Random(seed).choice(with_roles(sketch, monkeypatch))
    assert drawn["split"] == blocks
    check(sketch, drawn, seed)


def test_what_has_too_few_slices_has_no_roles(
    force: Force, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    one = sketch_of(dense(64, 32, 40, "float16"), HOPPER)
    assert by_groups(one, monkeypatch) and not with_roles(one, monkeypatch)
    force(3)
    part = sketch_of(dense(70, 45, 328, "float16"), HOPPER)  # 6 slices, and 5 of 3 blocks
    found = with_roles(part, monkeypatch)
    assert {part.tiles(c.by_name).slices // int(c["split"]) for c in found} == {2}
    force(6)
    assert not with_roles(sketch_of(dense(70, 45, 328, "float16"), HOPPER), monkeypatch)
    warps = sketch_of(dense(197, 768, 768, "float16"), HOPPER)
    assert all(ROLES not in c.by_name for c in configs(warps, {"row": "mma.m16n8k16"}))


# The parts taken out of roles.cuh or changed there, and the fault that is found.
LATE = "not been waited for|race|never written"
LACKING = {
    "the wait for a full slot": (
        "mbarrier_wait(slots.full + reading.slot, reading.parity);", "", LATE),
    "the wait for an empty slot": (
        "mbarrier_wait(slots.empty + begun.slot, begun.parity ^ 1);", "", LATE),
    "an empty slot's parity": ("begun.parity ^ 1);", "begun.parity);", "waits in mbarrier_wait"),
    "that a slot is full": ("mbarrier_arrive(slots.full + there.slot);", "",
                            "waits in mbarrier_wait"),
    "that a slot is empty": ("mbarrier_arrive(slots.empty + before, s > 0 && lane() == 0);", "",
                             "waits in mbarrier_wait"),
    "that the right one is": ("mbarrier_arrive(slots.empty + before,",
                              "mbarrier_arrive(slots.empty + reading.slot,",
                              f"{LATE}|waits in mbarrier_wait"),
    "one arrival of a warp": ("s > 0 && lane() == 0);", "s > 0 && lane() < 2);",
                              f"{LATE}|waits in mbarrier_wait"),
    "every producer's arrival": ("mbarrier_init(first + i, PRODUCERS);",
                                 "mbarrier_init(first + i, PRODUCERS - 1);",
                                 f"{LATE}|waits in mbarrier_wait"),
    "the wait for copies": ("copy_wait<BEHIND>();", "", "not been waited for"),
    "the wait for all of them": ("copy_wait<BEHIND>();", "copy_wait<BEHIND + 1>();", LATE),
    "the fence": ("fence_proxy();\n        mbarrier_arrive", "mbarrier_arrive", "no fence_proxy"),
    "the fence before the arrival": (
        "fence_proxy();\n        mbarrier_arrive(slots.full + there.slot);",
        "mbarrier_arrive(slots.full + there.slot);\n        fence_proxy();", "no fence_proxy"),
    "the wait for products": ("share.template wait<1>();", "share.template wait<2>();",
                              "not been waited for"),
    "the last wait for them": ("share.template wait<0>();", "", "waited for"),
    "room for the last products": ("BEHIND = STAGES - 2;", "BEHIND = STAGES - 1;",
                                   "waits in mbarrier_wait"),
    "the block's barrier": ("sync<PRODUCERS + CONSUMERS>();", "", "race: uses|no mbarrier"),
    "the consumers' barrier": ("sync_first<CONSUMERS>();", "", LATE),
    "its threads": ("sync_first<CONSUMERS>();", "sync<CONSUMERS>();", "sync of"),
}  # fmt: skip


@pytest.mark.parametrize("what", LACKING)
def test_every_part_of_it_is_needed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = dense(65, 33, 392, "float16")  # 7 slices
    sketch = sketch_of(stage, HOPPER)
    config = next(c for c in with_roles(sketch, monkeypatch)
                  if c["stages"] == 3 and c["row"] == ROW.format(32)
                  and str(c["block"]).startswith("128"))  # fmt: skip
    program = build(sketch, config, "kernel")
    assert isinstance(program, CudaProgram)
    arrays = [program.packings[i.name].apply(a) if i.name in program.packings else a
              for i, a in zip(stage.inputs, inputs(stage, fresh_seed()), strict=True)]  # fmt: skip
    text, instead, message = LACKING[what]
    roles, whole = ((DEVICE / "gtco" / name).read_text() for name in ("roles.cuh", "gemm.cuh"))
    assert roles.count(text) == 1
    source = program.source
    for name, by in (("gemm", whole), ("roles", roles.replace(text, instead))):
        include = f'#include "gtco/{name}.cuh"\n'
        assert source.count(include) == 1
        source = source.replace(include, by)
    out = np.empty([int(d) for d in stage.output.type.shape], np.float32)
    with pytest.raises(Fault, match=message):
        emulate(replace(program, source=source), "kernel", arrays, out, arch=900)


LARGER = {**LARGE, "strided": conv(56, 64, 128, 3, "float16", strides=(2, 2)),
          "strided_1x1": conv(28, 128, 256, 1, "float16", strides=(2, 2)),
          "deep": dense(197, 768, 3072, "float16"),
          "heads": chain({"x": N(12, 577, 768), "b": N(12, 768, 768)},
                         ("permute", "b", "t", N(12, 768, 768), {"axes": (0, 2, 1)}),
                         ("matmul", "x t", "y", T(12, 577, 768), {}))}  # fmt: skip


def of_large(stage: Stage) -> Iterator[tuple[CudaGemm, Config]]:
    """A config with a producer for each number of columns and rows; a split one if there is one."""
    sketch = sketch_of(stage, TARGET)
    for name in (name for name in sketch.rows if name.startswith("wgmma")):
        found = [c for c in configs(sketch, {"row": name}) if c[ROLES] == PRODUCER]
        for rows in ("64x", "128x"):
            of_rows = [c for c in found if str(c["block"]).startswith(rows)]
            if of_rows:
                yield sketch, Random(name + rows).choice(of_rows)


@pytest.mark.parametrize(
    "name",
    [  # ``make test`` takes every other one of them
        pytest.param(name, marks=[pytest.mark.scheduled] if number % 2 else [])
        for number, name in enumerate(LARGER)
    ],
)
def test_machine_code(name: str) -> None:
    """Half of the configs of each stage: blocks of 64 rows of one stage, of 128 of the next.

    Registers change hands, and slots do so by mbarriers. Products have no barriers between them,
    and nothing is spilled. A thread begins with as many registers as the policy expected, and all
    roles together have no more than that.
    """
    handed, turn = 0, list(LARGER).index(name) % 2
    for sketch, config in list(of_large(LARGER[name]))[turn::2]:
        program, launch = build(sketch, config, "product"), sketch.workload(config)
        assert isinstance(program, CudaProgram)
        image = compile_cuda(program.source, "sm_90a")
        assert not image.spills and not image.local and "serialized" not in image.log, image.log
        code = machine_code(image.cubin)["product"]
        assert code.count("HGMMA") >= 4 and not code.spilled
        assert code.count("LDGSTS") > 0 == code.count("LDSM")
        assert syncs(code) == {"EXCH", "ARRIVE", "PHASECHK"}
        assert not {"BRA.DIV", "BRA.CONV"} & set(code.instructions)
        roles = sketch.roles(sketch.tiles(config.by_name))
        assert roles is not None and launch.copying == 128 < launch.threads == program.threads
        assert code.count("USETMAXREG") == (2 if roles.consumer else 0)
        if roles.consumer:
            handed += 1
            assert image.registers == launch.registers == roles.begin
            consumers = launch.threads - launch.copying
            held = roles.producer * launch.copying + roles.consumer * consumers
            assert roles.producer < roles.begin < roles.consumer
            assert held <= roles.begin * launch.threads <= TARGET.registers_sm // roles.side_by_side
        used = replace(launch, registers=image.registers)
        found, reckoned = (occupancy(of, TARGET).blocks for of in (used, launch))
        assert found >= reckoned > 0, (config.to_json(), image.registers, launch.registers)
    assert handed


def syncs(code: MachineCode) -> set[str]:
    """The kinds of instructions of mbarriers."""
    names = (name.split(".") for name in code.instructions)
    return {parts[1] for parts in names if parts[0] == "SYNCS"}


def test_its_bounds_stay() -> None:
    """The registers that warps hand over are computed from the bounds, so no image is made with
    other bounds.
    """
    sketch, config = next(of_large(LARGE["feed_forward"]))
    program = build(sketch, config, "product")
    assert isinstance(program, CudaProgram) and has_roles(program.source)
    asked = []

    def spilling(source: str, arch: str, ptx: bool) -> object:
        asked.append(source)
        return replace(compile_cuda(source, arch, ptx), spills=8)

    gpu_code(replace(program, registers=24), TARGET, compiler=spilling)  # type: ignore[arg-type]
    assert asked == [program.source]


def test_kernels_with_and_without_them_are_measured() -> None:
    """One warp group brings fewer bytes a clock than all warps do: large tiles wait for it."""
    for stage in LARGE.values():
        policy = GpuPolicy(TARGET)
        pick = policy.choose(stage)
        assert pick is not None and pick.config.by_name.get(ROLES, NONE) == NONE
        some = [c for c in policy.compared(pick.sketch)[0] if c.by_name.get(ROLES) == PRODUCER]
        assert some
        proposed = [c.by_name.get(ROLES, NONE) for c in policy.propose(stage, 8)]
        assert {*proposed} == {NONE, PRODUCER}


def without(config: Config) -> Config:
    return Config.from_json({**config.to_json(), ROLES: NONE})


def test_records_of_before(tmp_path: Path) -> None:
    """Old records do not name roles, which means that there are none."""
    policy, stage = GpuPolicy(TARGET), LARGE["feed_forward"]
    sketch, config = next(of_large(stage))
    before = without(config)
    pick = Pick(sketch, before, policy.price(sketch, before))
    said = {name: value for name, value in before.to_json().items() if name != ROLES}
    assert space_of(stage, TARGET).check(Config.from_json(said)) is not None
    with Records(tmp_path / "records") as records:
        records.add([replace(Record.of(stage, pick, "there", "kept"), config=json.dumps(said))])
        recorded = RecordedPolicy(policy, records, "there")
        chosen = recorded.choose(stage)
        assert chosen is not None and chosen.config == before and not recorded.passed_over


def test_beside_other_stages_they_have_none() -> None:
    """In the persistent kernel the config is the same, without roles."""
    policy = GpuPolicy(TARGET)
    for sketch, config in of_large(LARGE["feed_forward"]):
        pick = Pick(sketch, config, policy.price(sketch, config))
        found = narrow(policy, pick)
        assert found.config == without(config)
        assert sketch.workload(found.config).threads <= MOST_THREADS
        assert found.seconds == policy.price(sketch, found.config)


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose warps have roles are predicted to take a tenth of their time."""
    seconds = GpuPolicy.seconds

    def tenth(policy: GpuPolicy, launch: Launch, constants: float = 0.0) -> float:
        found = seconds(policy, launch, constants)
        return found / 10 if launch.copying else found

    monkeypatch.setattr(GpuPolicy, "seconds", tenth)


def two_layers() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = torch.nn.Linear(192, 128), torch.nn.GELU(), torch.nn.Linear(128, 90)
    return seeded(torch.nn.Sequential(*layers)), torch.randn(120, 192)


@pytest.mark.parametrize("launches", ["graph", "persistent"])
@pytest.mark.usefixtures("cheap")
def test_a_model_with_roles(driver: FakeDriver, tmp_path: Path, launches: str) -> None:
    """A stage that is launched alone keeps its roles."""
    module, x = two_layers()
    report, model, workers = emulated(
        driver, tmp_path, module, (x,), "sm_90a", precision="fp16", launches=launches,
    )  # fmt: skip
    assert report.launches == launches
    assert any(has_roles(program.source) for program, _ in workers.programs.values())
    with model:
        assert any(stage["schedule"].get(ROLES) == PRODUCER for stage in model.stages)
        assert model.launches.startswith(launches)
        (got,) = outputs(model, workers, {model.inputs[0].name: x.numpy()}).values()
    wanted = module.double()(x.double()).detach().numpy()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-3 * np.abs(wanted).max())


@pytest.mark.usefixtures("cheap")
def test_no_persistent_kernel_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a stage is replaced by a kernel without roles. If there is none, the persistent kernel
    is refused.
    """
    module, x = two_layers()
    _, built, workers = prepared(tmp_path, module, (x,), HOPPER, precision="fp16")
    kernels: Any = built.generated.kernels
    assert any(has_roles(kernel.source) for kernel in kernels.values())
    found = persistent(built.generated, 2, TARGET, workers)  # type: ignore[arg-type]
    assert not isinstance(found, Rejection)
    assert not has_roles(workers.persistent[found[0].symbol].source)
    monkeypatch.setattr(gtco.driver.linking.persistent, "narrow", lambda policy, pick, _: pick)
    refused = persistent(built.generated, 2, TARGET, workers)  # type: ignore[arg-type]
    assert isinstance(refused, Rejection) and refused.reason == "warp roles"
