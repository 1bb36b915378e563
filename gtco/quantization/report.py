"""What quantizing found out, as values, as JSON, and the quantized model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from gtco.frontend.onnx import OnnxSource
from gtco.frontend.weights import whole
from gtco.quantization.observers import Range
from gtco.quantization.verdict import OutputVerdict, worst
from gtco.quantization.writing import write_model
from gtco.runtime.publish import write_whole
from gtco.support.options import Quantization
from gtco.support.version import __version__

VERSION = 1  # version of the JSON; raised when a field changes its meaning or goes


def _finite(value: Any) -> Any:
    """The value with null, as JSON has no infinity, for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not isfinite(value) else value


@dataclass(frozen=True)
class Layer:
    """A product by constant weights.

    - ``label``: its module's or its node's name; ``node``: its name in the graph
    - ``operations``: multiplications and additions of a run
    - ``sensitivity``: the relative error of the outputs if this product alone is quantized; None if
      it was not asked
    - ``input_error``: the relative error of the tensor that it reads in the quantized model, before
      that is rounded for this product; None if it was not looked at
    - ``float_because``: why it stays in float; "" if it is quantized
    """

    label: str
    node: str
    kind: str
    operations: int
    sensitivity: float | None
    input_error: float | None
    float_because: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.label,
            "node": self.node,
            "kind": self.kind,
            "operations": self.operations,
            "sensitivity": self.sensitivity,
            "input_error": self.input_error,
            "precision": "float32" if self.float_because else "int8",
            "float_because": self.float_because or None,
        }


@dataclass(frozen=True)
class Tried:
    """The relative error on the samples with every product quantized, by an observer's ranges."""

    smooth: float
    observer: str
    error: float


@dataclass(frozen=True)
class QuantizationReport:
    """How a model was quantized, and what it lost.

    - ``samples``: how many chose the ranges; ``held_out``: how many the verdict is found on
    - ``observer``, ``smooth``: what was taken (0: not smoothed); ``tried``: the errors that it was
      chosen by
    - ``layers``: of each product by constant weights
    - ``outputs``: the verdict on each output: the quantized file, compiled by gtco, against the
      float model
    - ``ranges``: of each quantized tensor
    - ``notes``: sentences for the user
    - ``phases``: seconds of each phase
    """

    settings: Quantization
    samples: int
    held_out: int
    observer: str
    smooth: float
    tried: Sequence[Tried]
    layers: Sequence[Layer]
    outputs: Sequence[OutputVerdict]
    ranges: Mapping[str, Range]
    notes: Sequence[str] = ()
    phases: Sequence[tuple[str, float]] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The relative error of the output that lost most."""
        return worst(self.outputs)

    @property
    def quantized(self) -> list[Layer]:
        """The products in int8."""
        return [layer for layer in self.layers if not layer.float_because]

    @property
    def share(self) -> float:
        """The share of the operations of all these products that are of integers."""
        total = sum(layer.operations for layer in self.layers)
        return sum(layer.operations for layer in self.quantized) / max(1, total)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`save` writes."""
        return {
            "version": VERSION,
            "gtco": __version__,
            "samples": self.samples,
            "held_out": self.held_out,
            "observer": self.observer,
            "smooth": self.smooth,
            "tried": [
                {"smooth": t.smooth, "observer": t.observer, "relative_error": t.error}
                for t in self.tried
            ],
            "exclude": list(self.settings.exclude),
            "max_drop_percent": self.settings.max_drop,
            "relative_error": self.error,
            "quantized_share": self.share,
            "outputs": [output.to_json() for output in self.outputs],
            "layers": [layer.to_json() for layer in self.layers],
            "ranges": {
                name: {"low": r.low, "high": r.high, "scale": r.scale, "zero_point": r.zero}
                for name, r in self.ranges.items()
            },
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the report as JSON; a half-written file never has the name."""
        text = json.dumps(_finite(self.to_json()), indent=1, allow_nan=False, default=str) + "\n"
        return write_whole(Path(path), text.encode())


@dataclass(frozen=True)
class QuantizedModel:
    """What ``gtco.quantize`` gives. ``compile_model`` takes it as a model. ``report`` is what was
    found out on the way.
    """

    source: OnnxSource = field(repr=False)
    report: QuantizationReport

    @property
    def model(self) -> Any:
        """The quantized model as an ONNX ``ModelProto``, a new one each time. protobuf cannot write
        one of 2 GB or more; :meth:`save` can.
        """
        return whole(self.source.skeleton, self.source.weights)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the ONNX file. A half-written file never has the name. Weights of more than 1 GB
        go to ``NAME.onnx.data`` beside it.
        """
        return write_model(Path(path), self.source)
