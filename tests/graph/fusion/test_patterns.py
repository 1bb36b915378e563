"""The pattern tables: what they forbid, what they allow, and that stages can be grown upwards."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gtco.graph.fusion.patterns import fusable, stage_allowed
from gtco.tensor.stage import Operator, TensorType

SQUARE = TensorType((4, 4))


def ops(*rows: str) -> list[Operator]:
    """``"a=matmul x y"`` rows."""
    made = []
    for row in rows:
        output, _, rest = row.partition("=")
        kind, *inputs = rest.split()
        made.append(Operator(kind, tuple(inputs), output, SQUARE))
    return made


@pytest.mark.parametrize(
    "rows",
    [
        ["a=matmul x w", "b=add a w", "c=gelu b"],
        ["a=layer_norm x g h", "b=matmul a w", "c=add b w", "d=add c r"],
        ["a=permute x", "b=matmul a w", "c=reshape b"],
        ["a=matmul q k", "b=multiply a s", "c=softmax b", "d=matmul c v", "e=permute d"],
        ["a=matmul x w", "b=add a r", "c=layer_norm b g h"],
        ["a=layer_norm x g h", "b=matmul a w", "c=softmax b"],
        ["a=add x y", "b=mean a", "c=multiply b y"],
        ["a=roll x", "b=attention a k v", "c=reshape b"],
        ["a=relu x", "b=max_pool2d a", "c=cast b", "d=permute c"],
        ["a=topk x"],
    ],
)
def test_allowed(rows: list[str]) -> None:
    assert stage_allowed(ops(*rows))


@pytest.mark.parametrize(
    "rows",
    [
        ["a=matmul x w", "b=matmul a w"],
        ["a=matmul x w", "b=gelu a", "c=matmul b w"],
        ["a=matmul x w", "b=matmul y w", "c=add a b"],
        ["a=matmul x w", "b=layer_norm a g h", "c=matmul b w"],
        ["a=conv2d x w", "b=softmax a", "c=matmul b w"],
        ["a=matmul q k", "b=softmax a", "c=matmul b b2", "d=layer_norm c g h"],
        ["a=layer_norm x g h", "b=matmul a k", "c=softmax b", "d=matmul c v"],
        ["a=matmul q k", "b=softmax a", "c=add a b", "d=matmul c v"],  # the scores bypass b
        ["a=softmax x", "b=relu a", "c=mean b"],
        ["a=softmax x", "b=softmax y", "c=add a b"],
        ["a=matmul x w", "b=softmax y", "c=add a b"],  # neither before nor after the product
        ["a=matmul x w", "b=softmax a", "c=mean a", "d=add b c"],
        ["a=max_pool2d x", "b=softmax a"],
        ["a=topk x", "b=relu a"],
        ["a=relu x", "b=topk a"],
        ["a=relu x", "b=relax a"],
    ],
)
def test_forbidden(rows: list[str]) -> None:
    assert not stage_allowed(ops(*rows))


def test_pairs() -> None:
    relu, matmul, softmax, topk = ops("a=relu x", "b=matmul x w", "c=softmax x", "d=topk x")
    assert fusable(relu, matmul) and fusable(matmul, relu) and fusable(softmax, matmul)
    assert not fusable(matmul, matmul) and not fusable(softmax, softmax)
    assert not any(fusable(topk, other) or fusable(other, topk) for other in (relu, matmul, topk))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_dropping_a_source_keeps_a_stage_allowed(data: st.DataObject) -> None:
    """So growing from the sink and stopping at the first refusal loses nothing."""
    kinds = ["relu", "add", "permute", "softmax", "layer_norm", "matmul", "conv2d"]
    stage: list[Operator] = []
    unread: set[str] = set()
    size = data.draw(st.integers(2, 6))
    for n in range(size):
        names = ["x", *(op.output for op in stage)]
        first = data.draw(st.sampled_from(sorted(unread) or names))
        second = data.draw(st.sampled_from(sorted(unread - {first}) or names))
        if len(unread) < size - n - 1:  # later operators can still read what is left
            second = data.draw(st.sampled_from(names))
        output = f"t{n}"
        unread = unread - {first, second} | {output}
        kind = data.draw(st.sampled_from(kinds))
        stage.append(Operator(kind, (first, second), output, SQUARE))
    assume(unread == {stage[-1].output} and stage_allowed(stage))
    makes = {op.output for op in stage}
    for op in stage[:-1]:
        if not set(op.inputs) & makes:
            assert stage_allowed([other for other in stage if other is not op])
