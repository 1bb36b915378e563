"""Drawn graphs whose batch stays open. Those that the proof of ``gtco/graph/samples.py`` accepts
are compiled for a range of batches and compared at several.

A graph is drawn at a batch of OPEN, a prime that no other size is a multiple of. So the sizes that
follow from the batch are known: they become a symbol in the inputs, and -1 in the target of a
Reshape. A graph that fixes its batch in another way (a constant with a number for each sample) is
left out, because ONNX Runtime refuses it at another batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import gtco.compiler
from gtco.driver.sizes.parts import proven
from gtco.frontend.onnx import load_onnx, read_onnx
from gtco.graph.lower.walk import lower
from gtco.runtime.module import load
from gtco.support.errors import GtcoError, ModelError, ShapeError, UnsupportedError
from tests.random.builder import Drawn, model_of
from tests.random.draw import SPECIAL, draw
from tests.random.engine import (
    Arrays,
    Found,
    Tally,
    difference,
    orders_nan,
    session,
    wanted,
)

OPEN = 13
SYMBOL, HIGH = "batch", 40
COMPARED = (1, 2, 7, 13, 22)  # batches; one of several parts, whichever they are
PROVED = (4, HIGH)  # the proof is asked at these


def graphs_of(first: int, count: int, opset: int) -> list[Drawn]:
    """Of the graphs of these seeds, those that ONNX Runtime runs at any batch, and whose samples
    do not depend on each other by gtco's proof.
    """
    drawn = [draw(seed, opset, OPEN) for seed in range(first, first + count)]
    return [graph for graph in drawn if runs(graph) and is_proven(graph)]


def open_model(graphs: Sequence[Drawn]) -> onnx.ModelProto:
    """The graphs side by side in one model, with one symbol for their batch."""
    model = model_of(graphs)
    targets = {node.input[1] for node in model.graph.node if node.op_type == "Reshape"}
    for tensor in model.graph.initializer:
        if tensor.name in targets:
            sizes = numpy_helper.to_array(tensor)
            sizes = np.where((sizes > 0) & (sizes % OPEN == 0), -1, sizes)
            tensor.CopyFrom(numpy_helper.from_array(sizes, tensor.name))
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == OPEN:
                dim.dim_param = SYMBOL
    for value in model.graph.output:
        for number, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value % OPEN == 0:
                dim.dim_param = f"{value.name}.{number}"
    return model


def model_at(graphs: Sequence[Drawn], batch: int) -> onnx.ModelProto:
    """The model at this batch."""
    model = open_model(graphs)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = batch
    return model


def feeds_at(graphs: Sequence[Drawn], batch: int) -> dict[str, np.ndarray]:
    """Their inputs at this batch: samples of those that were drawn, with other normal numbers."""
    rng = np.random.default_rng(batch)
    found = {}
    for name, array in ((k, v) for graph in graphs for k, v in graph.feeds.items()):
        for axis, size in enumerate(array.shape):
            if size == OPEN:
                array = np.take(array, rng.integers(0, OPEN, batch), axis)
        if array.dtype == np.float32:
            drawn = np.asarray(rng.standard_normal(array.shape), np.float32)
            array = np.where(np.isfinite(array), drawn, array)
        found[name] = array
    return found


def runs(graph: Drawn) -> bool:
    """True if ONNX Runtime runs the graph at several batches."""
    try:
        runner = session(open_model([graph]))
        for batch in COMPARED[:3]:
            runner.run(None, feeds_at([graph], batch))
    except Exception:  # whatever ONNX Runtime says of it
        return False
    return True


def is_proven(graph: Drawn) -> bool:
    """True if gtco proves that the graph may be run in parts."""
    source = open_model([graph])
    try:
        graphs = {
            batch: lower(load_onnx(read_onnx(source), shapes={SYMBOL: batch}, simplify=False))
            for batch in PROVED
        }
        proven(SYMBOL, graphs)
    except (ModelError, ShapeError, UnsupportedError):
        return False
    return True


def halves_differ(graph: Drawn) -> str:
    """How the outputs of a batch differ from those of its two halves, by ONNX Runtime alone; "" if
    they are the same. It holds the proof against the graph's meaning, and compiles nothing.
    """
    runner, whole = session(open_model([graph])), feeds_at([graph], 5)
    open_inputs = {
        value.name: axis
        for value in open_model([graph]).graph.input
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param
    }

    def part(begin: int, end: int) -> Arrays:
        return {
            name: np.take(array, range(begin, end), open_inputs[name])
            if name in open_inputs
            else array
            for name, array in whole.items()
        }

    want = runner.run(None, whole)
    first, second = runner.run(None, part(0, 2)), runner.run(None, part(2, 5))
    for output, value, one, two in zip(graph.outputs, want, first, second, strict=True):
        if value.shape == one.shape == two.shape:  # the same for all samples
            got = one
        else:
            axis = next(n for n, size in enumerate(value.shape) if size != one.shape[n])
            got = np.concatenate([one, two], axis)
        if got.shape != value.shape or not np.allclose(got, value, 1e-3, 1e-4, equal_nan=True):
            return f"{output.name} of {value.shape}"
    return ""


def run(
    model: onnx.ModelProto, feeds: Mapping[int, Arrays], precision: str
) -> dict[int, dict[str, np.ndarray]]:
    """gtco's outputs at each batch, from one library."""
    with tempfile.TemporaryDirectory(prefix="gtco-random-") as folder:
        library = Path(folder, "random.so")
        gtco.compiler.compile_to_file(
            model,
            library,
            dims={SYMBOL: f"1..{HIGH}"},
            strict=True,
            simplify=model.opset_import[0].version not in SPECIAL,
            precision=precision,
            cache=False,
        )
        with load(library, threads=2) as compiled:
            return {batch: dict(compiled.run(dict(given))) for batch, given in feeds.items()}


def check(graphs: Sequence[Drawn], tally: Tally, precision: str = "fp32") -> None:
    """Compares all of them in one compile if that works, and otherwise in halves."""
    if not graphs:
        return
    feeds = {batch: feeds_at(graphs, batch) for batch in COMPARED}
    want = None
    try:
        want = {n: wanted(model_at(graphs, n), feeds[n], precision) for n in COMPARED}
        got = run(open_model(graphs), feeds, precision)
    except Exception as error:
        if want is None and len(graphs) == 1:
            return  # ONNX infers other shapes at a known batch, so there is no reference
        if len(graphs) > 1:
            middle = len(graphs) // 2
            check(graphs[:middle], tally, precision)
            check(graphs[middle:], tally, precision)
            return
        label = "" if isinstance(error, GtcoError) else f"{type(error).__name__}: "
        tally.found.append(Found(graphs[0].seed, graphs[0].opset, "range", label + str(error)))
        return
    for graph in graphs:
        tally.ranged += 1
        wrong = [
            f"{output.name} at a batch of {n}: {reason}"
            for n in COMPARED
            for output in graph.outputs
            if (reason := difference(got[n][output.name], want[n][output.name], graph.smooth))
            and not orders_nan(model_at([graph], n), feeds_at([graph], n))
        ]
        if wrong:
            tally.found.append(Found(graph.seed, graph.opset, "range", "; ".join(wrong)))


def save(found: Found, folder: Path) -> None:
    """Saves the graph as ``SEED.onnx``, with its batch open, and its inputs at the largest."""
    graph = draw(found.seed, found.opset, OPEN)
    onnx.save(open_model([graph]), folder / f"{found.seed}.onnx")
    np.savez(folder / f"{found.seed}.npz", **feeds_at([graph], COMPARED[-1]))  # type: ignore[arg-type]
