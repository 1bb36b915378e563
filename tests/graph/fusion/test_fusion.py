"""DPOF against brute force over every valid partition, and its limits and counters."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtco.graph.fusion.dpof import MOST_PATHS, Pricer, Search, post_dominators
from gtco.graph.fusion.patterns import stage_allowed
from gtco.graph.fusion.stages import any_anchors, no_floor, partition
from gtco.graph.graph import Graph
from gtco.support.errors import UnsupportedError
from gtco.tensor.operators import COMPLEX, is_anchor, pattern
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage

SQUARE = TensorType((4, 4))
ATTRS = {
    "permute": {"axes": (1, 0)},
    "softmax": {"axis": 1},
    "layer_norm": {"epsilon": 1e-5},
    "relax": {"module": "", "op": "sort", "result": -1},
}
ARITY = {"add": 2, "matmul": 2, "multiply": 2}


def chain_graph(rows: Sequence[tuple[str, Sequence[int]]], outputs: Sequence[int]) -> Graph:
    """Row i makes tensor t{i}; source -1 is the input x, -2 the constant w."""
    names = {-1: "x", -2: "w"} | {n: f"t{n}" for n in range(len(rows))}
    operators = {}
    for n, (kind, sources) in enumerate(rows):
        inputs = [names[s] for s in sources] + (["w", "w"] if kind == "layer_norm" else [])
        operators[names[n]] = Operator(
            kind, tuple(inputs), names[n], SQUARE, make_attrs(**ATTRS.get(kind, {}))
        )
    types = {"x": SQUARE, "w": SQUARE} | {name: SQUARE for name in operators}
    return Graph(("x",), tuple(names[o] for o in outputs), types, {"w": None}, operators)  # type: ignore[dict-item]


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> Graph:
    kinds = ["relu", "permute", "add", "multiply", "softmax", "layer_norm", "matmul", "relax"]
    rows: list[tuple[str, list[int]]] = []
    for n in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(kinds[:-1] if draw(st.booleans()) else kinds))
        near = st.integers(max(-2, n - 3), n - 1)
        rows.append((kind, [draw(near) for _ in range(ARITY.get(kind, 1))]))
    read = {s for _, sources in rows for s in sources}
    outputs = {n for n in range(len(rows)) if n not in read}
    outputs |= set(draw(st.lists(st.integers(0, len(rows) - 1), max_size=1)))
    return chain_graph(rows, sorted(outputs))


def random_cost(seed: int, infinite: int):
    """Whole numbers, so that sums are exact; ``infinite``/16 of the stages have no kernel."""

    def cost(stage: Stage) -> float:
        digest = hashlib.sha256(f"{seed} {stage.key}".encode()).digest()
        if len(stage.operators) > 1 and digest[0] % 16 < infinite:
            return math.inf
        if len(stage.operators) == 1 and digest[0] % 64 < infinite:
            return math.inf
        return 1.0 + digest[1] % 32 + 2 * (digest[2] % 4) * len(stage.operators)

    return cost


def set_partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for smaller in set_partitions(items[1:]):
        yield [[items[0]], *smaller]
        for n, block in enumerate(smaller):
            yield [*smaller[:n], [items[0], *block], *smaller[n + 1 :]]


def valid_block(graph: Graph, dag: networkx.DiGraph, block: Sequence[str]) -> bool:
    """The definition, word for word: one sink, connected, convex, and allowed by the patterns."""
    inside = set(block)
    escaping = [
        t for t in block if t in graph.outputs or any(s not in inside for s in dag.successors(t))
    ]
    if len(escaping) != 1 or not networkx.is_weakly_connected(dag.subgraph(inside)):
        return False
    for outsider in set(dag) - inside:
        before, after = networkx.ancestors(dag, outsider), networkx.descendants(dag, outsider)
        if before & inside and after & inside:
            return False
    order = [op for output, op in graph.operators.items() if output in inside]
    return order[-1].output == escaping[0] and stage_allowed(order)


def brute_force(graph: Graph, cost) -> float:
    dag, names = graph.dag(), list(graph.operators)
    best = math.inf
    blocks: dict[tuple[int, ...], float] = {}
    for size in range(1, len(names) + 1):
        for members in itertools.combinations(range(len(names)), size):
            if valid_block(graph, dag, [names[m] for m in members]):
                ops = [graph.operators[names[m]] for m in members]
                blocks[members] = cost(make_stage(ops, graph.types, graph.constants))
    for blocks_of in set_partitions(list(range(len(names)))):
        keys = [tuple(sorted(block)) for block in blocks_of]
        if all(key in blocks for key in keys):
            condensed = networkx.quotient_graph(dag, [{names[m] for m in key} for key in keys])
            assert networkx.is_directed_acyclic_graph(condensed)  # claim 1 of dpof.py
            best = min(best, sum(blocks[key] for key in keys))
    return best


@settings(max_examples=250, deadline=None)
@given(graphs(), st.integers(0, 1 << 20), st.integers(0, 12), st.sampled_from([0.0, 1.0]))
def test_equals_brute_force(graph: Graph, seed: int, infinite: int, floor: float) -> None:
    cost = random_cost(seed, infinite)
    expected = brute_force(graph, cost)
    if expected == math.inf:
        with pytest.raises(UnsupportedError):
            partition(graph, cost)
        return
    found = partition(graph, cost, lambda op, types: floor)
    assert found.seconds == expected and not found.notes
    assert found.seconds == sum(cost(stage) for stage in found.stages)
    made = [op.output for stage in found.stages for op in stage.operators]
    assert sorted(made) == sorted(graph.operators)
    known = {"x", "w"}
    for stage in found.stages:  # in execution order; nothing inside a stage is read outside
        assert {i.name for i in stage.inputs} <= known
        known.add(stage.output.output)
    assert set(graph.outputs) <= known


def anchors_of(stage: Stage) -> tuple[str, ...]:
    return tuple(op.kind for op in stage.operators if is_anchor(op.kind))


@settings(max_examples=120, deadline=None)
@given(graphs(), st.integers(0, 1 << 20))
def test_anchors_that_cannot_stand_together_change_no_optimum(graph: Graph, seed: int) -> None:
    """A stage that ``possible`` rules out costs infinity anyway; the search only does not need to
    ask.
    """
    taken = {(), ("softmax",), ("matmul",), ("layer_norm",), ("layer_norm", "matmul")}
    plain = random_cost(seed, 3)

    def cost(stage: Stage) -> float:
        return plain(stage) if anchors_of(stage) in taken else math.inf

    expected = brute_force(graph, cost)
    if expected == math.inf:
        return
    asked: list[Stage] = []

    def noted(stage: Stage) -> float:
        asked.append(stage)
        return cost(stage)

    found = partition(graph, noted, possible=taken.__contains__)
    assert found.seconds == expected and not found.notes
    assert all(anchors_of(stage) in taken for stage in asked)


def test_random_graphs_do_fuse() -> None:
    """The property above is only worth something if the optimum uses stages of several operators,
    several readers and infinite costs. The optimum of this fixed graph needs all of them.
    """
    graph = chain_graph(
        [("relu", [-1]), ("permute", [0]), ("add", [0, 1]), ("matmul", [2, -2]), ("add", [3, 2])],
        [4],
    )
    found = partition(graph, lambda stage: 10.0 if len(stage.operators) == 1 else 11.0)
    assert [s.label for s in found.stages] == ["relu+permute+add+matmul+add"]
    refuse = partition(graph, lambda s: math.inf if "add+matmul" in s.label else 10.0)
    assert [s.label for s in refuse.stages] == ["relu+permute+add", "matmul+add"]


def test_unfused_attention_can_be_one_stage() -> None:
    rows = [("matmul", [-1, -1]), ("multiply", [0, -2]), ("softmax", [1]), ("matmul", [2, -1])]
    found = partition(chain_graph(rows, [3]), lambda stage: 1.0)
    assert [s.label for s in found.stages] == ["matmul+multiply+softmax+matmul"]
    dear = partition(chain_graph(rows, [3]), lambda s: 1.0 if len(s.operators) < 4 else 100.0)
    assert len(dear.stages) == 2


def test_two_matmuls_never_share_a_stage_without_softmax() -> None:
    rows = [("matmul", [-1, -2]), ("relu", [0]), ("matmul", [1, -2])]
    found = partition(chain_graph(rows, [2]), lambda stage: 1.0)
    assert all(
        sum(pattern(op.kind) == COMPLEX for op in stage.operators) == 1 for stage in found.stages
    )


def layers(count: int) -> list[tuple[str, list[int]]]:
    rows: list[tuple[str, list[int]]] = []
    x = -1
    for _ in range(count):
        n = len(rows)
        rows += [
            ("layer_norm", [x]), ("matmul", [n, -2]), ("add", [n + 1, -2]), ("permute", [n + 2]),
            ("softmax", [n + 3]), ("matmul", [n + 4, n + 2]), ("add", [n + 5, x]),
            ("layer_norm", [n + 6]), ("matmul", [n + 7, -2]), ("add", [n + 8, -2]),
            ("gelu", [n + 9]), ("matmul", [n + 10, -2]), ("add", [n + 11, -2]),
            ("add", [n + 12, n + 6]),
        ]  # fmt: skip
        x = len(rows) - 1
    return rows


def test_identical_layers_are_priced_once_and_the_search_is_linear_in_them() -> None:
    def cost(count: int) -> tuple[int, float]:
        """The number of stages priced, and the pairs weighed per layer."""
        rows = layers(count)
        found = partition(chain_graph(rows, [len(rows) - 1]), lambda s: 1.0 + len(s.operators))
        assert found.states == len(rows) and found.unique <= len(found.stages)
        assert sum(found.weights().values()) == len(found.stages)
        return found.priced, found.transitions / count

    assert cost(48) == cost(3) and cost(3)[0] < 300 and cost(3)[1] < 100


def steps(count: int) -> Graph:
    """A loop that was written out: each step adds its row of x to what a product makes of the state
    before.
    """
    row = TensorType((1, 4))
    graph = Graph(("x", "h"), (), {"x": TensorType((count, 4)), "h": row, "w": SQUARE})
    graph.constants["w"] = None  # type: ignore[assignment]
    state = "h"
    for t in range(count):
        part = graph.add("slice", ("x",), row, begin=(t, 0), strides=(1, 1))
        state = graph.add("tanh", (graph.add("add", (graph.add("matmul", (state, "w")), part)),))
    graph.outputs = (state,)
    return graph


def test_steps_of_a_loop_are_priced_once() -> None:
    """They differ in where they read a sequence alone."""

    def by_length(stage: Stage) -> float:
        return 1.0 + len(stage.operators) / 8

    few, many = (partition(steps(n), by_length) for n in (6, 30))
    assert many.priced == few.priced and len(many.stages) == 30
    assert len({stage.key for stage in many.stages}) == 30
    assert len({stage.key_anywhere for stage in many.stages}) == 1


def test_a_kernel_that_cannot_begin_at_one_step_is_not_chosen_there() -> None:
    def fourth_alone(stage: Stage) -> float:
        begins = [op["begin"][0] for op in stage.operators if op.kind == "slice"]
        if 3 in begins and len(stage.operators) > 1:
            return math.inf
        return 1.0 + len(stage.operators) / 8

    found = partition(steps(6), fourth_alone)
    assert found.seconds < math.inf and len(found.stages) == 7
    assert [s.label for s in found.stages].count("slice") == 1


def test_fewer_stages_of_large_cones_are_priced() -> None:
    """The states of a loop, put together: any of them may be in the stage."""

    def together(count: int) -> int:
        graph = Graph(("x",), (), {"x": TensorType((1, 4))})
        parts = [graph.add("tanh", ("x",)) for _ in range(count)]
        graph.outputs = (graph.add("concat", parts, TensorType((count, 4)), axis=0),)
        return partition(graph, lambda stage: 1.0 + len(stage.operators) / 8).priced

    few, many = together(40), together(400)
    assert many < few < 1100


def wide(count: int, dear: Sequence[int] = ()) -> Graph:
    rows: list[tuple[str, list[int]]] = [
        ("exp" if n in dear else "relu", [-1]) for n in range(count)
    ]
    total = 0
    for n in range(1, count):
        rows.append(("add", [total, n]))
        total = len(rows) - 1
    return chain_graph(rows, [total])


def test_too_many_stages_are_reported() -> None:
    found = partition(wide(14), lambda stage: 10.0 + len(stage.operators), max_candidates=200)
    assert any("may not be the optimum" in note for note in found.notes)
    assert found.seconds == 37.0  # the greedy closure, one stage, is among the beam's
    exact = partition(wide(4), lambda stage: 10.0 + len(stage.operators), max_candidates=200)
    assert not exact.notes


def test_a_search_that_has_priced_much_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wide(9)

    def cost(stage: Stage) -> float:
        return 10.0 + len(stage.operators)

    patient = partition(graph, cost)
    monkeypatch.setattr("gtco.graph.fusion.dpof.MOST_PRICED", 50)
    monkeypatch.setattr("gtco.graph.fusion.dpof.HURRIED", 20)
    found = partition(graph, cost)
    assert not patient.notes and any("more than 20 stages" in note for note in found.notes)
    assert found.priced < patient.priced and found.seconds == patient.seconds


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 1 << 20))
def test_a_descent_gives_a_partition_no_worse_than_none(graph: Graph, seed: int) -> None:
    """With room for 3 candidates a sink, nearly every search is cut. The partition has the cost
    that it names, which lies between the optimum and the sum of the single operators. It is the
    same each time.
    """
    cost = random_cost(seed, 0)
    exact, cut = partition(graph, cost), partition(graph, cost, max_candidates=3)
    alone = sum(
        cost(make_stage([op], graph.types, graph.constants)) for op in graph.operators.values()
    )
    assert exact.seconds <= cut.seconds == sum(map(cost, cut.stages)) <= alone
    made = [op.output for stage in cut.stages for op in stage.operators]
    assert sorted(made) == sorted(graph.operators)
    assert cut.stages == partition(graph, cost, max_candidates=3).stages


def test_a_descent_leaves_out_what_does_not_pay() -> None:
    """Two expensive operators in a wide tree; every greedy stage contains them."""
    graph = wide(12, dear=(2, 7))

    def cost(stage: Stage) -> float:
        dear = sum(op.kind == "exp" for op in stage.operators)
        return 10.0 + len(stage.operators) + 50.0 * dear * (len(stage.operators) > 1)

    found = partition(graph, cost, max_candidates=400)
    assert found.notes and found.seconds == 10.0 + 21 + 2 * 11.0


def test_a_size_limit_that_cuts_is_reported() -> None:
    rows = [("relu", [n - 1]) for n in range(6)]
    found = partition(chain_graph(rows, [5]), lambda stage: 1.0, max_operators=4)
    assert max(len(s.operators) for s in found.stages) == 4 and found.seconds == 2.0
    assert found.notes == (
        "fusion search: stages are limited to 4 operators; at relu 't4' (float32[4x4]), a cone of "
        "5 operators and 1 more",
    )
    assert not partition(chain_graph(rows, [5]), lambda stage: 1.0, max_operators=6).notes


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 1 << 20), st.integers(1, 4))
def test_a_size_limit_leaves_out_larger_stages_alone(graph: Graph, seed: int, most: int) -> None:
    """The partition is the best of those whose stages are all small enough."""
    cost = random_cost(seed, 0)

    def small(stage: Stage) -> float:
        return cost(stage) if len(stage.operators) <= most else math.inf

    found = partition(graph, cost, max_operators=most)
    assert found.seconds == partition(graph, small).seconds


def test_a_long_chain_has_as_many_kinds_of_cones_as_a_stage_has_operators() -> None:
    """Each operator reads the one before it and the input. Beyond the limit of a stage nothing
    above a sink matters, so the search of a long chain repeats that of a short one.
    """
    rows = [("add", [n - 1, -1]) for n in range(300)]
    graph = chain_graph(rows, [299])
    search = Search(graph, Pricer(lambda stage: 1.0), no_floor, any_anchors, 8, 64, {})
    stages = search.select_schedule()
    # at the beginning, of 1 to 8 operators and of one more that sees the limit; behind it, one
    assert len(search.cones) == 10
    assert len(stages) == -(-300 // 8) and max(len(s.operators) for s in stages) == 8
    assert len(search.notes) == 1 and search.notes[0].endswith(" and 291 more")


def test_impossible_operators_are_all_named() -> None:
    rows = [("relu", [-1]), ("softmax", [0]), ("matmul", [1, -2])]
    bad = {"softmax", "matmul"}
    with pytest.raises(UnsupportedError, match=r"softmax \(1\): 't1'; matmul \(1\): 't2'"):
        partition(
            chain_graph(rows, [2]),
            lambda s: math.inf if bad & {op.kind for op in s.operators} else 1.0,
        )


@settings(max_examples=200, deadline=None)
@given(graphs(most=10))
def test_post_dominators_stand_on_every_way_out(graph: Graph) -> None:
    """The nearest operator that lies on all ways to the exit; -1 if there is none."""
    names = list(graph.operators)
    position = {name: n for n, name in enumerate(names)}
    users = [[position[op.output] for op in graph.consumers(name)] for name in names]
    stored = [name in graph.outputs for name in names]

    def leaves(n: int, without: int) -> bool:
        return n != without and (stored[n] or any(leaves(user, without) for user in users[n]))

    expected = [
        min((m for m in range(n + 1, len(names)) if not leaves(n, m)), default=-1)
        for n in range(len(names))
    ]
    assert post_dominators(users, stored) == expected


def test_no_stage_has_an_operator_along_many_paths() -> None:
    """A chain each of whose operators reads the one before twice has 2^n paths. No stage of it has
    more than MOST_PATHS, and those of a chain of single readers may be longer.
    """
    shape = TensorType((64,))

    def chain(reads_twice: bool, length: int) -> Graph:
        types = {f"t{n}": shape for n in range(length + 1)}
        operators = {
            f"t{n}": Operator(
                "multiply", (f"t{n - 1}", f"t{n - 1}" if reads_twice else "t0"), f"t{n}", shape
            )
            for n in range(1, length + 1)
        }
        return Graph(("t0",), (f"t{length}",), types, {}, operators)

    def cost(stage: Stage) -> float:
        return 1.0

    twice = partition(chain(True, 14), cost)
    assert max(len(stage.operators) for stage in twice.stages) == 1 + int(math.log2(MOST_PATHS))
    assert len(partition(chain(False, 14), cost).stages) == 1
