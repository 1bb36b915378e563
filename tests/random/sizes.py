"""Drawn graphs whose last axes stay open, compiled for many sizes: so many that they share kernels
(:mod:`gtco.driver.sizes.sharing`). All sizes are compared, in an order in which each size has
others before it.

Most graphs are those of :mod:`tests.random.images`, which hold at any size. Others are those of
:mod:`tests.random.draw`, drawn at HEIGHT and WIDTH, two primes. Where a Reshape or an Expand has a
multiple of them, it becomes one of the size that the input has. Graphs that ONNX Runtime does not
run at all sizes are left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import onnx
from onnx import helper, numpy_helper

import gtco.compiler
from gtco.runtime.module import load
from gtco.support.errors import GtcoError
from tests.end_to_end.nodes.runner import simplify
from tests.random.builder import Drawn, model_of
from tests.random.draw import draw
from tests.random.engine import Arrays, Found, Tally, difference, orders_nan, session, wanted
from tests.random.images import HEIGHT, WIDTH, draw_image

SYMBOLS = {HEIGHT: "height", WIDTH: "width"}
GENERAL = 4  # of so many graphs one is general
TARGETS = ("Reshape", "Expand")
Sizes = Mapping[str, int]
SMALL, ODD, LARGE = (1, 2, 3, 4), (5, 7, 9, 13, 15, 17, 19, 23, 31), (8, 16, 24, 32, 48, 64)


def dims_of(first: int) -> dict[str, list[int]]:
    """The sizes of the graphs from seed ``first`` on: 5 to 12 choices, on one axis or on two, small
    ones among them for some.
    """
    random = Random(first)
    pool = [*ODD, *LARGE, *(SMALL if random.random() < 0.5 else ())]
    if random.random() < 0.5:
        count = random.randint(5, 12)
        one = random.sample(pool, count)
        return {"height": one, "width": [random.choice(ODD)]} if random.random() < 0.5 else {
            "height": [random.choice(ODD)], "width": one
        }  # fmt: skip
    rows, columns = random.choice([(2, 3), (3, 2), (2, 5), (3, 3), (3, 4), (4, 3)])
    heights = random.sample(pool, rows)
    widths = random.sample(pool, columns)
    widths[0] = heights[0]  # equal height and width
    return {"height": heights, "width": list(dict.fromkeys(widths))}


def every(dims: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    return [dict(zip(dims, one, strict=True)) for one in product(*dims.values())]


def drawn(seed: int, opset: int) -> Drawn:
    """The graph of this seed, at HEIGHT and WIDTH."""
    if seed % GENERAL:
        return draw_image(seed, opset)
    return draw(seed, opset, last=(HEIGHT, WIDTH))


def graphs_of(first: int, count: int, opset: int) -> list[Drawn]:
    """Of the graphs of these seeds, those that ONNX Runtime runs at all sizes of ``first``."""
    sizes = every(dims_of(first))
    return [g for s in range(first, first + count) if runs(g := drawn(s, opset), sizes)]


def open_model(graphs: Sequence[Drawn]) -> onnx.ModelProto:
    """The graphs side by side in one model, with symbols for their height and width."""
    model = model_of(graphs)
    graph = model.graph
    constants = {t.name: t for t in graph.initializer}
    first = {name: next(iter(g.feeds)) for g in graphs for n in g.nodes for name in n.output}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        target = constants.get(node.input[1]) if node.op_type in TARGETS else None
        if target is not None and not node.name:
            sizes = numpy_helper.to_array(target).tolist()
            if any(size > 0 and (size % HEIGHT == 0 or size % WIDTH == 0) for size in sizes):
                made = _target(f"{node.output[0]}_target", first[node.output[0]], sizes)
                nodes += made
                node.input[1] = made[-1].output[0]
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim_name = SYMBOLS.get(dim.dim_value)
            if dim_name:
                dim.dim_param = dim_name
    for value in graph.output:
        for number, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}.{number}"
    return model


def _target(name: str, given: str, sizes: Sequence[int]) -> list[onnx.NodeProto]:
    """Nodes that compute a shape from that of the input ``given``, whose last axes are open."""

    def constant(values: Sequence[int], output: str) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [output], value_ints=list(values))

    nodes = [helper.make_node("Shape", [given], [f"{name}_all"])]
    parts = []
    for at, size in enumerate(sizes):
        part = f"{name}_{at}"
        rest, factors = size, []
        for number, prime in ((-2, HEIGHT), (-1, WIDTH)):
            while size > 0 and rest % prime == 0:
                rest //= prime
                factors.append(number)
        nodes.append(constant([rest], part))
        for count, number in enumerate(factors):
            nodes += [
                constant([number], f"{part}_axis{count}"),
                helper.make_node(
                    "Gather", [f"{name}_all", f"{part}_axis{count}"], [f"{part}_size{count}"]
                ),
                helper.make_node("Mul", [part, f"{part}_size{count}"], [f"{part}_{count}"]),
            ]
            part = f"{part}_{count}"
        parts.append(part)
    return [*nodes, helper.make_node("Concat", parts, [f"{name}_made"], axis=0)]


def model_at(graphs: Sequence[Drawn], sizes: Sizes) -> onnx.ModelProto:
    """The model at these sizes, whose arithmetic of sizes is folded."""
    model = open_model(graphs)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = sizes[dim.dim_param]
    return simplify(model, 60.0)[0]


def feeds_at(graphs: Sequence[Drawn], sizes: Sizes) -> dict[str, np.ndarray]:
    """Their inputs at these sizes: rows and columns of those that were drawn, with other normal
    numbers.
    """
    rng = np.random.default_rng([*sizes.values()])
    found = {}
    for name, array in ((k, v) for graph in graphs for k, v in graph.feeds.items()):
        for axis, size in enumerate(array.shape):
            if size in SYMBOLS:
                array = np.take(array, rng.integers(0, size, sizes[SYMBOLS[size]]), axis)
        if array.dtype == np.float32:
            random = np.asarray(rng.standard_normal(array.shape), np.float32)
            array = np.where(np.isfinite(array), random, array)
        found[name] = array
    return found


def runs(graph: Drawn, sizes: Sequence[Sizes]) -> bool:
    """True if ONNX Runtime runs the graph at these sizes, and no result is empty."""
    if not any(size in SYMBOLS for array in graph.feeds.values() for size in array.shape):
        return False
    try:
        runner = session(open_model([graph]))
        return all(
            output.size > 0 for one in sizes for output in runner.run(None, feeds_at([graph], one))
        )
    except Exception:  # whatever ONNX Runtime says of it
        return False


def order(count: int, seed: int) -> list[int]:
    """Every number twice, in an order in which no two neighbours are the same."""
    rng, found = np.random.default_rng(seed), [*range(count)]
    for number in rng.permutation(count).tolist():
        at = next(
            i for i in range(len(found), -1, -1) if number not in found[max(i - 1, 0) : i + 1]
        )
        found.insert(at, number)
    return found


def run(
    model: onnx.ModelProto,
    dims: Mapping[str, Sequence[int]],
    feeds: Sequence[Arrays],
    precision: str,
) -> list[dict[str, np.ndarray]]:
    """gtco's outputs at each choice of the sizes, from one library, whose shapes change with every
    call. Raises ValueError if a size has other results when it comes again.
    """
    names = {dim.dim_param for v in model.graph.input for dim in v.type.tensor_type.shape.dim}
    with tempfile.TemporaryDirectory(prefix="gtco-random-") as folder:
        library = Path(folder, "random.so")
        gtco.compiler.compile_to_file(
            model,
            library,
            dims={name: list(sizes) for name, sizes in dims.items() if name in names},
            strict=True,
            precision=precision,
            cache=False,
        )
        found: dict[int, dict[str, np.ndarray]] = {}
        with load(library, threads=2) as compiled:
            for number in order(len(feeds), len(feeds)):
                made = {k: v.copy() for k, v in compiled.run(dict(feeds[number])).items()}
                for name, value in found.setdefault(number, made).items():
                    if value.tobytes() != made[name].tobytes():
                        raise ValueError(f"{name} differs when sizes number {number} come again")
    return [found[number] for number in range(len(feeds))]


def check(graphs: Sequence[Drawn], tally: Tally, precision: str = "fp32", first: int = 0) -> None:
    """Compares all of them in one compile if that works, and otherwise in halves. ``first``: the
    seed of their sizes.
    """
    if not graphs:
        return
    dims = dims_of(first)
    sizes = every(dims)
    feeds = [feeds_at(graphs, one) for one in sizes]
    want = None
    try:
        want = [
            wanted(model_at(graphs, one), given, precision)
            for one, given in zip(sizes, feeds, strict=True)
        ]
        got = run(open_model(graphs), dims, feeds, precision)
    except Exception as error:
        if len(graphs) > 1:
            middle = len(graphs) // 2
            check(graphs[:middle], tally, precision, first)
            check(graphs[middle:], tally, precision, first)
        elif want is not None:
            label = "" if isinstance(error, GtcoError) else f"{type(error).__name__}: "
            tally.found.append(Found(graphs[0].seed, graphs[0].opset, "sizes", label + str(error)))
        return  # without a reference: ONNX infers other shapes at known sizes
    for graph in graphs:
        tally.sized += 1
        wrong = [
            f"{output.name} at {one}: {reason}"
            for one, made, right in zip(sizes, got, want, strict=True)
            for output in graph.outputs
            if (reason := difference(made[output.name], right[output.name], graph.smooth))
            and not orders_nan(model_at([graph], one), feeds_at([graph], one))
        ]
        if wrong:
            tally.found.append(Found(graph.seed, graph.opset, "sizes", "; ".join(wrong)))


def save(found: Found, folder: Path) -> None:
    """Saves the graph as ``SEED.onnx``, with its sizes open, and its inputs at those of drawing."""
    graph = drawn(found.seed, found.opset)
    onnx.save(open_model([graph]), folder / f"{found.seed}.onnx")
    np.savez(folder / f"{found.seed}.npz", **graph.feeds)  # type: ignore[arg-type]
