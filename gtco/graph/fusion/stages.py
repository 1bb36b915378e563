"""Cuts a graph into stages at the least cost. Movement is copied for each reader if that costs
less.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gtco.graph.fusion.dpof import Cost, Floor, Possible, Pricer, Search
from gtco.graph.fusion.duplicate import copied_in_vain, duplicate_movement
from gtco.graph.fusion.quantized_stores import before_quantization
from gtco.graph.fusion.steps_in_floats import steps_in_floats
from gtco.graph.fusion.take_apart import kinds_of_attention, taken_apart
from gtco.graph.graph import Graph
from gtco.support.errors import UnsupportedError
from gtco.support.garbage import uncollected
from gtco.tensor.operators import is_anchor
from gtco.tensor.stage import Operator, Stage, TensorType

MOST_CANDIDATES = 1024  # priced stages of one sink; each takes about a millisecond
# The graph is tried with the parts of an attention if they cost at most this share of its price,
# both alone. Kernels of one kind have prices that are wrong by about the same factor, and these are
# of three kinds. With K and V packed for one row, on a Zen 5, parts with a predicted share of
# 0.46-0.68 took 0.55-1.07, and parts with a predicted share of 0.83-0.93 took 0.91-1.42.
PROMISING = 0.67
# Used if prices were measured or will be: for attention and its parts within this factor of each
# other, and for partitions within this factor of the best.
CLOSE, NEAR = 1.25, 1.1


@dataclass(frozen=True)
class Partition:
    """Stages in execution order, with figures of the search.

    - ``seconds``: the predicted total;
    - ``costs``: the share of each stage;
    - ``states``: the number of segmentation sets visited;
    - ``transitions``: the number of pairs (V, V') compared;
    - ``priced``: the number of calls of the cost function;
    - ``unique``: the number of different stages in the result;
    - ``elapsed``: seconds of the whole search;
    - ``cost_elapsed``: those of them inside the cost function;
    - ``notes``: where the search was cut short; empty means that the result is the optimum;
    - ``members``: the outputs of each stage's operators in the graph, in order;
    - ``apart``: the attentions that were taken apart for it, kind by kind;
    - ``single``: the movement that was kept single while other movement was copied; None if none
      was copied.
    """

    stages: tuple[Stage, ...]
    seconds: float
    costs: tuple[float, ...]
    states: int = 0
    transitions: int = 0
    priced: int = 0
    unique: int = 0
    elapsed: float = 0.0
    cost_elapsed: float = 0.0
    notes: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    single: frozenset[str] | None = None

    def weights(self) -> dict[str, int]:
        """How often each different stage occurs, by ``Stage.key``, in order of first use."""
        counts: dict[str, int] = {}
        for stage in self.stages:
            counts[stage.key] = counts.get(stage.key, 0) + 1
        return counts

    def text(self) -> str:
        """A line for each stage: its cost, its key, its operators, and the tensor that it makes."""
        return "\n".join(
            f"{cost * 1e6:10.1f} us  {stage.key}  {stage.label} -> {stage.output.type}"
            for stage, cost in zip(self.stages, self.costs, strict=True)
        )


def no_floor(op: Operator, types: Mapping[str, TensorType]) -> float:
    """The lower bound that holds for any cost: it is not negative."""
    return 0.0


def any_anchors(anchors: tuple[str, ...]) -> bool:
    """The answer that holds for any cost: every set of anchors that the patterns allow
    is possible.
    """
    return True


def partition(
    graph: Graph,
    cost: Cost,
    floor: Floor = no_floor,
    possible: Possible = any_anchors,
    *,
    max_operators: int = 32,
    max_candidates: int = MOST_CANDIDATES,
) -> Partition:
    """The cheapest partition of ``graph`` into stages (GTCO, Algorithm 1).

    - ``cost(stage)`` gives predicted seconds, or ``math.inf`` if no kernel can do the stage;
    - ``floor`` is a lower bound on the cost of a stage, for each of its operators;
    - ``possible`` says no to anchors (complex operators and reductions) if every stage that holds
      them has infinite cost;
    - ``max_operators`` limits the operators of a stage;
    - ``max_candidates`` limits the stages of one sink. If more are possible, a descent picks those
      that are priced.

    Both limits are reported in ``notes`` if they cut anything. Raises UnsupportedError if no
    partition has a finite cost; it names the operators that no kernel can do.
    """
    start = time.perf_counter()
    pricer = cost if isinstance(cost, Pricer) else Pricer(cost)
    priced, cost_elapsed = len(pricer.memo), pricer.elapsed

    search = Search(
        graph,
        pricer,
        floor,
        possible,
        max_operators,
        max_candidates,
        before_quantization(graph),
    )
    chosen = search.select_schedule()
    stages = tuple(map(steps_in_floats, chosen))
    costs = tuple(pricer.exactly(stage) for stage in stages)
    if math.inf in costs and not pricer.exact:
        # a kernel cannot begin there, although it can elsewhere
        again = Pricer(pricer.cost, exact=True)
        return partition(
            graph,
            again,
            floor,
            possible,
            max_operators=max_operators,
            max_candidates=max_candidates,
        )
    return Partition(
        stages,
        math.fsum(costs),
        costs,
        states=len(graph.operators),
        transitions=search.transitions,
        priced=len(pricer.memo) - priced,
        unique=len({stage.key for stage in stages}),
        elapsed=time.perf_counter() - start,
        cost_elapsed=pricer.elapsed - cost_elapsed,
        notes=search.notes,
        members=tuple(tuple(op.output for op in stage.operators) for stage in chosen),
    )


def fuse(
    graph: Graph,
    cost: Cost,
    floor: Floor = no_floor,
    possible: Possible = any_anchors,
    *,
    promising: float = PROMISING,
) -> tuple[Graph, Partition]:
    """The cheapest ``partition`` of the graph, with two choices that no stage shows, and the graph
    to which its stages belong. Counters and times are those of all rounds together.

    Movement is copied for each reader, or stored, whichever costs less. Copies that no kernel took
    in are undone, and the graph is partitioned again, until every copy that is left saves
    something.

    Attention is one operator, or the products and the softmax that it stands for. A kind of
    attention is taken apart if its parts cost at most ``promising`` of it, both alone. It stays
    apart if the whole graph then costs less.
    """
    # Garbage collection would take half of the search's time: the search makes millions of values.
    with uncollected():
        pricer = Pricer(cost)
        best = _fuse(graph, pricer, floor, possible)
        rounds = [best[1]]
        apart: tuple[tuple[str, ...], ...] = ()
        for alone, attentions in kinds_of_attention(graph):
            # alone first, because a search of the whole graph takes seconds
            share, spent = _apart(alone, pricer, floor, possible)
            rounds += spent
            if share > promising:
                continue
            other = taken_apart(graph, attentions)
            found = _fuse(other, pricer, floor, possible)
            rounds.append(found[1])
            if found[1].seconds < best[1].seconds:
                apart = (*apart, tuple(attentions))
                graph, best = other, (found[0], replace(found[1], apart=apart))
        return best[0], _together(best[1], rounds)


def _apart(
    alone: Graph, pricer: Pricer, floor: Floor, possible: Possible
) -> tuple[float, tuple[Partition, Partition]]:
    """The cost of an attention in parts as a share of its cost as one operator; and both
    partitions.
    """
    apart = partition(taken_apart(alone, alone.outputs), pricer, floor, possible)
    one = partition(alone, pricer, floor, possible)
    return apart.seconds / one.seconds, (apart, one)


def rivals(
    graph: Graph,
    best: Partition,
    cost: Cost,
    floor: Floor = no_floor,
    possible: Possible = any_anchors,
    *,
    most: int = 4,
) -> list[tuple[Graph, Partition]]:
    """Other partitions of the graph of ``best`` that are worth measuring beside it, with their
    graphs: ``best`` without each of its ``most`` heaviest fused stages, and ``best`` with each kind
    of attention in parts. Only partitions with a price near that of ``best`` are returned.
    """
    found: list[tuple[Graph, Partition]] = []
    weights = best.weights()
    prices = {s.key: c for s, c in zip(best.stages, best.costs, strict=True)}
    fused = {s.key: s for s in best.stages if len(s.operators) > 1 and has_anchor(s)}
    heaviest = sorted(fused, key=lambda key: -weights[key] * prices[key])[:most]
    with uncollected():
        pricer = Pricer(cost)
        for alone, attentions in kinds_of_attention(graph):
            if _apart(alone, pricer, floor, possible)[0] <= CLOSE:
                found.append(_fuse(taken_apart(graph, attentions), pricer, floor, possible))
        for key in heaviest:
            without = Pricer(pricer.cost, {**pricer.memo, fused[key].key_anywhere: math.inf})
            try:
                found.append(_fuse(graph, without, floor, possible))
            except UnsupportedError:  # this kernel is the only one for its operators
                continue
    near = [each for each in found if each[1].seconds <= NEAR * best.seconds]
    return sorted(near, key=lambda each: each[1].seconds)[:most]


def has_anchor(stage: Stage) -> bool:
    return any(is_anchor(op.kind) for op in stage.operators)


def _fuse(
    graph: Graph, pricer: Pricer, floor: Floor, possible: Possible
) -> tuple[Graph, Partition]:
    """The cheaper of two partitions: of the graph with its movement copied, and of the graph as it
    is.
    """
    best, rounds = (graph, partition(graph, pricer, floor, possible)), []
    rounds.append(best[1])
    keep: set[str] = set()
    while True:
        copied = duplicate_movement(graph, keep)
        if len(copied.operators) == len(graph.operators):
            break
        found = partition(copied, pricer, floor, possible)
        rounds.append(found)
        if found.seconds < best[1].seconds:
            best = (copied, replace(found, single=frozenset(keep)))
        vain = copied_in_vain(graph, found.stages) - keep
        if not vain:
            break
        keep |= vain
    return best[0], _together(best[1], rounds)


def _together(best: Partition, rounds: Sequence[Partition]) -> Partition:
    """The best of several rounds, with the counters and times of all of them."""
    names = ("states", "transitions", "priced", "elapsed", "cost_elapsed")
    return replace(best, **{name: sum(getattr(each, name) for each in rounds) for name in names})
