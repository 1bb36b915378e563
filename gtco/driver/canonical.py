"""The passes that bring a model's graph into its canonical form and its precision, in order."""

from __future__ import annotations

from collections.abc import Callable

from gtco.graph.byte_weights import byte_weights
from gtco.graph.exact_bfloat16 import exact_bfloat16
from gtco.graph.graph import Graph
from gtco.graph.half_weights import half_weights
from gtco.graph.layout import channels_last
from gtco.graph.precision import narrow_operands
from gtco.graph.rewrites.convolutions.padding_taps import padding_taps
from gtco.graph.rewrites.convolutions.phases_as_channels import phases_as_channels
from gtco.graph.rewrites.convolutions.whole_pixels import whole_pixels
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.graph.rewrites.pipeline import PIPELINE, Passes, Rewrite, canonicalize
from gtco.graph.rewrites.quantized.byte_functions import byte_functions
from gtco.graph.rewrites.quantized.integer_products import integer_products
from gtco.graph.rewrites.quantized.one_signedness import one_signedness
from gtco.graph.rewrites.quantized.padded_channels import padded_channels
from gtco.graph.rewrites.quantized.quantizations import quantizations
from gtco.graph.rewrites.quantized.quantized_concat import quantized_concat
from gtco.graph.rewrites.quantized.quantized_constants import quantized_constants
from gtco.graph.rewrites.quantized.quantized_pooling import quantized_pooling
from gtco.graph.rewrites.quantized.reciprocal_scales import reciprocal_scales
from gtco.graph.rewrites.separate_pooling import separate_pooling
from gtco.graph.rewrites.split_reductions import split_reductions
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.search.recorded import RecordedPolicy
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
        return integer_products(one_signedness(quantized_constants(graph), machine), machine)

    def split(graph: Graph) -> Graph:
        return split_reductions(graph, threads)

    def bytewise(graph: Graph) -> Graph:
        return byte_functions(graph, machine)

    def pixels(graph: Graph) -> Graph:
        return whole_pixels(graph, narrow)

    graph = canonicalize(graph, rewrites=(integers, *PIPELINE), failed=failed, passes=passes)
    dump("3-canonical.txt", graph.dump())
    graph = canonicalize(channels_last(graph), failed=failed, passes=passes)
    rewrites: tuple[Rewrite, ...]
    if isinstance(machine, GpuTarget):
        rewrites = (padding_taps, pixels, split)
    else:
        rewrites = (
            *(reciprocal_scales, quantizations, quantized_concat, quantized_pooling),
            *(bytewise, padded_channels),
            *(phases_as_channels, padding_taps),
            separate_pooling,
            split,
        )
    # these depend on sizes, so they are done at each
    graph = canonicalize(graph, rewrites=rewrites, failed=failed)
    dump("4-layout.txt", graph.dump())
    return graph


def rounded(
    graph: Graph, narrow: str, policy: RecordedPolicy, keeps_bytes: bool, float16: bool
) -> Graph:
    """The canonical graph -> the same in the precision that was asked for; ``graph`` itself where
    nothing changes.

    - ``narrow``: the number format that operands of products are rounded to, float32 for none;
    - ``keeps_bytes``: weights that a file has in 8 bits stay so in memory;
    - ``float16``: weights of a float16 file are stored in float16.
    """
    exact = exact_bfloat16(graph, policy.target, policy.predict, policy.floor)
    if exact is not graph:
        graph = fold_constants(exact).check()
    if narrow != "float32":
        graph = narrow_operands(graph, narrow, policy.predict, policy.floor)
        graph = fold_constants(graph).check()
    if keeps_bytes:
        # Predictions alone decide. Weights of 8 bits are for a smaller library, and its size shall
        # not depend on what was measured by chance.
        base = policy.policy
        graph = byte_weights(graph, base.predict, base.floor).check()
    if float16:
        graph = half_weights(graph, policy.predict, policy.floor).check()
    graph.constants.settle()  # these have no narrower format
    return graph
