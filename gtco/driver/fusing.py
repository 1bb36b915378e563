"""Which stages a graph gets: those of a search, of a tuning that has ended, or of another size."""

from __future__ import annotations

from gtco.graph.fusion.dpof import Cost
from gtco.graph.fusion.repeat import Skeleton, cheapest, skeleton
from gtco.graph.fusion.stages import CLOSE, Partition, fuse
from gtco.graph.graph import Graph
from gtco.search.recorded import RecordedPolicy
from gtco.support.errors import REPORT, InternalError, UnsupportedError

Known = dict[Skeleton, list[Partition]]


def fused(
    whole: Graph, policy: RecordedPolicy, known: Known | None, repeats: Cost | None
) -> tuple[Graph, Partition, bool]:
    """Graph -> stages at the least predicted cost, or the stages that the last finished tuning
    ended with, if records know them. Gives also the graph, in which movement is copied where that
    pays, and whether the stages were searched.

    - ``known``: the partitions of other sizes by the graph without its sizes; one that is searched
      is added. None where there are no other sizes;
    - ``repeats``: by this price the graph may take the cheapest of these instead of a search.
    """
    base, ends = policy.policy, policy.ends(whole.key)
    if repeats is not None and known is not None and not ends:
        others = known.get(skeleton(whole), ())
        if (found := cheapest(whole, others, repeats)) is not None:
            return *found, False
    try:
        graph, result = fuse(whole, base.predict, base.floor, base.possible)
        if known is not None:
            _keep(known, whole, result)
        for end in ends:
            if policy.chosen(result.stages, end):
                break
            price, may = policy.found_again(end), policy.possible
            again = fuse(whole, price, policy.floor, may, promising=CLOSE)
            if policy.chosen(again[1].stages, end):
                graph, result = again
                break
    except UnsupportedError as error:
        if policy.failures:
            raise InternalError("\n".join([str(error), *policy.failures, REPORT])) from error
        raise
    return graph, result, True


def _keep(known: Known, whole: Graph, found: Partition) -> None:
    kept = known.setdefault(skeleton(whole), [])
    as_known = (found.members, found.apart, found.single)
    if as_known not in [(each.members, each.apart, each.single) for each in kept]:
        kept.append(found)
