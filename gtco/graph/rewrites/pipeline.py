"""The rewrites in the order in which they run. They turn any exporter's graph into the canonical
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gtco.graph.graph import Graph
from gtco.graph.rewrites.activations import activations
from gtco.graph.rewrites.attention import attention
from gtco.graph.rewrites.common_subexpressions import common_subexpressions
from gtco.graph.rewrites.compose_products import compose_products
from gtco.graph.rewrites.convolutions.conv_scale import conv_scale
from gtco.graph.rewrites.convolutions.parallel_convolutions import parallel_convolutions
from gtco.graph.rewrites.convolutions.pointwise_before_upsampling import pointwise_before_upsampling
from gtco.graph.rewrites.exponential_activations import exponential_activations
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.graph.rewrites.layer_norm import layer_norm
from gtco.graph.rewrites.merge_projections import merge_projections
from gtco.graph.rewrites.name_outputs import name_outputs
from gtco.graph.rewrites.quantized.exact_products import exact_products
from gtco.graph.rewrites.roll import roll
from gtco.graph.rewrites.rows_unread import rows_unread
from gtco.graph.rewrites.running_sums import running_sums
from gtco.graph.rewrites.simplify_arithmetic import simplify_arithmetic
from gtco.graph.rewrites.simplify_movement import simplify_movement
from gtco.graph.rewrites.simplify_slices import simplify_slices
from gtco.graph.rewrites.softmax import softmax
from gtco.graph.rewrites.split_projections import split_projections
from gtco.support.errors import InternalError, guarded

Rewrite = Callable[[Graph], Graph]

PIPELINE: tuple[Rewrite, ...] = (
    # Before movement and constants hide the values that integers come from.
    exact_products,
    # Remove the rests of the export: shape arithmetic, identities, repeated subexpressions.
    fold_constants,
    simplify_movement,
    simplify_arithmetic,
    common_subexpressions,
    # While a flip stands beside its sums. Later rewrites of slices may move it.
    running_sums,
    # Gathers of a range become slices, so movement can be simplified once more with them.
    roll,
    simplify_slices,
    simplify_movement,
    fold_constants,
    # Operators that an exporter took apart. Arithmetic in one form first: power(d, 2) is
    # multiply(d, d), and so on.
    simplify_arithmetic,
    common_subexpressions,
    layer_norm,
    activations,
    exponential_activations,
    softmax,
    conv_scale,
    simplify_arithmetic,
    fold_constants,
    # Branches whose normalisations are weights by now; one may stand behind their sum.
    parallel_convolutions,
    simplify_arithmetic,
    conv_scale,
    simplify_arithmetic,
    fold_constants,
    # The attention rewrite needs as little movement as possible before q, k and v. It leaves a
    # permute on k, which is cancelled afterwards.
    simplify_movement,
    attention,
    fold_constants,
    simplify_movement,
    simplify_slices,
    # Fewer multiplications for the same function. They come before the projections that read one
    # tensor merge, so that unread queries can be removed alone.
    rows_unread,
    split_projections,
    merge_projections,
    pointwise_before_upsampling,
    compose_products,
    # A last round over the results of the patterns.
    simplify_movement,
    simplify_slices,
    simplify_movement,
    simplify_arithmetic,
    fold_constants,
    common_subexpressions,
    name_outputs,
)


class Passes:
    """Which rewrites changed a graph, by their place in all sequences that a model goes through.
    With ``only``, those at other places are left out: no rewrite has to be done for a graph to be
    right, and where graphs of several sizes are alike, they change by the same rewrites.
    """

    def __init__(self, only: Collection[int] | None = None) -> None:
        self.changed: set[int] = set()
        self.only, self._place = only, -1

    def apply(self, rewrite: Rewrite, graph: Graph) -> Graph:
        """The graph after this rewrite, the next in the order."""
        self._place += 1
        if self.only is not None and self._place not in self.only:
            return graph
        made = rewrite(graph)
        if self.only is None and not same(graph, made):
            self.changed.add(self._place)
        return made


def same(one: Graph, other: Graph) -> bool:
    """True if a rewrite that made one of these graphs of the other changed nothing."""
    return (
        one.outputs == other.outputs
        and one.operators == other.operators
        and one.constants.same(other.constants)
    )


def canonicalize(
    graph: Graph,
    rewrites: Sequence[Rewrite] | None = None,
    failed: Callable[[InternalError], None] | None = None,
    passes: Passes | None = None,
) -> Graph:
    """The canonical form of ``graph``, by ``rewrites``; None means :data:`PIPELINE`. ``passes``
    notes which of them changed something, or says which are to be done.

    A rewrite that raises an unexpected exception is a bug; an :class:`InternalError` names it. If
    ``failed`` is given, it receives that error, and the graph goes on without the rewrite.
    """
    for rewrite in PIPELINE if rewrites is None else rewrites:
        try:
            with guarded(f"the rewrite '{rewrite.__name__}'"):
                graph = rewrite(graph) if passes is None else passes.apply(rewrite, graph)
        except InternalError as error:
            if failed is None:
                raise
            failed(error)
    return graph.check()
