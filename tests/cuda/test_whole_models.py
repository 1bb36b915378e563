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
from tests.cuda.emulate import faults_of
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.whole import whole
from tests.unit.test_models import seeded, tiny_vit

# Of the largest output: operands of matrix products have 11 bits, sums and the rest 24.
TOLERANCE = {"fp16": 4e-3, "fp32": 2e-5}


@pytest.mark.parametrize(("target", "precision"), [("cuda:sm_80", "fp16")])
def test_a_vision_transformer(
    driver: FakeDriver, tmp_path: Path, target: str, precision: str
) -> None:
    model, x = seeded(tiny_vit()), torch.randn(1, 3, 32, 48)
    export_onnx(model, (x,), tmp_path / "vit.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "vit.onnx")
    (wanted,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    made = whole(model, (x,), target, precision)
    library, emulated = made.library(tmp_path / "vit.so")
    with gtco.load(library) as loaded:
        for _ in range(2):  # by launches, then again
            got = np.asarray(loaded(x.numpy()))
            assert faults_of(emulated) == []
            error = np.abs(got - wanted).max() / np.abs(wanted).max()
            assert error <= TOLERANCE[precision], f"{error:.2g}"
