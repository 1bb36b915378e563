"""A workload as it is after its build."""

from __future__ import annotations

import pytest

from bench.harness.build import Build
from bench.harness.workload import Workload


@pytest.fixture
def workload(tmp_path):
    built = Build(
        "m.so", 3.0, 900_000_000, weights_bytes=23_000_000, stages=7, notes=("fell back",)
    )
    return Workload("m", tmp_path / "m.onnx", None, tmp_path / "m.npz", built, 2e9)
