"""The result of an importer: a Relax module, its weights, and notes on its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy

from gtco.support.later import Later
from gtco.tensor.stage import TensorType

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class ImportedModel:
    """A model as Relax, in the form that ``gtco.graph.lower.walk.lower`` takes.

    - ``module``: its function ``main`` takes ``inputs`` and ``weights`` and returns one tensor or a
      tuple of ``outputs``;
    - ``parameters``: the name of the input or weight, by the parameter of ``main``;
    - ``weights``: they stay outside the module, so that no pass copies them;
    - ``names``: the name of the node in the model, by Relax variable;
    - ``operators``: the operator, by the name of the node;
    - ``notes``: for the user;
    - ``unsimplified``: onnxsim was to simplify it and failed;
    - ``float16``: the file has that type in it, which was widened to float32;
    - ``bfloat16``: all products of the file are of that type, which was widened to float32;
    - ``identity``: which ONNX file it is (:mod:`gtco.frontend.identity`); empty for a PyTorch
      module.
    """

    module: tvm.IRModule
    inputs: Mapping[str, TensorType]
    outputs: tuple[str, ...]
    weights: Mapping[str, numpy.ndarray | Later]
    parameters: Mapping[str, str]
    opset: int = 0
    producer: str = ""
    notes: tuple[str, ...] = ()
    unsimplified: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    float16: bool = False
    bfloat16: bool = False
    identity: str = ""
