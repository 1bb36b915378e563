"""The pipeline: what it leaves, and what of it another size needs."""

from __future__ import annotations

from gtco.graph.graph import Graph
from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.pipeline import PIPELINE, Passes
from tests.graph.rewrites.test_layer_norm import decomposed_layer_norm
from tests.graphs import build, number, same


def test_an_output_that_is_an_input_keeps_an_identity() -> None:
    same(build(lambda g, x: g.add("multiply", (x, number(g, 1)))), {"identity": 1})


def test_the_rewrites_of_one_size_do_for_another() -> None:
    """Those that changed nothing are left out, and the graph is the same."""

    def made(rows: int) -> Graph:
        return build(lambda g, x: decomposed_layer_norm(g, x, True, False), (2, rows, 8))

    first, whole = Passes(), [canonicalize(made(rows)).dump() for rows in (3, 7)]
    assert canonicalize(made(3), passes=first).dump() == whole[0]
    assert first.changed and len(first.changed) < len(PIPELINE) / 2
    assert canonicalize(made(7), passes=Passes(first.changed)).dump() == whole[1]
    untouched = canonicalize(made(7), passes=Passes(only=()))
    assert untouched.dump() == made(7).dump()
