"""Legal assignments of loops to the loops of a row, against the paper's counts and brute force."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtco.tensor.analysis.contraction import contraction
from gtco.tensor.analysis.loop_nest import loop_nest
from gtco.tensor.analysis.mapping import Index, LoopNest, Mapping, axis, legal, mappings, widest
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage


def convolution(rank: int) -> LoopNest:
    """C[n, co, p...] += A[n, ci, (p + r)...] * B[co, ci, r...]: the loops of GTCO's example."""
    space, taps = "pqo"[:rank], "rst"[:rank]
    extents = tuple((x, 3) for x in ("n", "co", *space, "ci", *taps))
    return LoopNest(
        extents,
        (axis("n"), axis("co"), *map(axis, space)),
        (axis("n"), axis("ci"), *(axis(p, r) for p, r in zip(space, taps, strict=True))),
        (axis("co"), axis("ci"), *map(axis, taps)),
    )


def matrix(nest: LoopNest, index: Index, x: str, y: str) -> bool:
    """True if the two loops reach extent x extent different elements while all other loops rest."""
    known = dict(nest.extents)
    reached = {
        tuple((i if x in part else 0) + (j if y in part else 0) for part in index)
        for i, j in product(range(known[x]), range(known[y]))
    }
    return len(reached) == known[x] * known[y]


def by_brute_force(nest: LoopNest) -> set[tuple[frozenset[str], ...]]:
    """Tries every assignment of every loop to m, n, k or nothing, and checks it by the
    definition.
    """
    found = set()
    tensors = (nest.c, nest.a, nest.b)
    used = {name: [any(name in p for p in index) for index in tensors] for name in nest.loops}
    wanted = {"m": [True, True, False], "n": [True, False, True], "k": [False, True, True]}
    for roles in product(["m", "n", "k", ""], repeat=len(nest.loops)):
        given_roles = dict(zip(nest.loops, roles, strict=True))
        if any(r and used[x] != wanted[r] for x, r in given_roles.items()):
            continue
        m, n, k = (frozenset(x for x, r in given_roles.items() if r == role) for role in "mnk")
        pairs = ((nest.a, m, k), (nest.b, k, n), (nest.c, m, n))
        if all((m, n, k)) and all(
            all(any(matrix(nest, i, x, y) for y in others) for x in group)
            for i, left, right in pairs
            for group, others in ((left, right), (right, left))
        ):
            found.add((m, n, k))
    return found


@pytest.mark.parametrize("rank, count", [(1, 6), (2, 35), (3, 180)])
def test_the_papers_counts(rank: int, count: int) -> None:
    nest = convolution(rank)
    found = [tuple(map(frozenset, (x.m, x.n, x.k))) for x in mappings(nest)]
    assert len(found) == len(set(found)) == count
    assert set(found) == by_brute_force(nest)


def test_a_convolution_of_a_model_has_the_papers_mappings() -> None:
    """Groups and phases index all three tensors, so they stay outside."""
    op = conv(image=(2, 9, 8, 6), weights=(10, 3, 3, 2), groups=2)
    assert len(list(mappings(loop_nest(op, (2, 9, 8, 6), (10, 3, 3, 2))))) == 35


def test_illegal_ones() -> None:
    nest = convolution(2)
    assert legal(nest, Mapping(("p",), ("co",), ("s",)))
    assert not legal(nest, Mapping(("p",), ("co",), ("r",)))  # one vector, p + r
    assert not legal(nest, Mapping(("co",), ("co",), ("ci",)))  # co does not index A
    assert not legal(nest, Mapping(("n",), ("co",), ()))
    assert not legal(nest, Mapping(("n", "p"), ("co",), ("r",)))  # p has no partner
    assert legal(nest, Mapping(("n", "p"), ("co",), ("r", "s")))


@st.composite
def nests(draw: st.DrawFn) -> LoopNest:
    """Up to seven loops. Each belongs to two random operands, whose indices are random sums."""
    names = [f"l{i}" for i in range(draw(st.integers(3, 7)))]
    roles = {x: draw(st.sampled_from(["ca", "cb", "ab", "cab"])) for x in names}

    def index(tensor: str) -> Index:
        mine = [x for x in names if tensor in roles[x]]
        where = {x: draw(st.integers(0, 3)) for x in mine}
        return tuple(axis(*(x for x in mine if where[x] == w)) for w in sorted(set(where.values())))

    return LoopNest(tuple((x, 2) for x in names), index("c"), index("a"), index("b"))


@settings(max_examples=40, deadline=None)
@given(nests(), st.sets(st.sampled_from(["l0", "l1", "l2"])))
def test_any_nest(nest: LoopNest, outside: set[str]) -> None:
    found = {tuple(map(frozenset, (x.m, x.n, x.k))) for x in mappings(nest)}
    assert found == by_brute_force(nest)
    allowed = [x for x in found if not outside & frozenset().union(*x)]
    most = widest(nest, frozenset(outside))
    assert (most is None) == (not allowed)
    if most is not None:
        assert legal(nest, most)
        assert all(frozenset().union(*x) <= most.mapped for x in allowed)


# views ------------------------------------------------------------------------------------------
def conv(
    image: tuple[int, ...], weights: tuple[int, ...], groups: int = 1, kind: str = "conv2d"
) -> Operator:
    n, h, w, _ = image
    kh, kw = weights[2:]
    out = (n, h - kh + 1, w - kw + 1, weights[0])
    attrs = make_attrs(
        layout="NHWC", groups=groups, strides=(1, 1), padding=(0,) * 4, dilation=(1, 1)
    )
    return Operator(kind, ("x", "w"), "y", TensorType(out), attrs)


def product_of(a: tuple[int, ...], b: tuple[int, ...]) -> Operator:
    out = (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    return Operator("matmul", ("x", "w"), "y", TensorType(out))


VIEWED = {
    "dense": ((2, 5, 7), (7, 4), product_of),
    "batched": ((2, 3, 5, 7), (2, 3, 7, 4), product_of),
    "one_b_a_batch": ((2, 3, 5, 7), (3, 7, 4), product_of),
    "one_a_for_batches": ((1, 5, 7), (3, 7, 4), product_of),
    "conv": ((2, 6, 7, 5), (4, 5, 3, 2), conv),
    "conv_of_one_tap": ((2, 6, 7, 5), (4, 5, 1, 1), conv),
}


@pytest.mark.parametrize("name", VIEWED)
def test_a_view_is_the_widest_mapping(name: str) -> None:
    """Its m, n, k and batch count through the mapping's loops, and it describes A, B and C as the
    nest does.
    """
    a, b, make = VIEWED[name]
    op = make(a, b)
    stage = make_stage([op], {"x": TensorType(a), "w": TensorType(b), "y": op.type}, ["w"])
    view = contraction(stage, op)
    assert view is not None
    nest = loop_nest(op, a, b)
    mapping = widest(nest, frozenset(x for x in nest.loops if x.startswith("batch of B")))
    assert mapping is not None and legal(nest, mapping)
    outer = tuple(x for x in nest.loops if x not in mapping.mapped)
    known = dict(nest.extents)
    assert (view.m, view.n, view.k) == tuple(map(nest.extent, (mapping.m, mapping.n, mapping.k)))
    assert view.batch == nest.extent(outer)
    assert view.batch * view.m * view.n == prod(int(d) for d in op.type.shape)

    rng = np.random.default_rng(3)
    for _ in range(20):
        at = {x: int(rng.integers(n)) for x, n in nest.extents}

        def flat(loops: tuple[str, ...], at: dict[str, int] = at) -> int:
            position = 0
            for x in loops:
                position = position * known[x] + at[x]
            return position

        def where(index: Index, shape: tuple[int, ...], at: dict[str, int] = at) -> list[int]:
            """The position by the nest; 0 for an axis of one element that no loop indexes."""
            values = [sum(at[x] for x in part) for part in index]
            return [0] * (len(shape) - len(values)) + values

        m, n, k, outside = (flat(x) for x in (mapping.m, mapping.n, mapping.k, outer))
        assert list(view.c_index(outside, m, n)) == where(nest.c, view.out_shape)
        assert list(view.a_index(outside, m, k)) == where(nest.a, a)
        assert list(view.b_index(outside, k, n)) == where(nest.b, b)
