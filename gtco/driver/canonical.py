"""The rewrites that bring a model's graph into its canonical form, in order."""

from __future__ import annotations

from collections.abc import Callable

from gtco.graph.graph import Graph
from gtco.graph.layout import channels_last
from gtco.graph.rewrites.pipeline import PIPELINE, Passes, Rewrite, canonicalize
from gtco.graph.rewrites.quantized.integer_products import integer_products
from gtco.graph.rewrites.quantized.one_signedness import one_signedness
from gtco.graph.rewrites.quantized.padded_channels import padded_channels
from gtco.graph.rewrites.quantized.quantizations import quantizations
from gtco.graph.rewrites.quantized.quantized_concat import quantized_concat
from gtco.graph.rewrites.quantized.quantized_pooling import quantized_pooling
from gtco.graph.rewrites.quantized.reciprocal_scales import reciprocal_scales
from gtco.graph.rewrites.split_reductions import split_reductions
from gtco.graph.rewrites.whole_pixels import whole_pixels
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.support.errors import InternalError


def canonical(
    graph: Graph,
    machine: Machine,
    threads: int,
    narrow: str,
    failed: Callable[[InternalError], None],
    dump: Callable[[str, str], None],
    passes: Passes | None = None,
) -> Graph:
    """The graph as it was lowered -> the canonical graph, channels last.

    - ``narrow``: the number format of products on a GPU;
    - ``failed``: is told of a rewrite that failed, and may raise;
    - ``dump``: is given the name of a file and the graph after each half, as text;
    - ``passes``: notes which rewrites changed something, or says which are to be done.
    """

    def integers(graph: Graph) -> Graph:
        return integer_products(one_signedness(graph, machine), machine)

    def split(graph: Graph) -> Graph:
        return split_reductions(graph, threads)

    def pixels(graph: Graph) -> Graph:
        return whole_pixels(graph, narrow)

    graph = canonicalize(graph, rewrites=(integers, *PIPELINE), failed=failed, passes=passes)
    dump("3-canonical.txt", graph.dump())
    graph = canonicalize(channels_last(graph), failed=failed, passes=passes)
    rewrites: tuple[Rewrite, ...]
    if isinstance(machine, GpuTarget):
        rewrites = (pixels, split)
    else:
        rewrites = (
            *(reciprocal_scales, quantizations, quantized_concat, quantized_pooling),
            padded_channels,
            split,
        )
    # these depend on sizes, so they are done at each
    graph = canonicalize(graph, rewrites=rewrites, failed=failed)
    dump("4-layout.txt", graph.dump())
    return graph
