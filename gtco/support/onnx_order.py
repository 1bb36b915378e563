"""Puts the nodes of an ONNX model in order.

ONNX demands that a node stands behind those whose results it reads. ONNX Runtime does without, and
tools that convert a model to float16 (``onnxruntime.transformers.float16``, as Ultralytics exports
with ``half=True``) append the casts of its inputs at the end.
"""

from __future__ import annotations

import networkx
import onnx

from gtco.support.onnx_messages import read_inside, subgraphs


def in_order(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each node behind those whose results it reads, in nested graphs too; otherwise
    the nodes keep their order. ``model`` itself if it is in order already, and it is left as it is
    if not. Nodes of a cycle stay where they are, for ONNX's checker to refuse.
    """
    if _is_ordered(model.graph):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _sort(copy.graph)
    return copy


def _inner(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    return [g for node in graph.node for a in node.attribute for g in subgraphs(a)]


def _before(graph: onnx.GraphProto) -> list[set[int]]:
    """The positions of the nodes whose results each node reads."""
    makers = {name: k for k, node in enumerate(graph.node) for name in node.output if name}
    read = ({*node.input} | read_inside(node) for node in graph.node)
    return [{makers[name] for name in names if name in makers} for names in read]


def _is_ordered(graph: onnx.GraphProto) -> bool:
    behind = all(k > max(first, default=-1) for k, first in enumerate(_before(graph)))
    return behind and all(map(_is_ordered, _inner(graph)))


def _sort(graph: onnx.GraphProto) -> None:
    """Sorts the graph in place. Of the nodes that may come next, the first in the file does."""
    for inner in _inner(graph):
        _sort(inner)
    order = networkx.DiGraph()
    order.add_nodes_from(range(len(graph.node)))
    order.add_edges_from((maker, k) for k, first in enumerate(_before(graph)) for maker in first)
    try:
        nodes = [graph.node[k] for k in networkx.lexicographical_topological_sort(order)]
    except networkx.NetworkXUnfeasible:
        return  # a cycle
    del graph.node[:]
    graph.node.extend(nodes)
