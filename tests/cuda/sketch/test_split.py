"""Tiles of products that several blocks share, each with a part of k: against float64, whichever
block comes last; the purpose of each of their fences and barriers; their machine code.

The emulator runs blocks one after another in a drawn order (the blocks of a persistent kernel are
all alive and run one at a time). It checks what a block reads of others against the tickets that
were taken between. It does not show what a GPU's caches would do without the fence; the fence is an
instruction, and the tests look for it in the machine code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from gtco.codegen.cuda import gpu_code
from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Record, Records
from gtco.tensor import space
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.gemm import cuda as gemm
from gtco.tensor.sketch.gemm import cuda_tiles as gemm_tiles
from gtco.tensor.space import Config, Pick, configs
from gtco.tensor.stage import Stage
from gtco.tuning.offline import measure
from tests.cuda.emulate import emulate, faults_of, run_stage
from tests.cuda.emulated_objects import DEVICE, Fault
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.runtime.test_candidates import Breaking, bundled
from tests.cuda.sketch.test_gemm import ROUNDED, N, T, chain, conv, dense, inputs, sketch_of, wide
from tests.cuda.sketch.test_gemm_groups import HOPPER, ROW, by_groups
from tests.cuda.whole import Emulating, emulated, outputs
from tests.kernels import assert_close, fresh_seed, reference
from tests.models.test_models import TINY, seeded

Force = Callable[[int], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Makes this number of blocks share every tile, however few tiles there are. A tile with fewer
    slices of k has one block for each slice.
    """

    def split(blocks: int) -> None:
        monkeypatch.setattr(
            gemm, "split_options", lambda tiles, target: (min(blocks, tiles.slices),)
        )

    return split


@pytest.fixture
def force_small(force: Force, monkeypatch: pytest.MonkeyPatch) -> Force:
    """As ``force``, also for small models, whose k is at most 64."""
    monkeypatch.setattr(gemm_tiles, "DEPTHS", (16,))
    return force


def measured(driver: FakeDriver, workers: Emulating) -> tuple[Path, list[Record]]:
    """The candidates that these workers built, and their results on a GPU elsewhere."""
    path = bundled(workers.path.parent, workers)
    driver.reset(1, 8, 0, 1)
    return path, measure(path, rounds=2)


STAGES = {  # with how many blocks share a tile
    "odd": (dense(13, 37, 145, "float16"), 2),
    "rounded": (dense(13, 37, 200, "bfloat16", out="bfloat16"), 3),
    "float32": (dense(21, 40, 133, "float32"), 3),
    "computed": (dense(19, 40, 147, "float16", constant=False), 4),
    "batches": (
        chain({"x": N(3, 10, 72), "b": N(3, 72, 16)}, ("matmul", "x b", "y", T(3, 10, 16), {})),
        2,
    ),
    "dressed": (
        chain(
            {"x": T(17, 104), "w": N(104, 40), "bias": T(40), "r": T(40, 17)},
            ("cast", "x", "h", N(17, 104), {}),
            ("matmul", "h w", "c", T(17, 40), {}),
            ("add", "c bias", "d", T(17, 40), {}),
            ("gelu", "d", "g", T(17, 40), {}),
            ("permute", "g", "t", T(40, 17), {"axes": (1, 0)}),
            ("add", "t r", "y", T(40, 17), {}),
        ),
        3,
    ),
    "conv3x3": (conv(6, 16, 24, 3, "float16"), 4),
    "conv3x3_odd": (conv(7, 5, 11, 3, "bfloat16"), 2),
}


def split_config(stage: Stage, target: str = "cuda:sm_80") -> tuple[Any, space.Config]:
    """A config with the smallest tile: the first whose blocks get uneven parts of k, or the first
    of all if there is none.
    """
    sketch = sketch_of(stage, target)
    of_space = [c for c in configs(sketch) if c["split"] != 1]
    uneven = [c for c in of_space if sketch.tiles(c.by_name).slices % int(c["split"])]
    return sketch, (uneven or of_space)[0]


@pytest.mark.parametrize("name", STAGES)
def test_products(name: str, force: Force) -> None:
    """The same bits, in whatever order blocks come."""
    stage, blocks = STAGES[name]
    force(blocks)
    sketch, config = split_config(stage)
    assert int(config["split"]) > 1
    seed = fresh_seed()
    arrays = inputs(stage, seed)
    found = [run_stage(sketch, config, arrays, seed=seed + n) for n in range(3)]
    assert_close(found[0], reference(stage, list(map(wide, arrays))), tolerance(stage))
    assert all(np.array_equal(found[0], other) for other in found[1:])


GROUPS = {
    "odd": (dense(70, 45, 328, "float16"), 3),
    "rounded": (dense(129, 67, 200, "bfloat16", out="bfloat16"), 4),  # one slice each
    "conv3x3": (conv(9, 16, 40, 3, "float16"), 2),
}


@pytest.mark.parametrize("name", GROUPS)
def test_products_of_warp_groups(
    name: str, force: Force, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drawn config: the products that are in flight are those of one part of k."""
    stage, blocks = GROUPS[name]
    force(blocks)
    seed = fresh_seed()
    sketch = sketch_of(stage, HOPPER)
    config = Random(seed).choice(by_groups(sketch, monkeypatch))
    assert int(config["split"]) == blocks
    arrays = inputs(stage, seed)
    found = [run_stage(sketch, config, arrays, seed=seed + n) for n in range(3)]
    assert_close(found[0], reference(stage, list(map(wide, arrays))), tolerance(stage))
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_machine_code_of_warp_groups(columns: int) -> None:
    """The compiler puts no barriers between products, and spills nothing."""
    target = gpu_target(HOPPER)
    sketch = sketch_of(dense(197, 768, 3072, "float16"), target)
    splitting = [c for c in configs(sketch, {"row": ROW.format(columns)}) if c["split"] != 1]
    config = Random(columns).choice(splitting)
    program = space.build(sketch, config, "product")
    assert isinstance(program, CudaProgram) and program.counters
    image = compile_cuda(program.source, "sm_90a")
    assert not image.spills and not image.local and "serialized" not in image.log, image.log
    assert image.registers * program.threads <= target.registers_sm
    code = machine_code(image.cubin)["product"]
    assert code.count("HGMMA") >= 4 and not code.spilled
    assert sum(c for n, c in code.instructions.items() if n.startswith("ATOM")) == 1


def tolerance(stage: Stage) -> float:
    computed = {"cast", "gelu"} <= {op.kind for op in stage.operators}
    return 1e-3 if computed else ROUNDED[stage.output.type.dtype]


def test_before_asynchronous_copies(force: Force) -> None:
    force(3)
    stage = STAGES["odd"][0]
    sketch, config = split_config(stage, "cuda:sm_75")
    arrays = inputs(stage, fresh_seed())
    found = run_stage(sketch, config, arrays)
    assert_close(found, reference(stage, list(map(wide, arrays))), tolerance(stage))


def split_program(name: str) -> tuple[CudaProgram, list[np.ndarray], np.ndarray]:
    stage = STAGES[name][0]
    sketch, config = split_config(stage)
    program = space.build(sketch, config, "kernel")
    assert isinstance(program, CudaProgram)
    arrays = [
        program.packings[i.name].apply(a) if i.name in program.packings else a
        for i, a in zip(stage.inputs, inputs(stage, 1), strict=True)
    ]
    return program, arrays, np.empty([int(d) for d in stage.output.type.shape], np.float32)


# The parts taken out of gemm.cuh or changed there, and the fault that is found.
LACKING = {
    "the barrier ahead of the ticket": (
        "meet();  // all of the block's are there",
        "  // all of",
        "race: reads byte .* that block",
    ),
    "the barrier behind it": (
        "*before = take_ticket(of_tile.done + block, BLOCKS);\n    meet();",
        "*before = take_ticket(of_tile.done + block, BLOCKS);",
        "race: .* byte .* of shared memory|never written",
    ),
    "the question who is last": (
        "if (whole_warp(*before != BLOCKS - 1)) return;",
        "",
        "never written",
    ),
    "an order": (
        "*before = take_ticket(of_tile.done + block, BLOCKS);",
        "*before = BLOCKS - 1;",
        "race: .* that block|never written",
    ),
    "a ticket": (
        "*before = take_ticket(of_tile.done + block, BLOCKS);",
        "*before = of_tile.done[block]++;",
        "reads a counter",
    ),
    "the counter's way back": (
        "take_ticket(of_tile.done + block, BLOCKS);",
        "take_ticket(of_tile.done + block, BLOCKS + 1);",
        r"counter \d+ is not zero",
    ),
}


@pytest.mark.parametrize("what", LACKING)
def test_every_part_of_it_is_needed(what: str, force: Force) -> None:
    force(2)
    program, arrays, out = split_program("odd")
    text, instead, message = LACKING[what]
    header = (DEVICE / "gtco" / "gemm.cuh").read_text()
    include = '#include "gtco/gemm.cuh"\n'
    assert header.count(text) == program.source.count(include) == 1
    source = program.source.replace(include, header.replace(text, instead))
    with pytest.raises(Fault, match=message):
        emulate(replace(program, source=source), "kernel", arrays, out)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_machine_code(arch: str, dtype: str) -> None:
    """The second product of ViT-B's MLP, with the best of its configs that split: Tensor Cores, no
    spills, and one atomic with its fences.
    """
    target = gpu_target(f"cuda:{arch}")
    sketch = sketch_of(dense(197, 768, 3072, dtype), target)
    config = next(c for c in GpuPolicy(target).compared(sketch)[0] if c["split"] != 1)
    program = space.build(sketch, config, "product")
    assert isinstance(program, CudaProgram)
    assert program.counters and program.grid[0] == program.counters * int(config["split"])
    images = gpu_code(program, target)
    assert not isinstance(images, space.Rejection)
    image = images[arch]
    assert not image.spills and not image.local
    assert image.registers * program.threads <= target.registers_sm
    code = machine_code(image.cubin)["product"]
    assert (code.tensor_core > 0) == (dtype == "float16") and not code.spilled
    tickets = {n: c for n, c in code.instructions.items() if n.startswith("ATOM")}
    assert sum(tickets.values()) == 1 and all("INC" in n and "GPU" in n for n in tickets), tickets
    assert any(n.startswith("MEMBAR") for n in code.instructions)
    assert any(n.startswith("CCTL.IVALL") for n in code.instructions), "what L1 has is out of date"


def test_a_whole_model(driver: FakeDriver, tmp_path: Path, force_small: Force) -> None:
    """All of its products are split. Every run gives the same bits, as a graph and as the
    persistent kernel, although scratch and counters are as earlier runs left them.
    """
    force_small(3)
    create, (_, *shape) = TINY["vit"]
    torch.manual_seed(0)
    model, x = seeded(create()), torch.randn(1, *shape)
    report, loaded, workers = emulated(
        driver, tmp_path, model, (x,), "sm_80", precision="fp16", launches="persistent"
    )
    split = [s for s in report.stages if s["schedule"].get("split", 1) > 1]
    assert len(split) > 3
    loaded.close()
    given = {loaded.inputs[0].name: x.numpy()}
    found = []
    for launches in ("graph", "persistent"):
        with load(tmp_path / "model.so", launches=launches) as opened:  # type: ignore[arg-type]
            assert opened.launches.startswith(launches)
            found += [outputs(opened, workers, given) for _ in range(3)]
    wanted = model(x).detach().numpy()
    for run in found:
        for name, array in run.items():
            assert np.array_equal(array, found[0][name])
            assert np.abs(array - wanted).max() <= 2e-3 * np.abs(wanted).max()
    driver.check()


def test_candidates_for_a_gpu_elsewhere(
    driver: FakeDriver, tmp_path: Path, force_small: Force
) -> None:
    """They share scratch and counters, and agree."""
    force_small(2)
    workers = Emulating(tmp_path / "kernels.so")
    _, found = measured(driver, workers)
    assert any(program.counters for program, _ in workers.programs.values())
    assert found and all(r.outcome != "wrong" for r in found)
    assert not faults_of(workers.path.resolve())
    driver.check()


def test_both_ways_are_measured() -> None:
    """If all promising configs split, the best one that does not is measured beside them."""
    policy, stage = GpuPolicy(gpu_target("cuda:sm_80")), dense(197, 768, 3072, "float16")
    pick = policy.choose(stage)
    assert pick is not None and policy.propose(stage, 1) == [pick.config]
    unsplit = (c for c in policy.compared(pick.sketch)[0] if c["split"] == 1)
    best = next(unsplit)
    for n in (2, 6):
        proposed = policy.propose(stage, n)
        assert proposed[0] == pick.config and proposed[-1] == best and len(set(proposed)) == n
        assert all(config["split"] != 1 for config in proposed[:-1])
        prices = [policy.price(pick.sketch, config) for config in proposed]
        assert prices == sorted(prices)


def test_a_faulty_candidate_harms_no_other(
    driver: FakeDriver, tmp_path: Path, force_small: Force
) -> None:
    """In two stages one candidate leaves out a block, so the counter of its tile never returns to
    zero.
    """
    force_small(2)
    workers = Breaking(tmp_path / "kernels.so")
    path, found = measured(driver, workers)
    broken = [workers.programs[f"gtco_{key}_{n}"][0] for key, n in workers.broken.items()]
    assert len(broken) == 2 and any(program.counters for program in broken)
    wrong = {(r.stage, r.config) for r in found if r.outcome == "wrong"}
    steps = [s for s in read_metadata(path)["steps"] if s["rival"] is not None]
    assert wrong == {
        (s["key"], json.dumps(s["schedule"]))
        for s in steps
        if workers.broken.get(s["key"]) == s["rival"]
    }


@pytest.mark.parametrize("outcome", ["kept", "wrong", "other"])
def test_records_of_before(tmp_path: Path, outcome: str) -> None:
    """Old records do not name splits, which means one block for each tile."""
    policy = GpuPolicy(gpu_target("cuda:sm_80"))
    stage = dense(197, 768, 3072, "float16")
    best = policy.choose(stage)
    assert best is not None
    of_stage = space_of(stage, policy.target)
    before = next(c for c in configs(best.sketch) if c["split"] == 1)
    pick = Pick(best.sketch, before, policy.price(best.sketch, before))
    kept = Record.of(stage, pick, "there", "kept" if outcome == "other" else outcome)  # type: ignore[arg-type]
    said = {name: value for name, value in before.to_json().items() if name != "split"}
    if outcome == "other":
        said["block"] = "48x48x48"
    assert of_stage.check(Config.from_json(said)) is not None
    with Records(tmp_path / "records") as records:
        records.add([replace(kept, config=json.dumps(said))])
        recorded = RecordedPolicy(policy, records, "there")
        chosen = recorded.choose(stage)
        assert chosen is not None
        if outcome == "kept":
            assert chosen.config == before and not recorded.passed_over
        elif outcome == "other":
            assert chosen == best
            (note,) = recorded.passed_over.values()
            assert stage.key in note and "block='48x48x48' is none of the options" in note
        else:
            assert {r.parsed for r in recorded.known(stage)} == {before}


def test_the_policy_splits_where_that_fills_the_gpu() -> None:
    """It splits the second product of ViT-B's MLP, but not with 32 images."""
    target = gpu_target("cuda:sm_90a")
    policy = GpuPolicy(target)
    one, many = (sketch_of(dense(rows, 768, 3072, "float16"), target) for rows in (197, 6304))
    picked, seconds = policy.compared(one)
    unsplit = [s for c, s in zip(picked, seconds, strict=True) if c["split"] == 1]
    assert int(picked[0]["split"]) > 1 and seconds[0] < 0.95 * min(unsplit)
    assert one.tiles(picked[0].by_name).tiles < target.sms
    assert policy.compared(many)[0][0]["split"] == 1
    assert all(c["split"] == 1 or many.tiles(c.by_name).tiles < target.sms for c in configs(many))
