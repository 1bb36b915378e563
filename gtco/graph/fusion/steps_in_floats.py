"""A tensor that one stage quantizes and dequantizes stays in floats, with the same values.

before: q = quantize(x, h, l, z) {uint8};  y = dequantize(q, s, z)
after:  n = quantize(x, h, l, z) {float32};  y = dequantize(n, s, z)

If q is the result of a stage, it is stored in 8 bits, and the stages behind dequantize it. So the
fusion search chooses for each tensor whether it is stored in 8 bits, in floats or not at all. It
prices stages in the form of this module. A NaN stays one, where the cast would make an integer of
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gtco.tensor.stage import Operator, Stage, TensorType, make_stage


def steps_in_floats(stage: Stage) -> Stage:
    """The stage without dequantizations of what it quantizes itself."""
    made: dict[str, Operator] = {}
    types = dict(stage.types)
    for op in stage.operators:
        inner = made.get(op.inputs[0]) if op.kind == "dequantize" else None
        if inner is None or inner.kind != "quantize":
            made[op.output] = op
            continue
        steps = _steps(inner, types)
        made[steps.output] = steps
        types[steps.output] = steps.type
        made[op.output] = replace(op, inputs=(steps.output, *op.inputs[1:]))
    if len(made) == len(stage.operators):
        return stage
    return make_stage(_needed(stage, made), types, stage.constants)


def _steps(quantize: Operator, types: Mapping[str, TensorType]) -> Operator:
    """The same whole numbers, as floats."""
    kind, name = TensorType(quantize.type.shape, "float32"), f"{quantize.output}_steps"
    while name in types and types[name] != kind:
        name += "_"
    return replace(quantize, output=name, type=kind)


def _needed(stage: Stage, made: Mapping[str, Operator]) -> list[Operator]:
    """The operators on which the stage's result depends, in order."""
    wanted, kept = {stage.output.output}, []
    for op in reversed(list(made.values())):
        if op.output in wanted:
            wanted.update(op.inputs)
            kept.append(op)
    return kept[::-1]
