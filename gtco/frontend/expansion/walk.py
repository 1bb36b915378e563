"""The walk over a model's nodes. A rule writes out each operator that has one; the walk copies the
rest.

In the main graph every tensor keeps its name, so that errors use the model's own names. A body that
is written out several times gets new names each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx

from gtco.frontend.expansion.writer import MICROSOFT, Unsuitable, Writer
from gtco.support.onnx_messages import read_inside, subgraphs

Key = tuple[str, str]  # domain, operator
# The new names of a node's outputs.
Rule = Callable[["Walk", onnx.NodeProto], Sequence[str]]


class Walk:
    """The state of a walk. ``proto`` is the node that is being written out or copied, and ``node``
    is the label in messages of the last one that has a rule. ``undecided`` collects the labels of
    Ifs of which both branches are written out; None forbids that. ``read`` has the names that the
    model reads somewhere.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        rules: Mapping[Key, Rule],
        undecided: list[str] | None = None,
    ) -> None:
        self.writer = Writer(model)
        self.undecided = undecided
        self.node = ""
        self.proto = onnx.NodeProto()
        outputs = (value.name for value in model.graph.output)
        inner = (({*node.input} | read_inside(node)) for node in model.graph.node)
        self.read = set[str]().union(outputs, *inner) - {""}
        self._rules = rules

    def all(self, graph_nodes: Sequence[onnx.NodeProto], names: dict[str, str], keep: bool) -> None:
        """Appends the nodes to those that are already written. ``names`` gives the new names of
        their inputs; their outputs are added to it. With ``keep`` the outputs keep their names.
        """
        for given in graph_nodes:
            node = self.proto = renamed(given, names)
            rule = self._rules.get((_domain(node.domain), node.op_type))
            if rule is not None:
                label = node.name or (node.output[0] if node.output else node.op_type)
                self.node = f"node '{label}' ({node.op_type})"
                self.writer.label(label)
                made = rule(self, node)
                for place, old in enumerate(given.output):
                    new = made[place] if place < len(made) else ""
                    if old in self.read and not new:
                        raise Unsuitable(f"its output {place} ('{old}') is not supported")
                    if old:  # "" is an output that the node leaves out, and an input likewise
                        names[old] = new
                continue
            if not keep:
                outputs = [self.writer.fresh(name) if name else "" for name in given.output]
                names.update({a: b for a, b in zip(given.output, outputs, strict=True) if a})
                del node.output[:]
                node.output.extend(outputs)
            self.writer.append(node)

    def inside(self, graph: onnx.GraphProto) -> dict[str, str]:
        """The new names of a nested graph's own initializers, which now belong to the model."""
        names: dict[str, str] = {}
        for tensor in graph.initializer:
            moved = onnx.TensorProto()
            moved.CopyFrom(tensor)
            moved.name = names[tensor.name] = self.writer.fresh(tensor.name)
            self.writer.initializers.append(moved)
            self.writer.know(moved)
        return names


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of the node in which its inputs, and outer tensors that its nested graphs read, have
    their new names.
    """
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for place, name in enumerate(node.input):
        copy.input[place] = names.get(name, name)
    for attribute in copy.attribute:
        for graph in subgraphs(attribute):
            own = {v.name for v in (*graph.input, *graph.initializer)}
            own |= {name for inner in graph.node for name in inner.output}
            outer = {old: new for old, new in names.items() if old not in own}
            kept = [renamed(inner, outer) for inner in graph.node]
            del graph.node[:]
            graph.node.extend(kept)
            for value in graph.output:
                value.name = outer.get(value.name, value.name)
    return copy


__all__ = ["MICROSOFT", "Key", "Rule", "Unsuitable", "Walk", "renamed"]
