"""What a graph does at a batch that is seen for the first time, without a run of the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gtco.integrations import torch_compile  # noqa: E402
from gtco.integrations.torch_batches import any_batch  # noqa: E402
from gtco.integrations.torch_compile import backend  # noqa: E402
from gtco.integrations.torch_graph import constants_of, examine  # noqa: E402
from gtco.integrations.torch_sizes import batch_of  # noqa: E402
from tests.integrations.torch_compile.shared import check_same  # noqa: E402
from tests.integrations.torch_compile.test_sizes import Windows  # noqa: E402


class Turned(torch.nn.Module):
    """Results in other layouts: turned, in channels last, a part of another, a view of the input,
    and sizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        y = self.conv(x.to(memory_format=torch.channels_last))
        turned = y.flatten(2).permute(2, 0, 1)
        moved = y.permute(1, 0, 2, 3).contiguous()
        return y, moved, turned, y[:, 1:3], x[:, 0], 3 * x.shape[0], None


class Squared(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2, x.shape[0] ** 2


class Halves(torch.nn.Module):
    """A result that is computed, and a view of the input."""

    def forward(self, x: Any) -> Any:
        return x * 2, x[:, 1:]


def seen(model: Any, *inputs: Any) -> tuple[Any, list[Any]]:
    """torch's graph of the model for any batch, and the arguments of a call of it."""
    found: list[Any] = []

    def watching(graph: Any, _: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found.append((graph, list(arguments)))
            return graph(*arguments)

        return call

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model.eval(), backend=watching, dynamic=True)(*inputs)
    ((graph, arguments),) = found
    return graph, arguments


@pytest.mark.parametrize(
    ("model", "shapes"),
    [(Turned(), [(3, 8, 9)]), (Windows(), [(6, 4), ()])],
    ids=["layouts", "windows"],
)
def test_facts_at_any_batch_are_those_of_a_run(model: Any, shapes: list[tuple[int, ...]]) -> None:
    graph, arguments = seen(model, *(torch.randn(5, *shape) for shape in shapes))
    batch = batch_of(graph, constants_of(graph, arguments))
    assert batch is not None
    found = any_batch(graph, arguments, batch)
    assert found is not None and found.at(1) is None
    for size in (2, 3, 17, 64):
        given = list(arguments)
        for (number, _), shape in zip(batch.places, shapes, strict=True):
            given[number] = torch.randn(size, *shape)
        for number in batch.numbers:
            given[number] = size
        assert found.at(size) == examine(graph, given)


def test_what_is_no_straight_line_is_left() -> None:
    graph, arguments = seen(Squared(), torch.randn(5, 4))
    batch = batch_of(graph, constants_of(graph, arguments))
    assert batch is not None and any_batch(graph, arguments, batch) is None


def test_a_batch_that_is_not_outermost_in_memory_is_left() -> None:
    """The strides that its views have at another batch do not follow from this call's."""
    graph, arguments = seen(Halves(), torch.randn(4, 5).t())
    batch = batch_of(graph, constants_of(graph, arguments))
    assert batch is not None and any_batch(graph, arguments, batch) is None
    graph, arguments = seen(Halves(), torch.randn(5, 4))
    batch = batch_of(graph, constants_of(graph, arguments))
    assert batch is not None and any_batch(graph, arguments, batch) is not None


def test_a_new_batch_runs_no_graph(compiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    def counted(graph: Any, arguments: Any) -> Any:
        runs.append(arguments)
        return examine(graph, arguments)

    monkeypatch.setattr(torch_compile, "examine", counted)
    model = Windows()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for batch in (3, 7, 64, 3, 2):
        x, mask = torch.randn(batch, 6, 4), torch.rand(batch)
        check_same(compiled(x, mask), model(x, mask))
    assert len(compiles) == len(runs) == 1


def test_a_batch_with_other_results_is_compiled_anew(
    compiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of a range is not taken at a batch at which the graph writes to other tensors."""
    model = torch.nn.Linear(4, 2)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    x = torch.randn(3, 4)
    check_same(compiled(x), model(x))
    at_five = [lambda facts: replace(facts, written=(0, 1)), lambda facts: facts]

    def changed(graph: Any, arguments: Any) -> Any:
        return at_five.pop(0)(examine(graph, arguments))

    monkeypatch.setattr(torch_compile.AnyBatch, "at", lambda *_: None)
    monkeypatch.setattr(torch_compile, "examine", changed)
    x = torch.randn(5, 4)
    check_same(compiled(x), model(x))
    assert [one.shapes for one in compiles] == [[(3, 4)], [(5, 4)]]
