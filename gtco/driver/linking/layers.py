"""What each stage of a library loses: its output beside that of the model in float32.

Beside the library a second one is made of the same kernels and weights, whose outputs are those of
all stages. The model in float32 is the graph before its operands were rounded, evaluated by numpy.
Tensors of the two graphs are matched by :class:`Twins`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from gtco.graph.byte_weights import scaled_product
from gtco.graph.graph import Graph
from gtco.runtime.artifact import Artifact
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.publish import temporary
from gtco.runtime.writing.linking import build_artifact
from gtco.support.counting import counted
from gtco.support.dtypes import is_float
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, Stage
from gtco.verification.cases import usual

Array = np.ndarray[Any, Any]
MOST_BYTES = 1 << 30  # bytes of the stages' outputs that are compared
MOST_SECONDS = 120.0  # seconds for finding what stages lose by themselves
IDS = (0, 4)  # the range of integer inputs: any table of rows has so many
REFERENCE = "the graph in float32"


@dataclass(frozen=True)
class StageLoss:
    """What the output of a stage has lost. An error is the root mean square of the difference over
    that of the float32 output; of integers and booleans it is the share of elements that differ. It
    is None if infinities are in other places.

    - ``accumulated``: from the model's inputs on;
    - ``own``: by the stage alone, on the inputs that it had in the run. None also if the float32
      graph does not compute the output from these alone.
    """

    stage: int
    accumulated: float | None
    own: float | None


@dataclass(frozen=True)
class StageLosses:
    """The losses by stage, in order.

    - ``reference``, ``inputs``: what it was compared with, and on which inputs, in words;
    - ``left_out``: why some stages are not there, in sentences.
    """

    reference: str
    inputs: str
    stages: tuple[StageLoss, ...]
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        known = [s for s in self.stages if s.accumulated is not None]
        if not known:
            return "no stage was compared"
        worst = max(known, key=lambda s: s.accumulated or 0.0)
        return (
            f"{len(self.stages)} stages compared with {self.reference}; largest error at stage "
            f"{worst.stage}: {worst.accumulated:.1e}"
        )


class Twins:
    """For each tensor of a graph, the tensor of the float32 graph that it would be without
    roundings: the one of its name, or for a cast that of what is cast. Movement that was copied, or
    moves rounded tensors, is found by what it does.
    """

    def __init__(self, rounded: Graph, plain: Graph) -> None:
        self.rounded, self.plain = rounded, plain
        known = {self._work(op, op.inputs): op.output for op in plain.operators.values()}
        self.found: dict[str, str] = {}
        for op in rounded.operators.values():
            sources = tuple(self.of(x) or "" for x in op.inputs)
            if self._is_plain(op.output):
                self.found[op.output] = op.output
            elif self._rounds(op) and sources[0]:
                self.found[op.output] = sources[0]
            elif (twin := known.get(self._work(op, sources))) is not None:
                self.found[op.output] = twin

    def of(self, tensor: str) -> str | None:
        """The name of the tensor's twin; None if it has no twin."""
        return tensor if self._is_plain(tensor) else self.found.get(tensor)

    def _is_plain(self, tensor: str) -> bool:
        """True if both graphs have the tensor, made by the same kind of operator."""
        if self.plain.types.get(tensor) is None or tensor not in self.rounded.types:
            return False
        one, other = self.plain.producer(tensor), self.rounded.producer(tensor)
        shapes = {graph.types[tensor].shape for graph in (self.plain, self.rounded)}
        kind = scaled_product(self.rounded, other) or (other and other.kind)
        return len(shapes) == 1 and (one and one.kind) == kind

    def _rounds(self, op: Operator) -> bool:
        """True for a cast from one float to another."""
        dtypes = (op.type.dtype, self.rounded.types[op.inputs[0]].dtype) if op.inputs else ()
        return op.kind == "cast" and all("float" in dtype for dtype in dtypes)

    @staticmethod
    def _work(op: Operator, sources: Sequence[str]) -> tuple[Any, ...]:
        return op.kind, op.attrs, tuple(sources), op.type.shape


def compared(stages: Sequence[Stage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages' outputs that are to be compared, and why others are not: the largest are left out
    until the rest has :data:`MOST_BYTES`.
    """
    outputs = [s.output for s in stages if s.output.type.size]
    total, kept = 0, []
    for output in sorted(outputs, key=lambda op: op.type.nbytes):
        total += output.type.nbytes
        if total <= MOST_BYTES:
            kept.append(output.output)
    if not (left := len(outputs) - len(kept)):
        return tuple(kept), ()
    those = counted(left, "stage")
    why = f"the outputs of {those} are left out: all have more than {MOST_BYTES >> 30} GiB"
    return tuple(kept), (why,)


def with_outputs(graph: Graph, more: Sequence[str]) -> Graph:
    """A copy of the graph that also gives these tensors."""
    copied = graph.copy()
    copied.outputs = tuple(dict.fromkeys([*graph.outputs, *more]))
    return copied


def run_all(
    artifact: Artifact | GpuArtifact, opened: Callable[[Path], Any]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs, and all outputs of the artifact's library, which ``opened`` opens."""
    with temporary("layers") as folder:
        library = build_artifact(artifact, folder, folder / "layers.so")
        with opened(library) as compiled:
            ranges = {spec.name: IDS for spec in compiled.inputs}
            given = usual(compiled.inputs, np.random.default_rng(0), None, ranges)
            return given, compiled.run(given)


def losses(
    rounded: Graph,
    plain: Graph,
    stages: Sequence[Stage],
    given: Mapping[str, Array],
    made: Mapping[str, Array],
    left_out: Sequence[str] = (),
) -> StageLosses:
    """The losses of the stages whose outputs are among ``made``, the library's tensors by name.
    ``given``: the model's inputs, standard normal ones. ``plain`` needs its constants.
    """
    twins = Twins(rounded, plain)
    numbers = [n for n, stage in enumerate(stages) if stage.output.output in made]
    found = {n: twin for n in numbers if (twin := twins.of(stages[n].output.output)) is not None}
    exact = _values(plain, given, set(found.values()))
    assert exact is not None, "the inputs suffice"
    every = {**given, **made}
    known, end, late = [], monotonic() + MOST_SECONDS, False
    for number, twin in found.items():
        got = made[stages[number].output.output]
        late = late or monotonic() > end
        own = None if late else _own(stages[number], twins, every, got)
        known.append(StageLoss(number, error(got, exact[twin]), own))
    why = [*left_out]
    if unlike := len(numbers) - len(found):
        why.append(f"{unlike} stages make tensors that the graph in float32 does not have")
    if late:
        why.append(f"what the later stages lose alone took longer than {MOST_SECONDS:.0f} s")
    return StageLosses(REFERENCE, "standard normal inputs", tuple(known), tuple(why))


def _own(stage: Stage, twins: Twins, made: Mapping[str, Array], got: Array) -> float | None:
    """The stage's error on its inputs in the run."""
    known: dict[str, Array] = {}
    reads = [i.name for i in stage.inputs if not i.constant]
    # A stage may read a tensor twice, rounded and as it was. The wider one is kept: it comes last.
    for read in sorted(reads, key=lambda name: made[name].dtype.itemsize if name in made else 0):
        if (twin := twins.of(read)) is None or read not in made:
            return None
        known[twin] = _plain(made[read], twins.plain, twin)
    target = twins.of(stage.output.output)
    assert target is not None
    if target in known:  # the stage rounds or copies a tensor
        return error(got, known[target])
    exact = _values(twins.plain, known, {target})
    return None if exact is None else error(got, exact[target])


def _plain(array: Array, plain: Graph, twin: str) -> Array:
    """The array in the dtype that its twin has."""
    return np.asarray(array).astype(np.dtype(plain.types[twin].dtype), copy=False)


def _needed(plain: Graph, known: Mapping[str, Array], wanted: set[str]) -> set[str] | None:
    """The tensors to compute for the wanted ones, from the known ones and constants; None if these
    do not suffice.
    """
    needed: set[str] = set()
    todo = list(wanted)
    while todo:
        tensor = todo.pop()
        if tensor in needed or tensor in known or plain.is_constant(tensor):
            continue
        needed.add(tensor)
        if (op := plain.producer(tensor)) is None:
            return None
        todo += op.inputs
    return needed


def _values(plain: Graph, known: Mapping[str, Array], wanted: set[str]) -> dict[str, Array] | None:
    """The wanted tensors of the graph, from the known ones and constants; None if these do not
    suffice. Others are dropped after their last use.
    """
    if (needed := _needed(plain, known, wanted)) is None:
        return None
    order = [op for op in plain.operators.values() if op.output in needed]
    last = {x: n for n, op in enumerate(order) for x in op.inputs}
    values = dict(known)
    for number, op in enumerate(order):
        arrays = [values[x] if x in values else plain.constants[x] for x in op.inputs]
        values[op.output] = evaluate(op, *arrays)
        for x in set(op.inputs):
            if last[x] == number and x not in wanted:
                values.pop(x, None)
    return values


def error(got: Array, wanted: Array) -> float | None:
    """The relative error of an array; see :class:`StageLoss`."""
    if not is_float(wanted.dtype):
        return float(np.mean(got != wanted)) if wanted.size else 0.0
    a, b = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(b)
    if bool((np.isfinite(a) != finite).any()):
        return None
    difference = np.where(finite, a - np.where(finite, b, 0.0), 0.0)[finite]
    size = sqrt(float((b[finite] ** 2).sum()))
    lost = sqrt(float((difference**2).sum()))
    found = lost / size if size else (0.0 if not lost else float("inf"))
    return found if isfinite(found) else None
