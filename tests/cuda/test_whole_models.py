"""A vision transformer compiled for a GPU, its library run without one: the C runtime on the fake
driver, every kernel emulated and checked, against ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import gtco
from models.export import export_onnx
from tests.cuda.emulate import faults_of, launches_of
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.whole import whole
from tests.unit.test_models import TINY, seeded

# The most that an output may be off, of the largest: operands of matrix products have 11 bits (of
# bfloat16 8), the rest has 24, and more layers add more.
CASES = [
    ("vit", "cuda:sm_80", "fp16", 2e-3),
    ("vit", "cuda:sm_75", "fp16", 2e-3),
    ("vit", "cuda:sm_80", "bf16", 2e-2),
    ("vit", "cuda:sm_90a", "fp32", 1e-5),
    ("swin", "cuda:sm_80", "fp16", 2e-3),
    ("setr", "cuda:sm_89", "fp16", 5e-3),
    ("detr", "cuda:sm_80", "fp16", 1e-2),
]


@pytest.mark.parametrize(
    ("name", "target", "precision", "tolerance"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.scheduled) for case in CASES[1:])],
)
def test_against_onnxruntime(
    driver: FakeDriver, tmp_path: Path, name: str, target: str, precision: str, tolerance: float
) -> None:
    create, (_, *shape) = TINY[name]
    torch.manual_seed(0)
    model, x = seeded(create()), torch.randn(1, *shape)
    export_onnx(model, (x,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    wanted = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    made = whole(model, (x,), target, precision)
    library, emulated = made.library(tmp_path / "model.so")
    generation = made.target.generation
    driver.device(0, generation // 10, generation % 10, 1 << 30)
    with gtco.load(library) as loaded:
        for run in (1, 2):  # the second replays a graph
            got = loaded(x.numpy())
            assert faults_of(emulated) == []
            assert launches_of(emulated) == run * len(made.stages)
            for array, right in zip(got if len(wanted) > 1 else [got], wanted, strict=True):
                error = np.abs(array - right).max() / np.abs(right).max()
                print(f"{name} {target} {precision}: {error:.2g}")
                assert error <= tolerance
