"""Contractions by warp groups (wgmma, sm_90a): emulated against float64, and their machine code."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.machine.gpu import gpu_target
from gtco.search.gpu.policy import GpuPolicy, occupancy
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Record, Records
from gtco.tensor.cuda.persistent import persistent_program
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.tensor_core import EMITTED_COLUMNS
from gtco.tensor.sketch.gemm import cuda as gemm
from gtco.tensor.sketch.gemm.cuda import CudaGemm
from gtco.tensor.space import Config, build, configs
from gtco.tensor.stage import Stage
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sketch.test_gemm import STAGES, N, T, chain, check, conv, dense, sketch_of
from tests.cuda.whole import emulated, outputs
from tests.kernels import fresh_seed
from tests.models.test_models import seeded

HOPPER = "cuda:sm_90a"
ROW = "wgmma.m64n{}k16"
SMALL = {
    "odd": dense(101, 45, 72, "float16"),
    "stored_rounded": dense(70, 100, 136, "bfloat16", out="bfloat16"),
    "one_slice": dense(64, 32, 40, "float16"),
    "four_slices": dense(50, 33, 200, "bfloat16"),
    "dressed": STAGES["dressed"],
    "stored_by_heads": STAGES["stored_by_heads"],
    "stored_across": STAGES["stored_across"],
    "stored_across_in_runs": STAGES["stored_across_in_runs"],
    "transposed": STAGES["transposed"],
    "heads": STAGES["heads"],
    "batches_of_both": chain(
        {"x": N(2, 1, 3, 7, 16), "b": N(1, 4, 3, 9, 16)},
        ("permute", "b", "t", N(1, 4, 3, 16, 9), {"axes": (0, 1, 2, 4, 3)}),
        ("matmul", "x t", "y", T(2, 4, 3, 7, 9), {}),
    ),
    "conv1x1": conv(5, 16, 24, 1, "float16"),
    "conv3x3": conv(6, 16, 24, 3, "float16"),
    "strided": conv(9, 8, 17, 3, "bfloat16", strides=(2, 1)),
}
LEFT = ("computed", "rounded_in_front", "float32", "stem", "normalised_in_front", "batches",
        "transposed_a", "grouped_odd")  # fmt: skip


def by_groups(sketch: CudaGemm, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Every config of warp groups, however much of a small product it wastes."""
    monkeypatch.setattr(gemm, "WASTE", 1e9)
    rows = [name for name in sketch.rows if name.startswith("wgmma")]
    return [c for name in rows for c in configs(sketch, {"row": name})]


@pytest.mark.parametrize("stage", SMALL.values(), ids=SMALL)
def test_products(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a config that is drawn."""
    seed = fresh_seed()
    sketch = sketch_of(stage, HOPPER)
    drawn = Random(seed).choice(by_groups(sketch, monkeypatch))
    report = check(sketch, drawn, seed)
    assert not report.conflicts


@pytest.mark.parametrize("columns", EMITTED_COLUMNS)
def test_every_tile(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all columns, with one and two groups, and each number of slices in turn."""
    seed = fresh_seed()
    sketch = sketch_of(dense(129, columns + 5, 328, "float16"), HOPPER)
    found = [c for c in by_groups(sketch, monkeypatch) if c["row"] == ROW.format(columns)]
    seen = {(str(c["block"]).split("x")[0], c["stages"]) for c in found}
    assert {rows for rows, _ in seen} == {"64", "128", "192"} and {s for _, s in seen} >= {3, 4}
    drawn = Random(seed).choice(found)
    check(sketch, drawn, seed)


@pytest.mark.parametrize("name", LEFT)
def test_what_does_not_lie_along_k_is_left_to_warps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not by_groups(sketch_of(STAGES[name], HOPPER), monkeypatch)


def test_other_architectures_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("cuda:sm_80", "cuda:sm_90a,sm_80"):
        assert not by_groups(sketch_of(STAGES["dense"], target), monkeypatch)


LARGE = {
    "feed_forward": dense(197, 3072, 768, "bfloat16", out="bfloat16"),
    "many_rows": dense(6304, 2304, 768, "float16", out="float16"),
    "convolution": conv(28, 128, 128, 3, "float16"),
}


@pytest.mark.parametrize("stage", LARGE.values(), ids=LARGE)
def test_machine_code(stage: Stage) -> None:
    """One config for each number of columns. The compiler put no barriers between the products of
    warp groups, nothing is spilled, and there are as many registers as the policy expected.
    """
    target = gpu_target(HOPPER)
    sketch = sketch_of(stage, target)
    rows = [name for name in sketch.rows if name.startswith("wgmma")]
    assert len(rows) >= 3
    for name in rows:
        config = Random(name).choice(list(configs(sketch, {"row": name})))
        program = build(sketch, config, "product")
        assert isinstance(program, CudaProgram)
        image = compile_cuda(program.source, "sm_90a")
        assert not image.spills and not image.local and "serialized" not in image.log, image.log
        code = machine_code(image.cubin)["product"]
        assert code.count("HGMMA") >= 4 and code.count("HMMA") == 0 and not code.spilled
        assert code.count("LDGSTS") > 0 == code.count("LDSM")
        launch = sketch.workload(config)
        used = replace(launch, registers=image.registers)
        found, reckoned = (occupancy(of, target).blocks for of in (used, launch))
        assert found >= reckoned > 0, (config.to_json(), image.registers, launch.registers)


def test_a_large_product_is_theirs() -> None:
    """An H200 confirmed both what they compute and that they are faster than ``mma.sync``."""
    stage, policy = LARGE["many_rows"], GpuPolicy(gpu_target(HOPPER))
    pick = policy.choose(stage)
    assert pick is not None and str(pick.config["row"]).startswith("wgmma")
    assert pick.seconds == policy.price(pick.sketch, pick.config)
    assert pick.seconds >= policy.floor(stage.operators[0], stage.types), "no bound is above it"
    proposed = policy.propose(stage, 8)
    assert proposed[0] == pick.config and len(set(proposed)) == 8
    assert policy.propose(stage, 1) == [pick.config]


def test_none_of_them_takes_the_place_of_a_pick_that_was_wrong(tmp_path: Path) -> None:
    """A config that is only proposed because it works differently does not replace it either. The
    next best does.
    """
    stage, policy = LARGE["feed_forward"], GpuPolicy(gpu_target(HOPPER))
    found = policy.best(stage, 4)
    assert found[0] == policy.choose(stage)
    with Records(tmp_path / "records") as records:
        recorded = RecordedPolicy(policy, records, "there")
        for wrong, right in pairwise(found):
            records.add([Record.of(stage, wrong, "there", "wrong")])
            recorded.observe()
            assert recorded.choose(stage) == right


@pytest.mark.parametrize("launches", ["graph", "persistent"])
def test_a_model_by_warp_groups(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: str
) -> None:
    """The policy may pick them and finds them cheap. This includes one kernel for the whole model,
    whose shared memory does not begin where swizzled tiles must.
    """
    seconds = GpuPolicy.seconds

    def cheap(policy: GpuPolicy, launch: Launch, constants: float = 0.0) -> float:
        found = seconds(policy, launch, constants)
        return found / 10 if launch.unit.startswith("wgmma") else found

    monkeypatch.setattr(GpuPolicy, "seconds", cheap)
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 90)
    module, x = seeded(torch.nn.Sequential(*layers)), torch.randn(120, 64)
    report, model, workers = emulated(
        driver, tmp_path, module, (x,), "sm_90a", precision="fp16", launches=launches,
    )  # fmt: skip
    texts = [program.source for program, _ in workers.programs.values()]
    assert any("gtco::WarpGroups" in text for text in texts)
    assert report.launches == launches
    with model:
        rows = [stage["schedule"].get("row", "") for stage in model.stages]
        assert any(str(row).startswith("wgmma") for row in rows), rows  # as gtco inspect shows
        (got,) = outputs(model, workers, {model.inputs[0].name: x.numpy()}).values()
    wanted = module.double()(x.double()).detach().numpy()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-3 * np.abs(wanted).max())


def test_machine_code_of_one_kernel_for_all() -> None:
    """A stage of warp groups beside one of warps, as in the persistent kernel."""
    target, programs = gpu_target(HOPPER), {}
    for symbol, row in (("gtco_0", ROW.format(128)), ("gtco_1", "mma.m16n8k16")):
        sketch = sketch_of(LARGE["feed_forward"], target)
        made = build(sketch, next(configs(sketch, {"row": row})), symbol)
        assert isinstance(made, CudaProgram)
        programs[symbol] = made
    image = compile_cuda(persistent_program("all", programs).source, "sm_90a")
    assert not image.spills and "serialized" not in image.log, image.log
    assert machine_code(image.cubin)["all"].count("HGMMA") >= 4
