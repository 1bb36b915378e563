"""Makes a failing model small: outputs move inwards, inputs move forwards, nodes are dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import helper

from tests.random.engine import Arrays, session

Case = tuple[onnx.ModelProto, dict[str, np.ndarray]]


def shrink(model: onnx.ModelProto, feeds: Arrays, fails: Callable[[Case], bool]) -> Case:
    """The smallest model found for which ``fails`` still holds, and its inputs.

    Three moves are repeated until none helps: an inner tensor becomes the output, a tensor becomes
    an input with the value that it had, and what is not needed any more is dropped.
    """
    best: Case = (model, dict(feeds))
    moved = True
    while moved:
        moved = False
        values = _values(best)
        inner = [n for node in best[0].graph.node for n in node.output if n]
        outputs = [o.name for o in best[0].graph.output]
        steps: list[Case] = [_cut(best, values, [name], ()) for name in outputs if len(outputs) > 1]
        steps += [_cut(best, values, [name], ()) for name in inner if name not in outputs]
        steps += [_cut(best, values, outputs, (n,)) for n in reversed(inner) if n not in outputs]
        for case in steps:
            if len(case[0].graph.node) < len(best[0].graph.node) and _holds(fails, case):
                best, moved = case, True
                break
    return best


def _holds(fails: Callable[[Case], bool], case: Case) -> bool:
    try:
        return fails(case)
    except Exception:
        return False


def _values(case: Case) -> dict[str, np.ndarray]:
    """Every tensor of the graph, as ONNX Runtime computes it."""
    model = onnx.ModelProto()
    model.CopyFrom(case[0])
    names = [n for node in model.graph.node for n in node.output if n]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    runner = session(onnx.shape_inference.infer_shapes(model))
    return dict(zip(names, map(np.asarray, runner.run(names, case[1])), strict=True))


def _cut(
    case: Case, values: Mapping[str, np.ndarray], outputs: list[str], given: tuple[str, ...]
) -> Case:
    """The part of the graph between ``given`` (with their values) and ``outputs``."""
    graph = case[0].graph
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output) and not set(node.output) <= set(given):
            nodes.append(node)
            needed.update(node.input)
    nodes.reverse()
    feeds = {k: v for k, v in {**case[1], **{n: values[n] for n in given}}.items() if k in needed}

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )

    made = helper.make_graph(
        nodes,
        "shrunk",
        [info(k, v) for k, v in feeds.items()],
        [info(n, values[n]) for n in outputs],
        [t for t in graph.initializer if t.name in needed],
    )
    model = helper.make_model(made, opset_imports=case[0].opset_import)
    model.ir_version = case[0].ir_version
    return model, feeds
