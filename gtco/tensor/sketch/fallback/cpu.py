"""Sketch rule of last resort: any single operator, as scalar loops or through Relax. It is slow,
has one task (or the outer iterations of the loop nest that Relax makes), and always builds.

Element-wise and data-movement operators are read element by element through :class:`Reader`,
pooling and resizing through :mod:`gtco.tensor.emit.spatial`, and sampling through
:mod:`gtco.tensor.emit.sampling`. All other kinds, and operators that are kept as ``relax``, go
through :mod:`gtco.tensor.relax.bridge`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, isnan, nan, prod

import numpy
from tvm import tirx

from gtco.machine.target import Target
from gtco.tensor.analysis.chains import is_static, readable
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments, kernel
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.sampling import sampled
from gtco.tensor.emit.spatial import Source, pooled, resized
from gtco.tensor.relax.bridge import lower_module
from gtco.tensor.relax.calls import BridgeError
from gtco.tensor.relax.spellings import module_of
from gtco.tensor.space import Config, Decision, Option, Program, Rejection
from gtco.tensor.stage import INT4, NARROW_INDICES, Operator, Stage, TensorType
from gtco.tensor.workload import Layer, Stream, Workload

SLOWNESS = 16.0  # factor on the bytes it moves, so that any other sketch is preferred
RATE = 4.0  # vector operations in the time of one of its scalar ones: about 1 GFLOP/s


Element = Callable[[Emitter, Operator, Sequence[Source], Sequence[TensorType], list], Expr]


def _of_one(element: Callable[..., Expr]) -> Element:
    """The element function of an operator that reads one tensor."""
    return lambda em, op, sources, types, index: element(em, op, sources[0], types[0], index)


IMAGE: dict[str, Element] = {
    "max_pool2d": _of_one(pooled),
    "avg_pool2d": _of_one(pooled),
    "resize2d": _of_one(resized),
    "grid_sample": sampled,
}


# The value of each element if an operator combines no elements: its first operand is empty (for
# attention, the values are), and its output is not. TVM divides by the size of the operand, or
# stores nothing.
OF_NOTHING = {
    "sum": 0.0, "prod": 1.0, "mean": nan, "max": -inf, "min": inf,
    "moments": nan, "merged_moments": nan,
    "matmul": 0.0, "conv2d": 0.0, "conv_transpose2d": 0.0, "attention": 0.0,
}  # fmt: skip


def of_nothing(stage: Stage) -> float | int | None:
    """The value of every element of the stage's one operator, if its inputs have no elements; else
    None.
    """
    op = stage.output
    taken = op.inputs[2] if op.kind == "attention" else op.inputs[0] if op.inputs else ""
    if op.kind not in OF_NOTHING or stage.types[taken].size:
        return None
    value = OF_NOTHING[op.kind]
    if op.type.dtype.startswith(("float", "bfloat")):
        return value
    if op.type.dtype == "bool":
        return int(value > 0)
    if isnan(value):
        return None
    return int(value) if isfinite(value) else _limit(op.type.dtype, value > 0)


def _limit(dtype: str, largest: bool) -> int:
    found = numpy.iinfo(dtype)
    return int(found.max if largest else found.min)


def match(stage: Stage, target: Target) -> Fallback | None:
    """The stage if it is a single operator of known shapes, else None."""
    if len(stage.operators) != 1 or not is_static(stage):
        return None
    if not stage.output.type.size or of_nothing(stage) is not None:
        return Fallback(stage, target)  # nothing is computed
    if stage.output.kind in ("matmul", "conv2d") and len(stage.output.inputs) > 2:
        return None  # TVM has no product with scales of its weights
    if any(i.type.dtype == INT4 for i in stage.inputs):
        return None  # nor with two weights in a byte
    return Fallback(stage, target)


@dataclass(frozen=True)
class Fallback:
    """One operator."""

    stage: Stage
    target: Target

    name = "fallback"
    structure = "scalar"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return None

    def workload(self, config: Config) -> Workload:
        moved = SLOWNESS * (self.stage.input_bytes + self.stage.output.type.nbytes)
        flops = operations(self.stage)
        whole = Layer(1, (Stream(moved, moved, "DRAM"),), overlapped=False)
        return Workload("fma", RATE * flops, (whole,), flops)

    def build(self, config: Config, symbol: str) -> Program | Rejection:
        stage = self.stage
        types = {i.name: i.type for i in stage.inputs}
        empty = stage.output.type.size == 0  # nothing is computed, so every operator may be empty
        plain = readable(stage.output) or stage.output.kind in IMAGE
        if not empty and stage.output.kind in IMAGE and 0 in types[stage.output.inputs[0]].shape:
            return Rejection("no program", f"{stage.output.kind} of an image without pixels")
        if empty or plain or of_nothing(stage) is not None:
            function = kernel(symbol, types, stage.output.type, 0, 1, self.elements, stage.wide)
            return Program(function, 1, 0, {})
        if stage.wide:
            op = stage.output
            text = f"{op.get('op', op.kind)}: TVM's loops count at most {NARROW_INDICES} elements"
            return Rejection("no program", text)
        names = list(types)
        op = stage.output
        order = [names.index(x) for x in op.inputs]
        try:
            function, workspace, tasks = lower_module(
                module_of(stage),
                symbol,
                list(types.values()),
                order,
                op.type,
                op.get("result", -1),
            )
        except BridgeError as error:
            return Rejection("no program", f"{op.get('op', op.kind)}: {error}")
        return Program(function, tasks, workspace, {})

    def elements(self, em: Emitter, args: KernelArguments) -> None:
        """``for i in output: output[i] = value(i)``."""
        reader = Reader(self.stage, em, args.inputs)
        output, constant = self.stage.output, of_nothing(self.stage)

        def value(index: list) -> Expr:
            if constant is not None:
                return tirx.const(constant, output.type.dtype)
            if output.kind not in IMAGE:
                return reader.value(output.output, index)
            sources = [partial(reader.value, x) for x in output.inputs]
            types = [self.stage.types[x] for x in output.inputs]
            return IMAGE[output.kind](em, output, sources, types, index)

        def nest(index: list, left: tuple[int, ...]) -> None:
            if not left:
                em.store(args.output, index, value(index))
                return
            with em.loop(left[0]) as i:
                nest([*index, i], left[1:])

        with em.range(args.begin, args.end, "task"):
            if 0 not in args.output.shape:
                nest([], args.output.shape)


def operations(stage: Stage) -> float:
    """Floating-point operations of a single-operator stage; a guess if the operator is opaque."""
    op: Operator = stage.output
    size = float(op.type.size)
    read = float(sum(i.type.size for i in stage.inputs))
    match op.kind:
        case "matmul":
            return 2 * size * int(stage.types[op.inputs[0]].shape[-1])
        case "conv2d":
            return 2 * size * prod(int(d) for d in stage.types[op.inputs[1]].shape[1:])
        case "conv_transpose2d":  # TVM multiplies the zeros between the inputs too
            channels, _, *taps = (int(d) for d in stage.types[op.inputs[1]].shape)
            return 2 * size * (channels // op["groups"]) * prod(taps)
        case "attention":
            q, k, v = (stage.types[x].shape for x in op.inputs[:3])
            rows = prod(int(d) for d in q[:-1])
            return 2.0 * rows * int(k[-2]) * (int(q[-1]) + int(v[-1]) + 8)
        case "max_pool2d" | "avg_pool2d":
            return size * prod(op["kernel"])
        case "grid_sample":
            return 16 * size
        case "resize2d":
            return size * {"nearest": 1, "linear": 8}.get(op["method"], 40)
        case "relax":
            return 32 * (read + size)
    return 4 * (read + size)
