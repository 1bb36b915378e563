"""Operators that ONNX itself defines by simpler ones. They are written out if TVM's importer lacks
them.

    Celu(x)  ->  max(x, 0) + min(0, alpha * (exp(x / alpha) - 1))

onnxsim folds the shape arithmetic that a definition brings.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx.defs

from gtco.support.errors import UnsupportedError
from gtco.support.onnx_functions import written_out

_STANDARD = ("", "ai.onnx")


def write_out(model: onnx.ModelProto, supported: Collection[str]) -> onnx.ModelProto:
    """The model with every standard operator outside ``supported`` replaced by its definition, if
    ONNX has one.

    Raises :class:`UnsupportedError` for an operator whose definition depends on a type that ONNX
    cannot infer.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in _STANDARD), 1)
    while wanted := {
        (node.domain, node.op_type)
        for node in model.graph.node
        if node.domain in _STANDARD
        and node.op_type not in supported
        and _has_definition(node.op_type, opset)
    }:
        model = _inlined(model, sorted(wanted))
    return model


def _inlined(model: onnx.ModelProto, operators: list[tuple[str, str]]) -> onnx.ModelProto:
    own = onnx.ModelProto()
    own.CopyFrom(model)
    try:
        written = written_out(own, operators)
    except Exception as error:
        names = ", ".join(name for _, name in operators)
        raise UnsupportedError(
            f"ONNX cannot write out its operators {names} for this model ({error}): export with an "
            "older opset, which has no such operators"
        ) from error
    assert not {(n.domain, n.op_type) for n in written.graph.node}.intersection(operators)
    return written


def _has_definition(operator: str, opset: int) -> bool:
    if not onnx.defs.has(operator, opset, ""):
        return False
    schema = onnx.defs.get_schema(operator, opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)
