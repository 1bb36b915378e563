"""DPOF, dynamic programming operator fusion: cut a graph into stages at the least cost.

GTCO Section IV-B, equation 2 and Algorithm 1::

    dp[V] = min over V' of dp[V - V'] + temp[V'],    action[V] = the V' that gives it

``temp[V']`` is ``cost(stage)``, the predicted seconds of the stage as one kernel, or +inf where the
patterns (``gtco.graph.fusion.patterns``) forbid it or no kernel can do it.

Which segmentation sets must be visited? A stage has one sink: all its other tensors are used only
inside the stage and are not graph outputs. Three things follow.

1. *Any partition is acyclic.* A tensor that goes from stage A to stage B is made by A's sink, and
   B's sink is reached from it, so A's sink precedes B's in the topological order; stages sorted by
   their sinks are an execution order. (For the same reason stages are connected and convex.)
2. *A stage is a piece of the post-dominator tree.* All paths from an operator of the stage to the
   outputs run inside the stage until its sink, so its immediate post-dominator, which is on them,
   is in the stage too. So every stage is within the subtree of its sink.
3. *The remaining sets fall apart.* Peel from V the stage V' that holds V's last operator, which
   must be that stage's sink. Every operator directly below V' in the tree is, again by 2, the sink
   of its own stage, and its subtree shares no stage with its siblings'. So V - V' is a disjoint
   union of whole subtrees, each solved on its own:

       dp[T(s)] = min over stages V' with sink s of  temp[V'] + sum of dp[T(c)], c directly below V'

So the segmentation sets that Algorithm 1 needs are the subtrees T(s), one per operator: as many
states as operators instead of exponentially many, and the same optimum. The tests compare it with
brute force over all partitions. Only one number stays exponential: that of the stages with one sink
(wide trees of element-wise operators, the rotary embeddings before an attention). If there are more
than ``max_candidates``, at most so many are priced, and a descent finds them. It starts from the
best of the greedy stages. It takes an operator in (with its readers, and with or without the stage
found for it) or leaves one out (with everything that it reads), as long as that lowers the total.
Once a search has priced ``MOST_PRICED`` stages, the limit per sink is ``HURRIED``; in large cones
it is lower too.
``Partition.notes`` names every such cut. The bounds count stages, not seconds, so the same model
always gives the same partition.

Identical blocks are priced once: a stage by its ``Stage.key_anywhere``, and the whole list of
candidates of a sink by that of its *cone*, the operators that can ever share a stage with it. Many
candidates are not priced at all. They are taken in the order of sum of dp[T(c)], the cost of the
other stages. ``floor`` is a lower bound on the price of any stage with the same operators. A
candidate that costs more than the best so far even at this bound cannot be the optimum.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx

from gtco.graph.fusion.cone import Cone, Members
from gtco.graph.fusion.patterns import extend_path, fusable
from gtco.graph.fusion.steps_in_floats import steps_in_floats
from gtco.graph.graph import Graph
from gtco.support.errors import UnsupportedError
from gtco.tensor.operators import is_anchor
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

MOST_PATHS = 16  # from the sink of a stage to an operator
# After so many stages are priced in one search, HURRIED of a sink are enough. A price takes about a
# millisecond.
MOST_PRICED = 5000
HURRIED = 128
# A stage that reads the steps of a loop, put together, takes longer to price the more there are. In
# cones of more than LARGE operators fewer are priced, at least LEAST.
LARGE, LEAST = 64, 32

Cost = Callable[[Stage], float]
# An operator and its tensors' types -> a lower bound on the seconds of any stage with it.
Floor = Callable[[Operator, Mapping[str, TensorType]], float]
# Kinds of anchors in topological order -> true if a stage that holds them may have a finite cost.
Possible = Callable[[tuple[str, ...]], bool]


@dataclass
class Pricer:
    """``cost`` with a memo: identical stages are priced once, in the form in which they are
    compiled. Stages that differ in where their slices begin are identical, unless ``exact``.
    """

    cost: Cost
    memo: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    exact: bool = False

    def key(self, stage: Stage) -> str:
        return stage.key if self.exact else stage.key_anywhere

    def __call__(self, stage: Stage) -> float:
        stage = steps_in_floats(stage)
        key = self.key(stage)
        if key not in self.memo:
            start = time.perf_counter()
            seconds = self.cost(stage)
            self.elapsed += time.perf_counter() - start
            assert seconds >= 0, f"cost {seconds} of stage {stage.label}"  # also catches NaN
            self.memo[key] = seconds
        return self.memo[key]

    def exactly(self, stage: Stage) -> float:
        """The price of this very stage, wherever its slices begin."""
        return self(stage) if self.key(stage) == stage.key else self.cost(stage)


class Search:
    """One run of Algorithm 1: the graph by position, dp[], action[] and the memo of cones.

    ``unstored``: by tensor, those that lead to it alone and are no stage's result, in order, if
    some kernel computes it with all of them.
    """

    def __init__(
        self,
        graph: Graph,
        pricer: Pricer,
        floor: Floor,
        possible: Possible,
        max_operators: int,
        max_candidates: int,
        unstored: Mapping[str, Sequence[str]],
    ):
        self.graph, self.pricer, self.possible = graph, pricer, possible
        self.priced_before = len(pricer.memo)
        self.max_operators, self.max_candidates = max_operators, max_candidates
        # the operators of a cone beyond which more make no difference to the stages that are priced
        self.counted = math.ceil(LARGE * math.sqrt(max(1.0, max_candidates / LEAST))) + LARGE
        self.ops = list(graph.operators.values())
        position = {op.output: n for n, op in enumerate(self.ops)}
        outputs = set(graph.outputs)
        self.sources = [
            sorted({position[i] for i in op.inputs if i in position}) for op in self.ops
        ]
        users: list[list[int]] = [[] for _ in self.ops]
        for n, sources in enumerate(self.sources):
            for source in sources:
                users[source].append(n)
        self.users = users
        # A graph output, or a tensor without readers, is stored: it can only be a sink.
        self.stored = [op.output in outputs or not users[n] for n, op in enumerate(self.ops)]
        self.chains = {position[n]: [position[x] for x in unstored[n]] for n in unstored}
        self.unstored = {n for chain in self.chains.values() for n in chain}
        self.parent = post_dominators(users, self.stored)
        self.below: list[list[int]] = [[] for _ in self.ops]
        for n, parent in enumerate(self.parent):
            if parent >= 0:
                self.below[parent].append(n)
        self.dp: list[tuple[float, int]] = []
        self.action: list[tuple[int, ...]] = []
        # rounded down: a candidate that a floor rules out costs more, not the same
        self.floors = [int(floor(op, graph.types) * 1e15) for op in self.ops]
        self.cones: dict[str, tuple[list[Members], list[str]]] = {}  # with what the limits cut
        self.prices: dict[str, dict[Members, float]] = {}
        self.transitions = 0
        self.anchors: dict[int, bool] = {}  # bits of operators -> true if one stage may hold them
        self.cuts: dict[str, list[str]] = {}  # what the limits left out, with the sinks

    def select_schedule(self) -> list[Stage]:
        """Lines 5-14: fills dp and action, then reads the stages from the action table."""
        # dp is (time, stages): at equal times the fewest stages win. Time is counted in whole
        # femtoseconds, so that sums are exact and identical layers fall the same way on a tie.
        dp = self.dp
        action = self.action
        for sink in range(len(self.ops)):  # subtrees before the trees that contain them
            best, stage = self._solve(sink)
            if best[0] == math.inf and sink in self.chains:
                # no kernel has all of these operators, so some of their results are stored
                self.unstored.difference_update(self.chains[sink])
                for n in self.chains[sink]:
                    dp[n], action[n] = self._solve(n)
                best, stage = self._solve(sink)
            dp.append(best)
            action.append(stage)
        roots = [n for n, parent in enumerate(self.parent) if parent < 0]
        if any(dp[root][0] == math.inf for root in roots):
            raise UnsupportedError(self._impossible())
        chosen: list[tuple[int, ...]] = []
        stack = roots
        while stack:
            members = action[stack.pop()]
            chosen.append(members)
            inside = set(members)
            stack.extend(c for m in members for c in self.below[m] if c not in inside)
        return [self._stage(members) for members in sorted(chosen, key=lambda stage: stage[-1])]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each kind of cut, with the first sink that was cut."""
        return tuple(
            f"fusion search: {cut}; at {sinks[0]}"
            + (f" and {len(sinks) - 1} more" if len(sinks) > 1 else "")
            for cut, sinks in self.cuts.items()
        )

    def _named(self, sink: int, count: int) -> str:
        op = self.ops[sink]
        return f"{op.kind} '{op.name or op.output}' ({op.type}), a cone of {count} operators"

    def _stage(self, members: Sequence[int]) -> Stage:
        return make_stage(
            (self.ops[m] for m in members), self.graph.types, self._read_constants(members)
        )

    def _read_constants(self, members: Sequence[int]) -> list[str]:
        return [i for m in members for i in self.ops[m].inputs if self.graph.is_constant(i)]

    def _solve(self, sink: int) -> tuple[tuple[float, int], tuple[int, ...]]:
        """dp and action of the subtree of a sink (lines 31-40). Candidates and their prices are
        found once per kind of cone, as positions in it. No stage ends in one that is not to be
        stored.
        """
        if sink in self.unstored:
            return (math.inf, 1), (sink,)
        # one more than a stage may hold, by which the largest stages see that the limit cuts them
        paths = self._cone(sink, self.max_operators + 1, len(self.ops))
        cone = sorted(paths)
        whole = self._stage(cone)
        floors = [self.floors[n] for n in cone]
        key = self.pricer.key(whole)
        prices = self.prices.setdefault(key, {})
        rest = self._rest(cone)

        def price(members: Members) -> float:
            if members not in prices:
                seconds = self.pricer(self._stage([cone[m] for m in members]))
                prices[members] = round(seconds * 1e15) if seconds < math.inf else math.inf
            return prices[members]

        if key not in self.cones:
            where = {n: position for position, n in enumerate(cone)}
            given = [[where.get(m, -1) for m in self.action[n]] for n in cone[:-1]]
            local = Cone(
                whole,
                [paths[n] for n in cone],
                given,
                lambda members: price(members) + rest(members)[0],
                self.possible,
                self.max_operators,
                self._most(len(self._cone(sink, len(self.ops), self.counted))),
            )
            self.cones[key] = local.stages(), sorted(local.cuts)
        candidates, cuts = self.cones[key]
        for cut in cuts:
            self.cuts.setdefault(cut, []).append(self._named(sink, len(cone)))
        best: tuple[float, int, int] = (math.inf, 0, len(candidates))
        chosen: Members = (len(cone) - 1,)
        ways = ((*rest(members), number) for number, members in enumerate(candidates))
        for time_below, stages_below, number in sorted(ways):
            self.transitions += 1
            members = candidates[number]
            if max(floors[m] for m in members) + time_below > best[0]:
                continue
            total = (price(members) + time_below, 1 + stages_below, number)
            if total < best:  # at equal times the fewest stages win, then the first found
                best, chosen = total, members
        return best[:2], tuple(cone[m] for m in chosen)

    def _most(self, operators: int) -> int:
        """The number of stages that may be priced for the next kind of sink, with so many operators
        in its cone.
        """
        most = self.max_candidates
        if operators > LARGE:
            most = min(most, max(LEAST, round(most * (LARGE / operators) ** 2)))
        hurried = len(self.pricer.memo) - self.priced_before >= MOST_PRICED
        return min(HURRIED, most) if hurried else most

    def _rest(self, cone: Sequence[int]) -> Callable[[Members], tuple[float, int]]:
        """Time and number of the stages that hang directly below a stage of a cone."""
        below = [sum(self.dp[c][0] for c in self.below[n]) for n in cone]
        count = [sum(self.dp[c][1] for c in self.below[n]) for n in cone]
        finite = all(time < math.inf for time in below)
        # Each member but the sink has its parent in the tree among the members. So the operators
        # below the stage are those below each of its members, without the members themselves.
        for position, n in enumerate(cone[:-1]):
            below[position] -= self.dp[n][0] if finite else 0
            count[position] -= self.dp[n][1]

        def rest(members: Members) -> tuple[float, int]:
            if finite:
                return sum(below[m] for m in members), sum(count[m] for m in members)
            inside = {cone[m] for m in members}
            hanging = [c for n in inside for c in self.below[n] if c not in inside]
            return sum(self.dp[c][0] for c in hanging), sum(self.dp[c][1] for c in hanging)

        return rest

    def _cone(self, sink: int, largest: int, most: int) -> dict[int, set[str]]:
        """The operators that some stage with this sink may hold, with their paths from the sink. An
        operator is in the cone if:

        - all its readers are in the cone;
        - the patterns allow every path from it to the sink;
        - one stage may hold all anchors on these paths. A stage with the operator holds them too;
        - there are no more than :data:`MOST_PATHS`: its kernel has the operator once for each. In a
          chain of operators that each read the one before twice, the number doubles with each;
        - it and the operators between it and the sink, which such a stage holds too, are no more
          than ``largest``. So the cone of an operator at the end of a long chain is not the chain.

        The first ``most`` of them are returned, those near the sink first.
        """
        first = extend_path("", self.ops[sink])
        assert first is not None, "a single operator is always a stage"
        paths: dict[int, set[str]] = {sink: {first}}
        anchors = {sink: self._anchor(sink)}  # those on the paths, as bits
        between = {sink: 1}  # the operators from each to the sink, both included, as bits
        many = {sink: 1}  # paths from the sink
        asked = set(self.sources[sink])
        pending = [-n for n in asked]  # a heap, whose first is the last operator
        heapq.heapify(pending)
        while pending and len(paths) < most:
            n = -heapq.heappop(pending)  # all of its readers below the sink have been decided
            users = self.users[n]
            if self.stored[n] or any(user not in paths for user in users):
                continue
            inside = 1 << sink - n
            for user in users:
                inside |= between[user]
            op = self.ops[n]
            ways = sum(many[user] * self.ops[user].inputs.count(op.output) for user in users)
            if inside.bit_count() > largest or ways > MOST_PATHS:
                continue
            if not all(fusable(op, self.ops[user]) for user in users):
                continue
            grown = {extend_path(p, op) for user in users for p in paths[user]}
            if None in grown:
                continue
            together = self._anchor(n)
            for user in users:
                together |= anchors[user]
            if not self._possible(together):
                continue
            anchors[n], between[n], many[n] = together, inside, ways
            paths[n] = {p for p in grown if p is not None}
            for source in self.sources[n]:
                if source not in asked:
                    asked.add(source)
                    heapq.heappush(pending, -source)
        return paths

    def _anchor(self, n: int) -> int:
        return 1 << n if is_anchor(self.ops[n].kind) else 0

    def _possible(self, anchors: int) -> bool:
        if anchors not in self.anchors:
            chosen, left = [], anchors
            while left:  # lowest first
                chosen.append(self.ops[(left & -left).bit_length() - 1].kind)
                left &= left - 1
            self.anchors[anchors] = self.possible(tuple(chosen))
        return self.anchors[anchors]

    def _impossible(self) -> str:
        alone: dict[str, list[str]] = {}
        for n, op in enumerate(self.ops):
            if self.pricer(self._stage([n])) == math.inf:
                alone.setdefault(op.kind, []).append(f"'{op.name or op.output}'")
        names = "; ".join(f"{kind} ({len(ops)}): {', '.join(ops)}" for kind, ops in alone.items())
        return (
            "no partition of the graph into kernels exists. Operators that no kernel can do alone: "
            f"{names}. Compile without them, or report them with the model's name."
        )


def post_dominators(users: Sequence[Sequence[int]], stored: Sequence[bool]) -> list[int]:
    """The immediate post-dominator of every operator of a DAG; -1 is the exit.

    ``users[n]`` are the readers of n. ``stored[n]`` is true if n also leads to the exit directly.
    """
    backwards = networkx.DiGraph((user, n) for n, readers in enumerate(users) for user in readers)
    backwards.add_node(-1)
    backwards.add_edges_from((-1, n) for n, kept in enumerate(stored) if kept)
    parents = networkx.immediate_dominators(backwards, -1)
    return [parents[n] for n in range(len(users))]
