"""Relax -> Graph: one walk over the bindings of ``main``.

``operators.py`` has a rule for each Relax operator. A call without a rule becomes an opaque
``relax`` operator if TVM can legalize it. Nothing is optimised here; ``rewrites`` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy
import tvm
from tvm import relax

from gtco.graph.graph import Graph
from gtco.graph.lower.operators import RULES, Lowering, NoRule
from gtco.support.errors import ShapeError, UnsupportedError, guarded
from gtco.support.later import Later
from gtco.tensor.stage import TensorType


class Imported(Protocol):
    """The part of a ``gtco.frontend.imported.ImportedModel`` that ``lower`` reads."""

    @property
    def module(self) -> tvm.IRModule: ...
    @property
    def inputs(self) -> Mapping[str, TensorType]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def weights(self) -> Mapping[str, numpy.ndarray | Later]: ...
    @property
    def parameters(self) -> Mapping[str, str]: ...
    @property
    def names(self) -> Mapping[str, str]: ...
    @property
    def operators(self) -> Mapping[str, str]: ...


def lower(imported: Imported) -> Graph:
    """The model as a Graph of canonical operators.

    Raises ShapeError for a parameter whose shape is symbolic. Raises UnsupportedError, which lists
    every operator that TVM cannot build or whose output's shape depends on data.
    """
    function = imported.module["main"]
    graph = Graph(tuple(imported.inputs), (), dict(imported.inputs))
    for name, value in imported.weights.items():
        graph.constants[name] = value
        graph.types[name] = TensorType(tuple(value.shape), str(value.dtype))
    clash = [name for name in imported.outputs if name in graph.types]
    outputs = tuple(
        graph.fresh(f"{name}_output") if name in clash else name for name in imported.outputs
    )
    lowering = Lowering(graph, imported.module)
    for parameter in function.params:
        _require_static(parameter, imported.parameters[parameter.name])
        lowering.env[parameter] = imported.parameters[parameter.name]
    # Output names are reserved before any operator gets its name.
    returned = (
        function.ret_ty.fields
        if isinstance(function.ret_ty, relax.TupleType)
        else [function.ret_ty]
    )
    for name in outputs:
        graph.types[name] = TensorType((), "bool")
    problems: list[str] = []
    labels = _labels(function, imported.names)
    blocks = function.body.blocks if isinstance(function.body, relax.SeqExpr) else []
    for block in blocks:
        for binding in block.bindings:
            lowering.label = labels.get(binding.var.name, "")
            try:
                lowering.env[binding.var] = _lower_value(lowering, binding.value)
            except NoRule as reason:
                operator = imported.operators.get(lowering.label)
                node = f"node {lowering.label}" + (f", {operator}" if operator else "")
                problems.append(f"  {reason}" + (f" ({node})" if lowering.label else ""))
                lowering.env[binding.var] = None
            except Exception:
                where = f"node {lowering.label}" if lowering.label else f"'{binding.var.name}'"
                with guarded(f"the lowering of {where}"):
                    raise
    if problems:
        raise UnsupportedError(
            "the model uses operators that gtco cannot compile:\n"
            + "\n".join(dict.fromkeys(problems))
        )
    body = function.body.body if isinstance(function.body, relax.SeqExpr) else function.body
    result = lowering.value(body)
    results = list(result) if isinstance(body.ty, relax.TupleType) else [result]
    # A shape that is an output is a vector of integers.
    tensors = [lowering.constant(r, "int64") if isinstance(r, tuple) else r for r in results]
    assert len(tensors) == len(outputs) == len(returned), (
        f"{len(tensors)} results, {len(outputs)} outputs"
    )
    for name, tensor in zip(outputs, tensors, strict=True):
        del graph.types[name]
        graph.add("identity", (tensor,), graph.types[tensor], output=name, name=name)
    graph.outputs = outputs
    return graph.prune()


def _require_static(parameter: relax.Var, name: str) -> None:
    shape = parameter.ty.shape
    symbolic = (
        [str(d) for d in shape if not isinstance(d, tvm.tirx.IntImm)]
        if shape is not None
        else ["rank unknown"]
    )
    if symbolic:
        raise ShapeError(
            f"input '{name}' has symbolic dimensions {', '.join(symbolic)}: give each a size "
            "(--shape NAME=SIZE)"
        )


def _labels(function: relax.Function, names: Mapping[str, str]) -> dict[str, str]:
    """The node's name for every variable. A variable without a name belongs to the node of the next
    named one.
    """
    labels: dict[str, str] = {}
    current = ""
    blocks = function.body.blocks if isinstance(function.body, relax.SeqExpr) else []
    for block in reversed(list(blocks)):
        for binding in reversed(list(block.bindings)):
            current = names.get(binding.var.name, current)
            labels[binding.var.name] = current
    return labels


def _lower_value(lowering: Lowering, value: Any) -> Any:
    if not isinstance(value, relax.Call):
        if isinstance(value, relax.If):
            raise NoRule("If with a condition that is known only at run time")
        return lowering.value(value)
    if any(lowering.depends_on_failure(argument) for argument in value.args):
        return None
    name = value.op.name if isinstance(value.op, tvm.ir.Op) else str(value.op)
    rule = RULES.get(name.removeprefix("relax."))
    result = rule(lowering, value) if rule is not None else None
    return lowering.opaque(value, name) if result is None else result
