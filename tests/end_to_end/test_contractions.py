"""A model of products that are neither dense nor depthwise (grouped, transposed, one-channel and
3-D convolutions, Einsum), by every way into the compiler: it is right, and nothing uses the
fallback.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gtco
from models import export_onnx

TOLERANCE = 1e-4  # of the output's largest magnitude


class Mixture(nn.Module):
    """A stem, a ResNeXt block, FastViT's two filters for each channel, SAM's positions, a decoder
    and a head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 2, 1)
        self.narrow = nn.Conv2d(24, 24, 3, padding=1, groups=6)
        self.filters = nn.Conv2d(24, 48, 5, 2, 2, groups=24)
        self.groups = nn.Conv2d(48, 48, 1, groups=3)
        self.rows = nn.Parameter(torch.randn(8, 6, 48) * 0.1)
        self.columns = nn.Parameter(torch.randn(9, 6, 48) * 0.1)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(48, 20, 2, 2),
            nn.BatchNorm2d(20),
            nn.GELU(),
            nn.ConvTranspose2d(20, 10, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(10, 8, 3, 2, 1, groups=2),
        )
        self.head = nn.Conv2d(8, 1, 3, padding=1)
        self.video = nn.Conv3d(8, 5, (2, 4, 4), (2, 4, 4))
        norm = self.up[1]
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = nn.functional.gelu(self.stem(x))
        x = x + nn.functional.silu(self.narrow(x))
        q = self.groups(self.filters(x)).permute(0, 2, 3, 1)
        rows = torch.einsum("bhwc,hkc->bhwk", q, self.rows)
        columns = torch.einsum("bhwc,wkc->bhwk", q, self.columns)
        mixed = torch.einsum("bhwk,bhwc->bkc", rows + columns, q)
        y = self.up(q.permute(0, 3, 1, 2))
        frames = torch.stack((y, y * y), 2)
        return self.head(y), mixed, self.video(frames)


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, Tensor, list[np.ndarray]]:
    torch.manual_seed(0)
    model, x = Mixture().eval(), torch.randn(2, 3, 32, 36)
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(x.double())
    return model, x, [w.numpy() for w in wanted]


@pytest.mark.parametrize("way", ["dynamo", "torchscript", "torch"])
def test_nothing_is_left_to_the_fallback(case: tuple, way: str, tmp_path: Path) -> None:
    model, x, wanted = case
    library = tmp_path / "mixture.so"
    if way == "torch":
        compiled = gtco.compile_model(model, (x,), strict=True)
    else:
        path = export_onnx(model, (x,), tmp_path / "mixture.onnx", exporter=way)
        compiled = gtco.compile_model(path, strict=True)
    compiled.save(library)
    with gtco.load(library, threads=2) as loaded:
        got = list(loaded.run({loaded.inputs[0].name: x.numpy()}).values())
        left = [s for s in loaded.stages if s["schedule"]["sketch"] == "fallback"]
    for value, want in zip(got, wanted, strict=True):
        assert np.abs(value - want).max() < TOLERANCE * np.abs(want).max()
    assert not left
