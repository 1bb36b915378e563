"""Stages of other sizes: other batches, resolutions and widths of a stage, without exporting and
cutting another model.

Each different size of a stage is replaced, wherever it occurs, by another size. That is a program
again where operators only need equal sizes to be equal; types are inferred anew, and what does not
fit is not a stage.
"""

from __future__ import annotations

from random import Random

from gtco.graph.infer import infer_type
from gtco.support.errors import GtcoError
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType

EQUAL = frozenset(
    [
        *(*ELEMENTWISE_OPERATORS, "identity", "permute", "broadcast", "matmul", "attention"),
        *("softmax", "layer_norm", "rms_norm", "sum", "mean", "max", "min"),
    ]
)
LEAST = 5  # smaller sizes stay: batches of one, and sizes that attributes may name
# Tokens, channels and sides of published models of other sizes.
SIZES = (
    *(7, 8, 14, 16, 28, 32, 48, 49, 56, 64, 80, 96, 100, 112, 128, 144, 160, 192, 196, 197, 224),
    *(240, 256, 257, 288, 320, 384, 400, 448, 480, 512, 576, 577, 640, 768, 784, 785, 900, 1000),
    *(1024, 1025, 1050, 1152, 1280, 1370, 1536, 1600, 2048, 2304, 3072, 3136, 4096, 4608, 5120),
)
MOST = 1 << 26  # elements of a tensor


def resized(stage: Stage, random: Random) -> Stage | None:
    """The stage with other sizes; None where that is not a program, or too large a one."""
    if any(op.kind not in EQUAL for op in stage.operators):
        return None
    sizes = {d for t in stage.types.values() for d in t.shape if isinstance(d, int) and d >= LEAST}
    if not sizes:
        return None
    new = {d: _near(d, random) for d in sorted(sizes)}

    def shape(type_: TensorType) -> TensorType:
        return TensorType(tuple(new.get(d, d) for d in type_.shape), type_.dtype)  # type: ignore[arg-type]

    inputs = tuple(StageInput(i.name, shape(i.type), i.constant) for i in stage.inputs)
    types = {i.name: i.type for i in inputs}
    operators = []
    for op in stage.operators:
        wanted = shape(op.type)
        try:
            found = infer_type(op.kind, [types[i] for i in op.inputs], dict(op.attrs), wanted)
        except (GtcoError, ValueError, AssertionError, KeyError, IndexError):
            return None
        if found.shape != wanted.shape or wanted.size > MOST:
            return None
        types[op.output] = wanted
        operators.append(Operator(op.kind, op.inputs, op.output, wanted, op.attrs))
    return Stage(inputs, tuple(operators)).canonical


def _near(size: int, random: Random) -> int:
    """Another size, from a third of this one to three times as much."""
    near = [s for s in SIZES if size / 3 <= s <= 3 * size and s != size]
    return random.choice(near) if near else size
