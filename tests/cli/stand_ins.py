"""Replacements for the compiler, a library and the machine in the tests of the command line."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import ClassVar

import pytest

from gtco.runtime import library
from gtco.runtime.plan import TensorSpec
from gtco.search.calibration.peak import Peak
from gtco.tuning.view import View
from gtco.tuning.whole import ModelVerdict
from gtco.verification import VerificationReport


@dataclass(frozen=True)
class Report:
    phases: tuple = (("import", 0.5), ("build", 2.0))
    stages: tuple = ({"name": "s0"}, {"name": "s1"})
    peak_memory_bytes: int = 2_000_000_000
    weights_bytes: int = 23_000_000
    launches: str = "graph"
    predicted_seconds: float = 0.012
    notes: tuple = ("stage s1 fell back [slow]",)
    tuning: tuple = ()
    tuned: View | None = None
    fusion: str = ""
    settled: ModelVerdict | None = None
    verification: VerificationReport | None = None
    variants: ClassVar = {}
    cached: str = ""
    quantization: None = None
    losses: None = None


class Model:
    """Replaces what gtco.runtime.module.load gives; it computes y = 2 x."""

    inputs: ClassVar = [TensorSpec("x", "float32", (2, 3)), TensorSpec("ids", "int64", (2,))]
    outputs: ClassVar = [TensorSpec("y", "float32", (2, 3))]
    stages: ClassVar = [
        {
            "name": f"s{n}",
            "operators": ["matmul", "add"],
            "inputs": ["float32[2x3]", "int8[3x3]"],
            "output": "float32[2x3]",
            "bytes": 96,
            "schedule": {"tile_m": 2, "tile_n": [1, 3]},
            "flops": flops,
            "predicted_seconds": 1e-6,
        }
        for n, flops in enumerate((4000, 4000))
    ]
    device = None
    dims: ClassVar = {}
    metadata: ClassVar = {
        "name": "fake",
        "threads": 0,
        "inputs": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in inputs],
        "outputs": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in outputs],
        "steps": stages,
    }

    def __init__(self, threads=0):
        self.threads = threads or 2
        self.seen: list = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def run(self, inputs):
        self.seen.append(inputs)
        return {"y": 2 * inputs["x"]}

    def profile(self, *inputs, repeat):
        assert len(inputs) == 2 and repeat > 1
        return [2e-6, 2e-6]


@pytest.fixture
def compiler(monkeypatch):
    """A gtco.compiler that records its calls; if ``fail`` is set, it is raised."""
    module = types.ModuleType("gtco.compiler")
    module.calls, module.fail, module.report = [], None, Report()

    def compile_to_file(model, output, **options):
        module.calls.append((model, output, options))
        options["progress"]("import", None, "reading")
        options["progress"]("import", 0.5, "74 [bold] operators")
        if module.fail:
            raise module.fail
        return module.report

    module.compile_to_file = compile_to_file
    module.compile_to_files = lambda models, **options: [
        compile_to_file(model, output, **options) for model, output, _ in models
    ]
    monkeypatch.setitem(sys.modules, "gtco.compiler", module)
    return module


@pytest.fixture
def model(monkeypatch):
    """Replaces gtco.runtime.module.load and read_metadata by those of the fake model."""
    module, fake = types.ModuleType("gtco.runtime.module"), Model()
    module.load = lambda path, threads=0, device=0, dims=None: fake
    monkeypatch.setitem(sys.modules, "gtco.runtime.module", module)
    monkeypatch.setattr(library, "read_metadata", lambda path: fake.metadata)
    return fake


@pytest.fixture
def peak(monkeypatch):
    module = types.ModuleType("gtco.search.calibration.peak")
    module.machine_peak = lambda threads, operand: Peak(threads, (3e9, 4e9), 0.0)
    monkeypatch.setitem(sys.modules, "gtco.search.calibration.peak", module)
