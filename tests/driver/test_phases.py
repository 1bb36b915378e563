"""What a phase gave is let go of once the next one has its own: graphs hold the weights."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from gtco.compiler import compile_model, stages_of
from gtco.driver import fusing
from gtco.graph.lower import walk
from tests.end_to_end.sizes.test_variants import batched

SHAPES: dict[str, dict[str, Any]] = {
    "one size": {"shapes": {"batch": 1}},
    "a batch": {"shapes": {"batch": 8}},
    "two sizes": {"dims": {"batch": [1, 2]}},
    "many sizes": {"dims": {"batch": [1, 2, 3, 4, 5]}},
    "a range": {"dims": {"batch": "1..64"}},
}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs that were lowered are still there at each search for stages."""
    lower, fuse = walk.lower, fusing.fuse
    lowered: list[weakref.ref[Any]] = []
    found: list[int] = []

    def lowering(imported: Any) -> Any:
        graph = lower(imported)
        lowered.append(weakref.ref(graph))
        return graph

    def fusing_it(*args: Any, **options: Any) -> Any:
        gc.collect()
        found.append(sum(graph() is not None for graph in lowered))
        return fuse(*args, **options)

    monkeypatch.setattr(walk, "lower", lowering)
    monkeypatch.setattr(fusing, "fuse", fusing_it)
    return found


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_graph_before_rewriting_is_gone_when_stages_are_searched(
    shapes: str, alive: list[int]
) -> None:
    with compile_model(batched(), threads=1, cache=False, **SHAPES[shapes]):
        pass
    left = alive.copy()
    # the parts of a range are lowered for its proof, all before the first is cut
    assert left and left[-1] == 0
    assert shapes == "a range" or not any(left)


def test_stages_alone(alive: list[int]) -> None:
    stages_of(batched(), shapes={"batch": 1}, threads=1)
    assert alive == [0]
