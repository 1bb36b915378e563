"""One persistent kernel for a whole model: its results, the number of its blocks, and that each of
its barriers is needed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import GpuKernel, Job
from gtco.codegen.nvrtc import compile_cuda
from gtco.driver.linking.assembly import assemble
from gtco.driver.linking.persistent import persistent
from gtco.machine.gpu import gpu_target
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.search.gpu.launches import MOST_THREADS, narrow
from gtco.search.gpu.policy import GpuPolicy
from gtco.tensor.cuda.persistent import (
    MOST_POINTERS,
    MOST_TENSORS,
    RESERVED,
    persistent_program,
)
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch.rows import cuda as rows
from gtco.tensor.space import Config, Option, Pick, Rejection, build, configs
from models.export import export_onnx
from tests.cuda.compiling import Compiling, Once, persistent_kernel
from tests.cuda.emulated_objects import DEVICE, Fault
from tests.cuda.models.test_whole_models import CASES as WHOLE
from tests.cuda.sketch.test_attention import MODELS, matched
from tests.cuda.sketch.test_rows import normalised
from tests.cuda.walk import walk
from tests.cuda.whole import Emulating, prepared
from tests.models.test_models import TINY, seeded

CASES = [case for case in WHOLE if case[2] != "bf16"]  # the suite runs the first one
BLOCKS = (1, 2, 5)


@cache
def made(name: str, arch: str, precision: str) -> tuple[Any, GpuArtifact, CudaProgram]:
    """The model, its artifact with its persistent kernel, and the program of that kernel."""
    create, (_, *shape) = TINY[name]
    torch.manual_seed(0)
    model, x = seeded(create()), torch.randn(1, *shape)
    with TemporaryDirectory() as folder:
        target = f"cuda:{arch}"
        _, built, workers = prepared(Path(folder), model, (x,), target, precision=precision)
    found = persistent(built.generated, 2, gpu_target(target), workers)  # type: ignore[arg-type]
    assert not isinstance(found, Rejection), found
    graph, generated, machine = built.model.graph, built.generated, gpu_target(target)
    artifact = assemble("m", graph, generated, machine, 0, precision, [], found[0], None, {}, "")
    assert isinstance(artifact, GpuArtifact)
    return (model, x), artifact, workers.persistent[found[0].symbol]


@pytest.mark.parametrize(
    ("name", "arch", "precision", "tolerance"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.scheduled) for case in CASES[1:])],
)
def test_models(tmp_path: Path, name: str, arch: str, precision: str, tolerance: float) -> None:
    (model, x), artifact, program = made(name, arch, precision)
    export_onnx(model, (x,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    wanted = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    generation = 10 * gpu_target(f"cuda:{arch}").generation
    given = {artifact.inputs[0].name: x.numpy()}
    for blocks in BLOCKS:
        found = walk(artifact, program, given, blocks=blocks, arch=generation)
        for array, right in zip(found.values(), wanted, strict=True):
            error = np.abs(array - right).max() / np.abs(right).max()
            assert error <= tolerance, f"{name} {arch} {precision}, {blocks} blocks: {error:.2g}"


def test_the_kernel_has_what_its_stages_have_at_most() -> None:
    _, artifact, program = made(*CASES[0][:3])
    kernel = artifact.persistent
    assert kernel is not None
    threads = [step.threads for step in artifact.steps]
    assert min(threads) < kernel.threads == program.threads, "some are left idle"
    assert program.threads == min(max(threads), MOST_THREADS)
    assert kernel.shared == RESERVED + max(step.shared for step in artifact.steps)
    assert set(kernel.kernels) == {step.kernel for step in artifact.steps}
    assert max(step.grid[0] for step in artifact.steps) > BLOCKS[1], "a block has several tasks"
    for step, (place, nbytes) in zip(artifact.steps, kernel.prefetches, strict=True):
        if nbytes:
            ref = step.buffers[place]
            assert ref.kind == "weight" and ref.index + nbytes <= artifact.weights_bytes
    assert sum(nbytes > 0 for _, nbytes in kernel.prefetches) > len(artifact.steps) / 2


def test_a_stage_of_many_threads_has_fewer_in_it(tmp_path: Path) -> None:
    """With so many threads, all stages would have half of the registers. The stage's own kernel
    keeps them.
    """
    target, layer = gpu_target("cuda:sm_80"), torch.nn.LayerNorm(64)
    x = torch.randn(150, 64)
    _, built, workers = prepared(tmp_path, layer, (x,), "cuda:sm_80")
    (stage,) = built.generated.stages
    sketch: Any = built.generated.choices[stage.key].sketch
    wide = next(c for c in configs(sketch) if sketch.workload(c).threads > MOST_THREADS)
    built.generated.choices[stage.key] = Pick(sketch, wide, 1e-6)
    (wider,) = workers.build([Job(f"gtco_{stage.key}", stage.canonical, wide, target)])
    assert isinstance(wider, GpuKernel)
    built.generated.kernels[stage.key] = wider
    found = persistent(built.generated, 2, target, workers)  # type: ignore[arg-type]
    assert not isinstance(found, Rejection), found
    kernel = found[0]
    assert kernel.threads <= MOST_THREADS < wider.threads
    assert kernel.tasks[0] > wider.grid[0]
    graph, generated = built.model.graph, built.generated
    artifact = assemble("m", graph, generated, target, 0, "fp32", [], kernel, None, {}, "")
    assert isinstance(artifact, GpuArtifact) and artifact.steps[0].threads == wider.threads
    program = workers.persistent[kernel.symbol]
    answer = walk(artifact, program, {artifact.inputs[0].name: x.numpy()}, blocks=2, arch=800)
    wanted = layer(x).detach().numpy()
    assert np.abs(next(iter(answer.values())) - wanted).max() <= 1e-5
    fewer = {c for c in configs(sketch) if sketch.workload(c).threads <= MOST_THREADS}
    policy, pick = GpuPolicy(target), built.generated.choices[stage.key]
    first = narrow(policy, pick)
    assert narrow(policy, pick, {first.config}).config in fewer - {first.config}
    built.generated.wrong = {stage.key: fewer}  # all were measured to compute something else
    found = persistent(built.generated, 2, target, workers)  # type: ignore[arg-type]
    assert not isinstance(found, Rejection) and found[0].threads == wider.threads


@pytest.mark.parametrize("spilling", [("sm_80",), ("sm_80", "sm_90a")])
def test_where_it_spills_it_has_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilling: tuple[str, ...]
) -> None:
    target = "cuda:sm_80,sm_90a"
    _, built, workers = prepared(tmp_path, torch.nn.Linear(64, 32), (torch.zeros(1, 64),), target)
    build = workers.build

    def spilled(jobs: Any) -> Any:
        for kernel in build(jobs):
            assert isinstance(kernel, GpuKernel)
            images = {a: replace(i, spills=8 * (a in spilling)) for a, i in kernel.images.items()}
            yield replace(kernel, images=images)

    monkeypatch.setattr(workers, "build", spilled)
    found = persistent(built.generated, 2, gpu_target(target), workers)  # type: ignore[arg-type]
    assert not isinstance(found, Rejection), found
    assert {arch for arch, cubin in found[0].images.items() if not cubin} == set(spilling)
    assert found[0].info["spilled_bytes"] == {a: 8 * (a in spilling) for a in found[0].images}


# Each thread keeps 300 sums and uses them in turn; printed like a stage's kernel.
HUNGRY = """// more than there are registers
extern "C" __global__ void __launch_bounds__(256) {symbol}(
    const float* __restrict__ x,
    float* __restrict__ y) {{
  const int block = blockIdx.x;
  float sums[300];
#pragma unroll
  for (int i = 0; i < 300; ++i) sums[i] = x[(block * 300 + i) * 256 + threadIdx.x];
  for (int j = 0; j < block; ++j)
#pragma unroll
    for (int i = 0; i < 300; ++i) sums[i] = sums[i] * x[j * 300 + i] + sums[(i + 7) % 300];
#pragma unroll
  for (int i = 0; i < 300; ++i) y[(block * 300 + i) * 256 + threadIdx.x] = sums[i];
}}
"""


@pytest.mark.parametrize("hungry", [False, True])
def test_a_stage_that_no_registers_hold_leaves_it_without_an_image(
    tmp_path: Path, compiling: Compiling, hungry: bool
) -> None:
    """As ptxas reports it."""
    layer, target = torch.nn.LayerNorm(64), "cuda:sm_80"
    _, built = Once(layer, (torch.zeros(150, 64),)).compiled(tmp_path, target, compiling)
    ((key, kernel),) = built.generated.kernels.items()
    assert isinstance(kernel, GpuKernel) and kernel.threads <= MOST_THREADS
    if hungry:
        text = HUNGRY.format(symbol=kernel.symbol)
        built.generated.kernels[key] = replace(kernel, source=text, threads=256)
    found = persistent_kernel(built, compiling)
    assert bool(found.info["spilled_bytes"]["sm_80"]) == hungry
    assert bool(found.images["sm_80"]) != hungry


# Stages whose threads keep values that they read under conditions: the end of a row, q's fragments,
# and the scores of a warp that has rows and keys.
CONDITIONAL: dict[str, tuple[Any, dict[str, Option]]] = {
    "rows": (
        rows.match(normalised("layer_norm", (49, 96), "float16"), gpu_target("cuda:sm_80")),
        {"vector": 4, "threads": 16},
    ),
    "attention": (matched(MODELS["swin"]), {"query": "registers", "split": 2}),
}


@pytest.mark.parametrize("name", CONDITIONAL)
def test_a_stage_keeps_no_register_while_others_run(name: str) -> None:
    """Eight equal stages need as many registers as two. A variable that a stage does not always
    write would be alive from the first step of the walk on, and would take registers of its own for
    each stage.
    """
    sketch, fixed = CONDITIONAL[name]
    config = next(c for c in configs(sketch) if fixed.items() <= c.by_name.items())
    few, many = (
        compile_cuda(persistent_program("model", _alike(sketch, config, n)).source, "sm_80")
        for n in (2, 8)
    )
    assert many.registers <= few.registers + 4 and not many.spills


def _alike(sketch: Any, config: Config, number: int) -> dict[str, CudaProgram]:
    programs: dict[str, CudaProgram] = {}
    for symbol in (f"gtco_{i}" for i in range(number)):
        made = build(sketch, config, symbol)
        assert isinstance(made, CudaProgram), made
        programs[symbol] = made
    return programs


def test_no_more_is_fetched_ahead_than_l2_keeps(tmp_path: Path) -> None:
    layer = torch.nn.Linear(64, 32)
    target = gpu_target("cuda:sm_80")
    _, built, workers = prepared(tmp_path, layer, (torch.zeros(1, 64),), "cuda:sm_80")
    for l2, wanted in ((target.l2, 4 * 64 * 32), (6000, 3000)):
        found = persistent(built.generated, 2, replace(target, l2=l2), workers)  # type: ignore[arg-type]
        assert not isinstance(found, Rejection), found
        assert max(nbytes for _, nbytes in found[0].prefetches) == wanted


# The parts taken out of persistent.cuh, and the number of blocks with which the fault shows.
LACKING = {
    "the wait for other blocks": (
        "if (whole_warp(mine < 32)) grid_wait(&barrier->word, ticket);",
        2,
    ),
    "the block's own barrier ahead of that": ("sync_all();  // the block has done", 2),
    "the block's own barrier behind that": ("sync_all();  // its buffers are there", 2),
    "the barrier between tasks": ("if (block + int(gridDim.x) < blocks) rejoin<THREADS>();", 1),
}


@pytest.mark.parametrize("what", LACKING)
def test_every_barrier_is_needed(what: str) -> None:
    line, blocks = LACKING[what]
    (_, x), artifact, program = made(*CASES[0][:3])
    header = (DEVICE / "gtco" / "persistent.cuh").read_text()
    include = '#include "gtco/persistent.cuh"\n'
    assert header.count(line) == program.source.count(include) == 1
    lacking = header.replace(line, line[line.find("//") :] if "//" in line else "")
    program = replace(program, source=program.source.replace(include, lacking))
    with pytest.raises(Fault, match=r"race|never written"):
        walk(artifact, program, {artifact.inputs[0].name: x.numpy()}, blocks=blocks, arch=800)


def test_what_cannot_be_is_said() -> None:
    none = Generated([])
    found = persistent(none, 2, gpu_target("cuda:sm_80"), Emulating(Path()))  # type: ignore[arg-type]
    assert isinstance(found, Rejection) and "without a step" in found.detail


def test_the_header_says_the_same() -> None:
    text = (DEVICE / "gtco" / "persistent_tables.cuh").read_text()
    for name, value in (("MOST_TENSORS", MOST_TENSORS), ("MOST_POINTERS", MOST_POINTERS)):
        assert re.search(rf"constexpr int {name} = {value};", text)
    assert f"GTCO_RESERVED {RESERVED} " in (DEVICE / "gtco" / "device.cuh").read_text()
