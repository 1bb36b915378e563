"""The sketch rules for CPUs, in the order in which they are asked. Each rule answers with a sketch
for a stage, or with None. The rules for GPUs are in :mod:`gtco.tensor.sketch.cuda_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine, Target
from gtco.tensor.analysis.chains import readable
from gtco.tensor.operators import OPERATORS, is_anchor
from gtco.tensor.sketch.across import cpu as across
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.depthwise import cpu as depthwise
from gtco.tensor.sketch.dot import cpu as dot
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.grid_sample import cpu as grid_sample
from gtco.tensor.sketch.moments import cpu as moments
from gtco.tensor.sketch.pool import cpu as pool
from gtco.tensor.sketch.resize import cpu as resize
from gtco.tensor.sketch.rows import cpu as rows
from gtco.tensor.sketch.scan import cpu as scan
from gtco.tensor.sketch.scatter import cpu as scatter
from gtco.tensor.sketch.strassen import cpu as strassen
from gtco.tensor.sketch.topk import cpu as topk
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.space import Sketch, Space
from gtco.tensor.stage import Stage

Rule = Callable[[Stage, Target], Sketch | None]
Failed = Callable[[str, Exception], None]

RULES: tuple[Rule, ...] = (
    gemm.match,
    strassen.match,
    convolution.match,
    winograd.match,
    dot.match,
    attention.match,
    depthwise.match,
    rows.match,
    across.match,
    moments.match,
    pool.match,
    resize.match,
    grid_sample.match,
    scan.match,
    scatter.match,
    topk.match,
    elementwise.match,
    fallback.match,
)

# The anchors, in topological order, that some rule takes: none, one, or a layer_norm before a
# product. No rule is asked for a stage with other anchors.
ANCHORS: frozenset[tuple[str, ...]] = frozenset(
    [(), ("layer_norm", "matmul"), *((kind,) for kind in OPERATORS if is_anchor(kind))]
)
_BEGUN = frozenset(
    some for full in ANCHORS for n in range(len(full) + 1) for some in combinations(full, n)
)


def possible(anchors: tuple[str, ...]) -> bool:
    """True if a stage with these anchors, or a stage that adds operators to it, may have a
    sketch.
    """
    return anchors in _BEGUN


def family(rule: Callable[..., Any]) -> str:
    """The family that a rule belongs to: the folder of its module."""
    return rule.__module__.split(".")[-2]


def _nobody(rule: str, error: Exception) -> None:
    """Ignores the report."""


def _of_nothing(stage: Stage) -> bool:
    """True if the output is empty, or if an operator that does not read element by element has an
    empty input. Then there is nothing to block, and only the fallback is asked.
    """
    taken = (x for op in stage.operators if not readable(op) for x in op.inputs)
    return 0 in stage.output.type.shape or any(0 in stage.types[x].shape for x in taken)


def sketches(stage: Stage, target: Machine, failed: Failed = _nobody) -> list[Sketch]:
    """Every structure that some rule derives for the stage; empty if no rule does.

    A rule that raises has a bug, but the stage is not given up: ``failed(rule, error)`` is called,
    and the other rules are asked.
    """
    found: list[Sketch] = []
    if tuple(op.kind for op in stage.operators if is_anchor(op.kind)) not in ANCHORS:
        return found
    rules: Sequence[Callable[[Stage, Any], Any]] = RULES
    if isinstance(target, GpuTarget):
        from gtco.tensor.sketch.cuda_rules import (
            RULES as rules,  # imported here: a compile for a CPU does not need them
        )
    if _of_nothing(stage):
        rules = rules[-1:]  # the fallback
    for rule in rules:
        try:
            sketch = rule(stage, target)
        except Exception as error:
            failed(family(rule), error)
            continue
        if sketch is not None:
            found.append(sketch)
    return found


def space_of(stage: Stage, target: Machine, failed: Failed = _nobody) -> Space:
    """All programs of the stage: the union of what its sketches can make."""
    return Space(stage, target, tuple(sketches(stage, target, failed)))
