"""What an importer hands over: a Relax module, its weights and what is known of where it came
from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy

from gtco.tensor.stage import TensorType

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class ImportedModel:
    """A model as Relax, in the form that ``gtco.graph.lower.walk.lower`` takes.

    ``module``'s function ``main`` takes ``inputs`` and ``weights``, by the parameter names in
    ``parameters`` (parameter -> name of the input or weight), and returns one tensor or a tuple of
    ``outputs``. Weights stay outside the module, so that no pass copies them. ``names`` maps a
    Relax variable to the name its node had in the model, ``operators`` that name to the node's
    operator; ``notes`` are for the user. ``float16``: the file has float16 in it, which was widened
    to float32. ``identity``: which ONNX file it is (:mod:`gtco.frontend.identity`), empty for a
    PyTorch module.
    """

    module: tvm.IRModule
    inputs: Mapping[str, TensorType]
    outputs: tuple[str, ...]
    weights: Mapping[str, numpy.ndarray]
    parameters: Mapping[str, str]
    opset: int = 0
    producer: str = ""
    notes: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    float16: bool = False
    identity: str = ""
