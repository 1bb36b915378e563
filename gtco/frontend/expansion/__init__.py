"""Operators of ONNX Runtime, control flow and a few standard operators, written out in simpler
standard operators.

    FusedMatMul(a, b) {transB, alpha}  ->  MatMul(a, Transpose(b)) * alpha
    Loop(3, true, x) {body}            ->  body(body(body(x)))

The rest of the compiler sees the same operators as in a plain export, so it makes the same stages.
A rule knows the shapes of its inputs. It writes constants where a general definition would compute
with shapes.
"""

from __future__ import annotations

import onnx

from gtco.frontend.expansion.rules import RULES
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import MICROSOFT
from gtco.frontend.node_check import Node
from gtco.support.errors import ModelError, UnsupportedError
from gtco.support.onnx_messages import nodes

EXPANDED = frozenset(RULES)
_STANDARD = ("", "ai.onnx")


def adopt(model: onnx.ModelProto) -> None:
    """Moves nodes to ONNX Runtime's domain that it writes into the standard domain, which lacks
    them: SimplifiedLayerNormalization, and LayerNormalization before opset 17. Imports that domain
    if its operators are used; ``onnxruntime.transformers`` leaves out the import. The standard
    domain gets its name "", since ONNX's checker does not know nodes of its other one. Changes
    ``model``.
    """
    if all(entry.domain for entry in model.opset_import):
        for entry in model.opset_import:
            entry.domain = "" if entry.domain in _STANDARD else entry.domain
    opset = next((entry.version for entry in model.opset_import if entry.domain in _STANDARD), 1)
    foreign = {"SimplifiedLayerNormalization"} | ({"LayerNormalization"} if opset < 17 else set())
    used = False
    for node in nodes(model.graph):
        if node.domain in _STANDARD:
            node.domain = MICROSOFT if node.op_type in foreign else ""
        used = used or node.domain == MICROSOFT
    if used and all(entry.domain != MICROSOFT for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))


def needs_expansion(model: onnx.ModelProto) -> bool:
    return any(_key(node) in EXPANDED for node in nodes(model.graph))


def _foreign(model: onnx.ModelProto) -> bool:
    return any(node.domain not in _STANDARD for node in nodes(model.graph))


def expand(model: onnx.ModelProto, undecided: list[str] | None = None) -> onnx.ModelProto:
    """The model without the operators in ``EXPANDED``; ``model`` itself if it has none and no
    operator of another domain. Such operators that remain (Gelu, SkipLayerNormalization) get the
    types of their results, since onnxsim finds no shape behind them otherwise. If ``undecided`` is
    given, an If on values of inputs becomes both branches, and the list gets its label.

    Every input must have its shape. Raises :class:`UnsupportedError`, which names the node, if an
    operator is used in a way that has no such form, and :class:`ModelError` for a node before it
    whose result has no shape, because it breaks a rule of ONNX.
    """
    if not (needs_expansion(model) or _foreign(model)):
        return model
    walk = Walk(model, RULES, undecided)
    names: dict[str, str] = {}
    try:
        walk.all(model.graph.node, names, keep=True)
    except Unsuitable as reason:
        # a node of the model that breaks a rule before it is the reason
        walk.writer.check_unknown({name for node in model.graph.node for name in node.output})
        raise UnsupportedError(f"{walk.node}: {reason}") from reason
    except ModelError:
        raise
    except Exception as error:
        raise Node(walk.proto, walk.writer.types, walk.writer.values).refused() from error
    writer = walk.writer
    for value in model.graph.output:
        if (now := names.get(value.name, value.name)) != value.name:
            writer.append(onnx.helper.make_node("Identity", [now], [value.name], name=now))
    written = onnx.ModelProto()
    written.CopyFrom(model)
    for part in (written.graph.node, written.graph.value_info):
        del part[:]
    written.graph.node.extend(writer.nodes)
    written.graph.initializer.extend(writer.initializers)
    # ONNX infers nothing after remaining operators of other domains
    left = {name for node in writer.nodes if _key(node)[0] for name in node.output}
    written.graph.value_info.extend(
        onnx.helper.make_value_info(name, writer.types[name])
        for name in sorted(left)
        if name in writer.types
    )
    return written


def _key(node: onnx.NodeProto) -> tuple[str, str]:
    return ("" if node.domain in _STANDARD else node.domain, node.op_type)


__all__ = ["EXPANDED", "adopt", "expand", "needs_expansion"]
