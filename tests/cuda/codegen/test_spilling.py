"""A pick whose kernel spills is replaced by one of the stage's next-best configs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gtco.codegen.generate import Generated, generate
from gtco.codegen.jobs import Failure, GpuKernel, Job, Kernel
from gtco.codegen.nvrtc import Image
from gtco.codegen.spilling import spilled
from gtco.machine.gpu import gpu_target
from gtco.search.gpu import stand_ins as search
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.gpu.stand_ins import SLOWER, TRIED, stand_ins
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Records
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.cuda.compiling import Compiling
from tests.cuda.sketch.test_gemm_images import STAGES

TARGET = gpu_target("cuda:sm_80,sm_90a")
STAGE = make_stage(
    [Operator("relu", ("x",), "y", TensorType((4, 8)))], {"x": TensorType((4, 8))}, []
)


def pick(number: int, registers: int = 0, seconds: float = 1.0) -> Pick:
    """A pick whose config is a number, with so many expected registers."""
    sketch: Any = SimpleNamespace(
        name="fake", workload=lambda config: SimpleNamespace(registers=registers)
    )
    return Pick(sketch, Config("fake", (("number", number),)), seconds)


class Builder:
    """Workers whose kernels spill as ``spills`` says, by the config's number and the
    architecture.
    """

    def __init__(self, spills: dict[int, tuple[int, int]], broken: tuple[int, ...] = ()) -> None:
        self.spills, self.broken = spills, broken
        self.asked: list[int] = []

    def build(self, jobs: Iterable[Job]) -> Iterator[Kernel | Failure]:
        for job in jobs:
            number = int(job.config["number"])
            self.asked.append(number)
            if number in self.broken:
                yield Failure(job.symbol, "SIGSEGV")
                continue
            pairs = zip(TARGET.images, self.spills.get(number, (0, 0)), strict=True)
            images = {arch: Image(b"", "", 128, 0, 0, nbytes) for arch, nbytes in pairs}
            yield GpuKernel(
                symbol=job.symbol,
                images=images,
                grid=(1, 1, 1),
                threads=32,
                shared=0,
                source="",
                packings={},
            )


def made(builder: Builder, others: list[int], strict: bool = False) -> Generated:
    return generate(
        [STAGE],
        lambda stage, without: pick(0),
        TARGET,
        builder,  # type: ignore[arg-type]
        strict=strict,
        stand_ins=lambda stage, of: [pick(n) for n in others],
    )


def number_of(result: Generated) -> int:
    return int(result.choices[STAGE.key].config["number"])


def test_the_first_that_does_not_spill_on_any_architecture_stands_in() -> None:
    builder = Builder({0: (0, 8), 1: (16, 0)}, broken=(2,))
    result = made(builder, [1, 2, 3, 4], strict=True)
    assert builder.asked == [0, 1, 2, 3] and number_of(result) == 3 and not result.spills
    assert not spilled(result.kernels[STAGE.key])


def test_what_does_not_spill_is_left_alone() -> None:
    builder = Builder({})
    result = made(builder, [1])
    assert builder.asked == [0] and number_of(result) == 0 and not result.spills


@pytest.mark.parametrize(
    ("others", "text"),
    [([1, 2], "so do the 2 next-best"), ([], "no config with fewer registers is predicted")],
)
def test_where_all_spill_the_pick_stays_with_a_note(others: list[int], text: str) -> None:
    builder = Builder({0: (0, 8), 1: (16, 0), 2: (4, 4)})
    result = made(builder, others)
    assert number_of(result) == 0 and spilled(result.kernels[STAGE.key]) == {"sm_90a": 8}
    (note,) = result.spills
    assert "relu" in note and "spills 8 bytes on sm_90a" in note and text in note


def test_stand_ins_have_fewer_registers_each_and_take_about_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = RecordedPolicy(GpuPolicy(TARGET))
    found = [
        pick(1, 200),
        pick(2, 210),  # as many as the pick
        pick(3, 180, 1.01),
        pick(4, 190, 1.02),  # more than the one before
        pick(5, 100, SLOWER + 0.01),
    ]
    monkeypatch.setattr(policy, "best", lambda stage, n: found)

    def numbers() -> list[int]:
        return [int(p.config["number"]) for p in stand_ins(policy, STAGE, pick(0, 210))]

    assert numbers() == [1, 3]
    found[4] = pick(5, 100, SLOWER)
    assert numbers() == [1, 3, 5] and TRIED == 3
    monkeypatch.setattr(search, "TRIED", 2)
    assert numbers() == [1, 3]


def test_what_was_measured_stays_and_what_was_wrong_stands_in_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RecordedPolicy(GpuPolicy(TARGET), Records(tmp_path / "records"))
    both = [pick(1, 90), pick(2, 80)]
    monkeypatch.setattr(policy.policy, "best", lambda stage, n, without: both)
    known: list[Any] = []
    monkeypatch.setattr(policy, "known", lambda stage: known)

    def numbers() -> list[int]:
        return [int(p.config["number"]) for p in stand_ins(policy, STAGE, pick(0, 99))]

    assert numbers() == [1, 2]
    known.append(SimpleNamespace(parsed=pick(1).config, outcome="wrong"))
    assert numbers() == [2]
    known.append(SimpleNamespace(parsed=pick(0).config, outcome="ok"))
    assert numbers() == []


def test_a_product_of_too_many_computed_runs(compiling: Compiling) -> None:
    """NVRTC spills this config of a float16 convolution over a float32 image."""
    stage: Stage = STAGES["widened"]
    target = gpu_target("cuda:sm_80")
    policy = RecordedPolicy(GpuPolicy(target))
    (sketch,) = {p.sketch.name: p.sketch for p in policy.best(stage, 1)}.values()
    row = {"row": "mma.m16n8k16", "mapping": "(i,r,c)(f)(tr,tc,c)", "block": "64x64x128"}
    others = {"warps": "32x32x1", "stages": 4, "split": 1, "group": 1044}
    config = Config("gemm", tuple({**row, **others}.items()))
    first = Pick(sketch, config, policy.price(sketch, config))

    def result(stand_ins: Any) -> Generated:
        return generate(
            [stage],
            lambda stage, without: first,
            target,
            compiling,  # type: ignore[arg-type]
            stand_ins=stand_ins,
        )

    alone = result(lambda stage, pick: [])
    assert spilled(alone.kernels[stage.key])["sm_80"] > 64 and len(alone.spills) == 1
    both = result(lambda stage, pick: stand_ins(policy, stage, pick))
    assert not spilled(both.kernels[stage.key]) and not both.spills
    assert both.choices[stage.key].config != config
