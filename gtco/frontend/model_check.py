"""Checks a whole model before it is translated: outputs, weights, ONNX's own checker, and the
operators that gtco has. (:mod:`gtco.frontend.node_check` checks single nodes.)
"""

from __future__ import annotations

import onnx

from gtco.frontend import quantized
from gtco.frontend.expansion import EXPANDED
from gtco.frontend.node_check import DTYPES, NUMBERS, Node
from gtco.support.errors import ModelError, UnsupportedError
from gtco.support.onnx_messages import nodes
from gtco.tensor.stage import ITEM_BYTES

STANDARD = ("", "ai.onnx")
# Operators of ONNX Runtime's own domain that TVM's importer reads with their meaning there.
MICROSOFT = ("Gelu", "FastGelu", "BiasGelu", "SkipLayerNormalization", "GridSample", "Trilu")
# TVM imports these, but the size of their outputs depends on values, which no artifact can plan.
_DATA_DEPENDENT = {"NonMaxSuppression", "NonZero", "Unique"}


def check_outputs(model: onnx.ModelProto) -> None:
    """Raises ModelError if there is no output, or if two have one name."""
    if not model.graph.output:
        raise ModelError("the model has no outputs: there is nothing to compile")
    names = [value.name for value in model.graph.output]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(
            f"the model lists outputs more than once: {', '.join(map(repr, twice))}. Outputs are "
            "distinguished by their names: remove the repetition, or return the second one through "
            "an Identity of another name"
        )


def check_opset(model: onnx.ModelProto) -> None:
    """Raises ModelError if the model asks for operators of a later opset than any that is known
    here: they may mean something else.
    """
    known = onnx.defs.onnx_opset_version()
    asked = max((o.version for o in model.opset_import if o.domain in STANDARD), default=1)
    if asked > known:
        raise ModelError(
            f"the model asks for opset {asked} of ONNX, and the installed onnx "
            f"{onnx.__version__} knows no later one than {known}: export with opset {known} or an "
            "earlier one, or install a later onnx"
        )


def check_sparse(model: onnx.ModelProto) -> None:
    """Raises UnsupportedError for weights that are stored sparse."""
    constants = [
        node.output[0]
        for node in nodes(model.graph)
        if any(attribute.HasField("sparse_tensor") for attribute in node.attribute)
    ]
    if found := [*(t.values.name for t in model.graph.sparse_initializer), *constants]:
        raise UnsupportedError(
            f"the model has sparse weights: {', '.join(map(repr, found[:5]))}"
            f"{', ...' if len(found) > 5 else ''}. gtco reads dense ones only: export the model "
            "with dense tensors (to_dense() in PyTorch)"
        )


def check_model(model: onnx.ModelProto) -> None:
    """Raises ModelError for what ONNX's checker says of the model."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        # Operators of other domains have no schema there. They get the message that lists all
        # unsupported ones.
        if "No Op registered for" in str(error) or "No opset import for domain" in str(error):
            refuse_unsupported(model)
        said = " ".join(str(error).split())
        raise ModelError(f"the model fails ONNX's checker: {said}") from error


def check_initializers(model: onnx.ModelProto) -> None:
    """Raises UnsupportedError for a weight of a type that gtco does not support; the message names
    the node that reads it.
    """
    for tensor in model.graph.initializer:
        if tensor.data_type not in NUMBERS.values():
            readers = [str(Node(n)) for n in model.graph.node if tensor.name in n.input]
            reads = f", which {readers[0]} reads," if readers else ""
            sizes = ", ".join(map(str, tensor.dims))
            require_type(f"initializer '{tensor.name}' [{sizes}]{reads}", tensor.data_type)


def require_type(what: str, number: int) -> None:
    """Raises UnsupportedError if ONNX's type of this number is none that gtco has."""
    if number not in NUMBERS.values():
        raise UnsupportedError(
            f"{what} has elements of type {DTYPES.get(number, f'number {number}')}, which gtco "
            f"does not support; it supports {', '.join(ITEM_BYTES)}"
            f", and constants of int4, uint4, int2 and uint2{_narrower(number)}"
        )


def _narrower(number: int) -> str:
    """What to do about floats of 8 bits and fewer."""
    floats = DTYPES.get(number, "").startswith(("float8", "float4"))
    return ". Quantize the model to int8 instead" if floats else ""


def supported_operators() -> set[str]:
    """The standard operators that TVM's importer or gtco's reads."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    from gtco.frontend.operators.overrides import OVERRIDES

    return {*_get_convert_map(), *OVERRIDES}


def refuse_unsupported(model: onnx.ModelProto) -> None:
    """Raises one UnsupportedError that lists each operator that gtco cannot compile, its count and
    its nodes.
    """
    supported = supported_operators()
    found: dict[str, list[str]] = {}
    for node in nodes(model.graph):
        standard = node.domain in STANDARD
        known = (
            (standard and node.op_type in supported - _DATA_DEPENDENT)
            or (node.domain == "com.microsoft" and node.op_type in MICROSOFT)
            or ("" if standard else node.domain, node.op_type) in EXPANDED
        )
        if not known:
            label = (
                f"{node.domain}::{node.op_type}" if node.domain not in STANDARD else node.op_type
            )
            found.setdefault(label, []).append(
                node.name or (node.output[0] if node.output else "(unnamed)")
            )
    if found:
        lines = [
            f"  {label} ({len(nodes)}): {', '.join(nodes[:5])}{', ...' if len(nodes) > 5 else ''}"
            for label, nodes in sorted(found.items())
        ]
        advice = (
            "Replace them in the model, or cut the graph before them (onnx.utils.extract_model)"
        )
        if any(label.startswith("com.microsoft.nchwc::") for label in found):
            advice = (
                "Operators of com.microsoft.nchwc hold weights in the order of one machine: let "
                "ONNX Runtime save its optimized model with ORT_ENABLE_EXTENDED, not "
                "ORT_ENABLE_ALL. "
                f"Others: {advice[0].lower()}{advice[1:]}"
            )
        if sized := sorted(_DATA_DEPENDENT & set(found)):
            advice = (
                f"The size of what {' and '.join(sized)} gives depends on values, and gtco plans "
                f"all sizes when it compiles. {advice}, and do the rest outside"
            )
        if of_integers := quantized.advice(found):
            advice = f"{of_integers}. Others: {advice[0].lower()}{advice[1:]}"
        raise UnsupportedError(
            "the model uses operators that gtco does not support:\n"
            + "\n".join(lines)
            + f"\n{advice}"
        )
