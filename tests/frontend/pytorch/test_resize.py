"""``interpolate`` by a factor, as torch computes it: sizes, positions and neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gtco.frontend.pytorch.load import load_pytorch
from gtco.frontend.pytorch.resize import fit
from gtco.graph.lower.walk import lower


class Resized(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x.relu(), **self.options)


MODES = [
    {"mode": "nearest"},
    {"mode": "nearest-exact"},
    {"mode": "bilinear"},
    {"mode": "bilinear", "align_corners": True},
    {"mode": "bicubic", "align_corners": True},
    {"mode": "bilinear", "recompute_scale_factor": True},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("factor", [0.6, 0.7, (1.5, 0.7), 1.7, 1.3, 2.0])
def test_a_factor_gives_what_torch_has(options: dict[str, Any], factor: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 20, 10)
    module = Resized(scale_factor=factor, **options)
    graph = lower(load_pytorch(module, (x,), simplify=False))
    (got,) = graph.evaluate({"x": x.numpy()}).values()
    wanted = module(x).numpy()
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_a_scale_that_fits_stays() -> None:
    scale = np.float32(0.7)
    assert fit(10, 6, scale) == scale
    assert 10 * float(fit(10, 7, scale)) >= 7 and abs(fit(10, 7, scale) - scale) < 1e-6
    assert fit(10, 3, scale) == scale
