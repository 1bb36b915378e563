"""Outputs whose shape nobody knows before onnxsim runs: the file does not give it, and ONNX does
not infer it. ONNX's checker wants a shape, so one is made up. onnxsim would believe it, and compute
a Shape of the output, or of the tensor that the output is an Identity of, as a constant.

So while onnxsim runs, such an output is behind an operator whose output has one axis of any length:

before: y = Relu(x)                        outputs: y
after:  y = Relu(x); s = Compress(y, c)    outputs: s, with c an input, so that s is not a constant
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import onnx
from onnx import helper

_SINCE = 9  # the opset that brought Compress


def simplified(
    model: onnx.ModelProto,
    unknown: Collection[str],
    simplify: Callable[[onnx.ModelProto], tuple[onnx.ModelProto, str]],
) -> tuple[onnx.ModelProto, str]:
    """What ``simplify`` makes of the model: the simplified model and "", or the unchanged model and
    the reason. It does not see the shapes of the outputs that are ``unknown``.
    """
    hidden, names = _hide(model, unknown)
    simpler, note = simplify(hidden)
    return (model if note else _show(simpler, model, names)), note


def _hide(model: onnx.ModelProto, unknown: Collection[str]) -> tuple[onnx.ModelProto, list[str]]:
    """The model with those outputs hidden, and the names that stand for them, in the order of the
    outputs: the same names for outputs that are not hidden.
    """
    opset = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 1)
    names = [value.name for value in model.graph.output]
    if opset < _SINCE or not set(names) & set(unknown):
        return model, names
    hidden = onnx.ModelProto()
    hidden.CopyFrom(model)
    graph = hidden.graph
    any_of_it = _new("gtco_any", hidden)
    graph.input.append(helper.make_tensor_value_info(any_of_it, onnx.TensorProto.BOOL, [1]))
    for value in graph.output:
        if value.name in unknown:
            some = _new(f"{value.name}_some", hidden)
            graph.node.append(helper.make_node("Compress", [value.name, any_of_it], [some]))
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(some, kind, [None]))
    return hidden, [value.name for value in graph.output]


def _show(model: onnx.ModelProto, given: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """The simplified ``model`` with the outputs of ``given``, which were hidden under ``names``."""
    wanted = [value.name for value in given.graph.output]
    if names == wanted:
        return model
    graph = model.graph
    stands_for = {s: y for s, y in zip(names, wanted, strict=True) if s != y}
    kept, last = [], []
    for node in graph.node:
        if (y := stands_for.get(node.output[0])) is None:
            kept.append(node)
        elif (x := node.input[0]) != y:  # onnxsim has removed an Identity
            last.append(helper.make_node("Identity", [x], [y], name=y))
    del graph.node[:]
    graph.node.extend([*kept, *last])
    del graph.output[:]
    graph.output.extend(given.graph.output)
    before = {value.name for value in given.graph.input}
    inputs = [value for value in graph.input if value.name in before]
    del graph.input[:]
    graph.input.extend(inputs)
    return model


def _new(wanted: str, model: onnx.ModelProto) -> str:
    graph, number = model.graph, 0
    taken = {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
    taken |= {name for node in graph.node for name in (*node.input, *node.output)}
    name = wanted
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    return name
