"""Libraries of a block of a transformer, and their facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest

from gtco.compiler import compile_to_file
from gtco.driver.compiled import CompileReport
from gtco.report.facts import Facts
from gtco.report.gather import gather
from tests.driver.test_compiler import mlp
from tests.driver.test_stage_names import block


@dataclass(frozen=True)
class Made:
    """A library, the model that it was compiled from, and what the compile said."""

    model: onnx.ModelProto
    library: Path
    report: CompileReport

    @property
    def facts(self) -> Facts:
        return gather(self.library)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    """The block, compared with ONNX Runtime and stage by stage. It has measured nothing."""
    model, library = block(24, 32), tmp_path_factory.mktemp("report") / "block.so"
    report = compile_to_file(model, library, tune="off", threads=1, verify=True, verify_layers=True)
    return Made(model, library, report)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory, made) -> Made:
    """The same block in bfloat16."""
    library = tmp_path_factory.mktemp("report") / "narrow.so"
    target = "znver4"  # any that has the instructions: nothing of it is run
    report = compile_to_file(
        made.model, library, tune="off", threads=1, precision="bf16", target=target
    )
    return Made(made.model, library, report)


@pytest.fixture(scope="session")
def shaped(tmp_path_factory) -> Made:
    """A perceptron for two batches."""
    model, library = mlp("batch", layers=2), tmp_path_factory.mktemp("report") / "shaped.so"
    report = compile_to_file(model, library, tune="off", threads=1, dims={"batch": [1, 3]})
    return Made(model, library, report)
