"""Batches of drawn graphs, compiled by gtco in this process and compared with ONNX Runtime.

A compile of twenty graphs costs little more than one of a single graph. As in
:mod:`tests.end_to_end.nodes.runner`, there are no workers and no process for onnxsim.

The tolerance of an output has two parts: a share of its largest magnitude, and a multiple of the
effect that small changes have in ONNX Runtime (without its own fusions). The changes are made to
the inputs, to the constants of products, and to every tensor between; they are about as large as
the precision's roundings (:data:`BOUNDS`). So an output that cancels, or that follows a rounding or
a comparison which may fall either way, gets a tolerance that fits. Operators that cancel inside are
written out before (:mod:`tests.random.definitions`), so that the changes reach the terms that they
subtract.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import gtco.compiler
import gtco.driver.making
import gtco.frontend.onnx
from gtco.runtime.module import load
from gtco.support.errors import GtcoError, UnsupportedError
from tests.end_to_end.nodes.runner import InProcess, simplify
from tests.random.builder import Drawn, model_of
from tests.random.definitions import written_out
from tests.random.draw import SPECIAL


@dataclass(frozen=True)
class Bound:
    """The errors that an output may have. ``tolerance`` is relative to its largest magnitude, and
    ``condition`` multiplies the effect of the changes. ``nudge`` and ``rounding`` are the relative
    changes of the inputs and of the tensors between; ``most`` is the largest. ``rough`` is the
    share of elements in which a rounding or a comparison may fall the other way.
    """

    tolerance: float
    condition: float
    nudge: float
    rounding: float
    most: float
    rough: float


# fp32: the changes are a share of the rounding of float32; a mask of -1e9 or finfo.min absorbs the
# largest. bf16: each change is the rounding of an operand of a product, all at once.
BOUNDS = {
    "fp32": Bound(1e-4, 50.0, 1e-6, 2.0**-22, 0.005, 0.02),
    "bf16": Bound(2e-2, 8.0, 2.0**-9, 2.0**-9, 0.5, 0.1),
}
PRODUCTS = {"MatMul": 2, "Gemm": 2, "Conv": 2, "ConvTranspose": 2, "Einsum": 2, "Attention": 3}
# ONNX does not say what these make of a NaN: some engines pass it on, and others drop it.
ORDERING = frozenset(
    "MaxPool GlobalMaxPool Max Min ReduceMax ReduceMin TopK QuantizeLinear "
    "DynamicQuantizeLinear DynamicQuantizeMatMul".split()
)
RUNS = 3  # each with other changes
Arrays = Mapping[str, np.ndarray]
# The outputs of a machine for the model, the inputs and the precision.
Runner = Callable[[onnx.ModelProto, Arrays, str], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Found:
    """A graph that gtco did wrong, and how."""

    seed: int
    opset: int
    kind: str  # "refused", "error", "wrong", "crash"; "range", "sizes": at open ones
    reason: str


@dataclass
class Tally:
    drawn: int = 0
    compared: int = 0
    invalid: int = 0  # refused by ONNX Runtime: the generator's fault, or a limit of ONNX Runtime
    ranged: int = 0  # of other graphs, compared at several batches of one library
    sized: int = 0  # of others again, compared at many sizes of one library
    kinds: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)


@contextmanager
def in_process() -> Iterator[None]:
    """Compiles in this process from here on."""
    kept = gtco.driver.making.Workers, gtco.frontend.onnx.run_onnxsim
    gtco.driver.making.Workers = InProcess  # type: ignore[assignment, misc]
    gtco.frontend.onnx.run_onnxsim = simplify
    try:
        yield
    finally:
        gtco.driver.making.Workers, gtco.frontend.onnx.run_onnxsim = kept  # type: ignore[misc]


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """ONNX Runtime, operator by operator."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@dataclass(frozen=True)
class Wanted:
    """The outputs of ONNX Runtime, without changes and with small changes on the way."""

    value: np.ndarray
    changed: tuple[np.ndarray, ...]
    bound: Bound = BOUNDS["fp32"]


def wanted(model: onnx.ModelProto, feeds: Arrays, precision: str = "fp32") -> dict[str, Wanted]:
    bound, model = BOUNDS[precision], written_out(model)
    runner = session(model)
    names = [o.name for o in runner.get_outputs()]
    values = runner.run(names, dict(feeds))
    unsteady, shapes = with_changes(model, bound.most)
    other, rng = session(unsteady), np.random.default_rng(0)
    runs = []
    for _ in range(RUNS):
        changes: dict[str, np.ndarray] = {}
        for name, array in feeds.items():
            changes[name] = array
            if array.dtype == np.float32:
                with np.errstate(all="ignore"):
                    change = 1 + bound.nudge * rng.choice([-1.0, 1.0], array.shape)
                    changes[name] = np.asarray(array * change, np.float32)
        for name, shape in shapes.items():
            signs = rng.choice([-bound.rounding, bound.rounding], shape)
            changes[name] = np.asarray(signs, np.float32)
        runs.append(other.run(names, changes))
    return {n: Wanted(v, tuple(r), bound) for n, v, *r in zip(names, values, *runs, strict=True)}


def with_changes(
    model: onnx.ModelProto, most: float
) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """The model in which each float tensor t between its nodes, and each constant of a product,
    becomes t + clip(t u), and the shapes of the inputs u.
    """
    made = onnx.shape_inference.infer_shapes(model, data_prop=True)  # Shape and Reshape
    graph = made.graph
    types = {v.name: v.type.tensor_type for v in graph.value_info}
    shapes: dict[str, tuple[int, ...]] = {}
    nodes: list[onnx.NodeProto] = []

    def change(raw: str, name: str, shape: tuple[int, ...]) -> None:
        shapes[f"{name}_u"] = shape
        make = onnx.helper.make_node
        nodes.extend(
            [
                make("Mul", [raw, f"{name}_u"], [f"{name}_tu"]),
                make("Clip", [f"{name}_tu", "least_change", "most_change"], [f"{name}_change"]),
                make("Add", [raw, f"{name}_change"], [name]),
            ]
        )

    constants = {
        t.name: tuple(t.dims) for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT
    }
    for node in graph.node:
        for k in range(min(PRODUCTS.get(node.op_type, 0), len(node.input))):
            name = node.input[k]
            if name in constants:
                node.input[k] = f"{name}_changed"
                if f"{name}_changed_u" not in shapes:
                    change(name, f"{name}_changed", constants[name])
        nodes.append(node)
        for k, name in enumerate(node.output):
            if name not in types or types[name].elem_type != onnx.TensorProto.FLOAT:
                continue
            node.output[k] = f"{name}_raw"
            change(f"{name}_raw", name, tuple(d.dim_value for d in types[name].shape.dim))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    for name, value in (("least_change", -most), ("most_change", most)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    return made, shapes


def orders_nan(model: onnx.ModelProto, feeds: Arrays) -> bool:
    """True if a NaN gets to an operator whose result ONNX does not define for it."""
    nodes = model.graph.node
    operands = {x for node in nodes if node.op_type in ORDERING for x in node.input}
    made = sorted(operands & {x for node in nodes for x in node.output})
    arrays = [feeds[x] for x in operands & feeds.keys()]
    if made:
        seen = onnx.ModelProto()
        seen.CopyFrom(model)
        known = {o.name for o in model.graph.output}
        seen.graph.output.extend(onnx.ValueInfoProto(name=x) for x in made if x not in known)
        arrays += session(seen).run(made, dict(feeds))
    return any(a.dtype.kind == "f" and bool(np.isnan(a).any()) for a in arrays)


def difference(got: np.ndarray, want: Wanted, smooth: bool) -> str:
    """How the output differs; "" if it is right."""
    with np.errstate(invalid="ignore"):
        return _difference(got, want, smooth)


def _difference(got: np.ndarray, want: Wanted, smooth: bool) -> str:
    bound = want.bound
    if got.shape != want.value.shape or got.dtype != want.value.dtype:
        return f"{got.dtype}{got.shape}, not {want.value.dtype}{want.value.shape}"
    if got.dtype.kind != "f":
        wrong = int((got != want.value).sum())
        either = int(np.any([want.value != c for c in want.changed], axis=0).sum())
        allowed = 2 * either if smooth else 2 * either + bound.rough * got.size + 1
        return f"{wrong} of {got.size} differ" if wrong > allowed else ""
    a, b, *changed = (np.atleast_1d(x).astype(np.float64) for x in (got, want.value, *want.changed))
    usual = np.isfinite(b)
    if not all(np.array_equal(np.isfinite(c), usual) for c in changed):
        return ""  # on the edge of overflow
    same = np.isfinite(a) == usual
    same[~usual] = (a[~usual] == b[~usual]) | (np.isnan(a[~usual]) & np.isnan(b[~usual]))
    both = usual & np.isfinite(a)
    change, error = np.zeros_like(b), np.zeros_like(b)
    change[both] = np.max([np.abs(b - c)[both] for c in changed], axis=0)
    error[both] = np.abs(a - b)[both]
    allowed = bound.tolerance * np.abs(b[both]).max(initial=0.0)
    allowed += bound.condition * change.max(initial=0.0)
    wrong = ~same | (error > allowed + 1e-30)
    count = int(wrong.sum())
    if not count or (not smooth and count <= bound.rough * got.size + 1):
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{count} of {got.size} differ, first at {at}: {a[at]}, not {b[at]}"


def run(model: onnx.ModelProto, feeds: Arrays, precision: str = "fp32") -> dict[str, np.ndarray]:
    """gtco's outputs. A failure that it would work around is an error here (``strict``)."""
    with tempfile.TemporaryDirectory(prefix="gtco-random-") as folder:
        library = Path(folder, "random.so")
        simplified = model.opset_import[0].version not in SPECIAL
        gtco.compiler.compile_to_file(
            model,
            library,
            strict=True,
            simplify=simplified,
            precision=precision,
            cache=False,  # no graph is drawn twice
        )
        with load(library, threads=2) as compiled:
            return dict(compiled.run(dict(feeds)))


def check(
    graphs: Sequence[Drawn], tally: Tally, precision: str = "fp32", run: Runner = run
) -> None:
    """Compares all of them in one compile if that works, and otherwise in halves."""
    feeds = {k: v for g in graphs for k, v in g.feeds.items()}
    model = model_of(graphs)
    try:
        want = wanted(model, feeds, precision)
    except Exception:
        if len(graphs) > 1:
            return _halves(graphs, tally, precision, run)
        tally.invalid += 1
        return None
    try:
        got = run(model, feeds, precision)
    except Exception as error:
        if len(graphs) > 1:
            return _halves(graphs, tally, precision, run)
        kind = "refused" if isinstance(error, UnsupportedError) else "error"
        label = "" if isinstance(error, GtcoError) else f"{type(error).__name__}: "
        return _found(graphs[0], kind, label + str(error), tally)
    for graph in graphs:
        tally.compared += 1
        tally.kinds.update(set(graph.kinds))
        wrong = [
            f"{t.name}: {d}"
            for t in graph.outputs
            if (d := difference(got[t.name], want[t.name], graph.smooth))
        ]
        if wrong and not orders_nan(model_of([graph]), graph.feeds):
            _found(graph, "wrong", "; ".join(wrong), tally)
    return None


def _halves(graphs: Sequence[Drawn], tally: Tally, precision: str, run: Runner) -> None:
    middle = len(graphs) // 2
    check(graphs[:middle], tally, precision, run)
    check(graphs[middle:], tally, precision, run)


def _found(graph: Drawn, kind: str, reason: str, tally: Tally) -> None:
    tally.found.append(Found(graph.seed, graph.opset, kind, reason))
