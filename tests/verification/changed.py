"""A compiled model whose outputs are changed, which verification must see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest

import gtco
from tests.end_to_end.nodes.runner import InProcess


def compiled_here(model: onnx.ModelProto, **options: Any) -> gtco.CompiledModel:
    """Compiles in this process, which already has TVM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gtco.driver.making.Workers", InProcess)
        return gtco.compile_model(model, threads=1, simplify=False, **options)


@dataclass(frozen=True)
class Changed:
    """A compiled model whose output is changed."""

    inner: gtco.Model
    change: Callable[[np.ndarray], None]

    @property
    def inputs(self) -> Any:
        return self.inner.inputs

    @property
    def outputs(self) -> Any:
        return self.inner.outputs

    @property
    def metadata(self) -> Any:
        return self.inner.metadata

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = {name: value.copy() for name, value in self.inner.run(inputs).items()}
        for value in outputs.values():
            self.change(value)
        return outputs
