"""What a library says of itself: the versions of what made it, its stages and its loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gtco.codegen.jobs import Kernel
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.support.version import __version__, installed
from gtco.tensor.cuda.program import Launch
from gtco.tensor.intrinsics.table import multiplied
from gtco.tensor.operators import (
    COMPLEX,
    ELEMENTWISE,
    INJECTIVE,
    OPAQUE,
    REDUCTION,
    pattern,
)
from gtco.tensor.packing import Packing
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage


def metadata(
    target: Machine, precision: str, notes: Sequence[str], identity: str, formats: Mapping[str, int]
) -> dict[str, Any]:
    """What made a library, and of what. ``formats``: bytes of the weights by dtype."""
    return {
        **versions(target),
        "precision": precision,
        "model": identity,
        "weights_by_dtype": dict(sorted(formats.items())),
        "notes": list(notes),
    }


def loops_of(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """The loops of the kernels in words, by their symbols, for readers of the library."""
    found = {k.symbol: [line.to_json() for line in k.lines] for k in kernels if k.lines}
    return {"loops": found} if found else {}


def versions(target: Machine) -> dict[str, Any]:
    """The target and the versions of what made the code."""
    tvm = installed("apache-tvm") or "unknown"
    found = {"gtco": __version__, "tvm": tvm, "target": target.to_json()}
    if isinstance(target, GpuTarget):
        found["nvrtc"] = installed("nvidia-cuda-nvrtc") or "unknown"
    return found


def describe(stage: Stage, choice: Pick) -> dict[str, Any]:
    """What ``gtco inspect`` shows of a stage; of one for GPUs also the unit that computes."""
    work: Any = choice.sketch.workload(choice.config)
    return {
        "name": node_name(stage),
        "key": stage.key,
        "operators": [op["op"] if op.kind == "relax" else op.kind for op in stage.operators],
        "inputs": [str(i.type) for i in stage.inputs],
        "output": str(stage.output.type),
        "structure": choice.sketch.structure,
        "schedule": choice.config.to_json(),
        "flops": work.flops,
        "multiplies": multiplied(stage),
        "bytes": stage.input_bytes + stage.output.type.nbytes,
        "predicted_seconds": choice.seconds,
        **({"unit": work.unit} if isinstance(work, Launch) else {}),
    }


def origins(stage: Stage, packings: Mapping[str, Packing]) -> dict[str, Any]:
    """Where a stage comes from, for pictures of the model.

    - ``nodes``: for each operator the model's node; "" where gtco made the operator;
    - ``results``: the type of each operator's result;
    - ``tensors``: the names of the inputs and of the output;
    - ``packed``: by an input's number, the shape in which the kernel reads a constant, where that
      is not the constant's own;
    - ``layout``: of images, NCHW or NHWC; "" if no operator has one.
    """
    layouts = (op.get("layout") for op in stage.operators)
    return {
        "nodes": [op.name for op in stage.operators],
        "results": [str(op.type) for op in stage.operators],
        "tensors": [*(given.name for given in stage.inputs), stage.output.output],
        "packed": {
            str(number): list(packings[given.name].packed_shape)
            for number, given in enumerate(stage.canonical.inputs)
            if given.name in packings
        },
        "layout": next(filter(None, layouts), ""),
    }


def node_name(stage: Stage) -> str:
    """What a stage is called: the model's node that its work is of, a product or the like before a
    reduction and that before the rest; without a name of the model's, its tensor's."""
    named = [op for op in stage.operators if op.name]
    for wanted in ({COMPLEX}, {REDUCTION}, {OPAQUE, ELEMENTWISE, INJECTIVE}):
        if found := [op.name for op in named if pattern(op.kind) in wanted]:
            return found[-1]
    return stage.output.output
