"""Whole models as a GPU would run them, kernel by kernel in the emulator, against PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gtco.verification.compare import compare
from gtco.verification.verify import BOUNDS
from models.weights import initialise
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.whole import emulated, outputs


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(40), nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(nn.functional.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_feedforward_block(driver: FakeDriver, tmp_path: Path, precision: str) -> None:
    check(driver, tmp_path, Feedforward(), (1, 21, 40), "sm_80", precision)


def check(
    driver: FakeDriver,
    folder: Path,
    model: nn.Module,
    shape: tuple[int, ...],
    arch: str,
    precision: str,
) -> None:
    model = model.eval().requires_grad_(False)
    initialise(model, seed=3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(precision)))
    report, loaded, workers = emulated(driver, folder, model, (x,), arch, precision=precision)
    assert not report.notes
    bound = BOUNDS[precision]
    with loaded:
        found = outputs(loaded, workers, {loaded.inputs[0].name: x.numpy()})
    wanted = model.double()(x.double())
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    assert len(found) == len(wanted)
    for (name, got), want in zip(found.items(), wanted, strict=True):
        expected = want.numpy().astype(np.float32)
        difference = compare("random", name, got, expected, bound.tolerance, floor=bound.floor)
        assert not difference.failure, difference
    if precision != "fp32":
        assert any("float16" in stage["output"] for stage in report.stages)
