"""What gtco reads in a graph of torch's before it compiles it: the arguments of a call, the batch,
floats, and where results lie.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gtco.integrations.torch_compile import backend  # noqa: E402
from gtco.integrations.torch_graph import Place, constants_of, floats_of  # noqa: E402
from gtco.integrations.torch_sizes import Batch, batch_of  # noqa: E402
from gtco.support.errors import ModelError  # noqa: E402
from gtco.support.sizes import MOST_SIZE  # noqa: E402
from tests.integrations.torch_compile.test_batches import seen  # noqa: E402


class Double(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


class Mixed(torch.nn.Module):
    """Of a batch x and a matrix that has the batch along both of its axes."""

    def forward(self, x: Any, matrix: Any) -> Any:
        return x * 2, matrix @ x


def batch_in(graph: Any, arguments: Any) -> Batch | None:
    return batch_of(graph, constants_of(graph, arguments))


# the arguments of a call --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo, and gtco takes dense ones"),
        (torch.empty(3, device="meta"), "tensors are on meta, and gtco compiles for CPUs"),
    ],
    ids=["sparse", "meta"],
)
def test_tensors_that_are_not_dense_ones_of_the_cpu_are_refused(tensor: Any, said: str) -> None:
    graph = torch.fx.symbolic_trace(Double())
    with pytest.raises(ModelError) as error:
        backend(graph, [tensor])
    assert said in str(error.value)


# the batch ----------------------------------------------------------------------------------------
def test_a_batch_along_two_axes_of_a_tensor_is_none() -> None:
    assert batch_in(*seen(Mixed(), torch.randn(5, 4), torch.randn(5, 5))) is None


def test_a_batch_may_have_no_more_than_a_range() -> None:
    """torch may be told that more are possible."""
    found: list[Any] = []

    def watching(graph: Any, _: Any) -> Any:
        return lambda *arguments: (found.append((graph, arguments)), graph(*arguments))[1]

    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=2 * MOST_SIZE)
    torch.compile(Double(), backend=watching)(x)
    ((graph, arguments),) = found
    batch = batch_in(graph, arguments)
    assert batch is not None and (batch.sizes.low, batch.sizes.high) == (2, MOST_SIZE)


def test_a_number_that_is_twice_the_batch_is_not_the_batch() -> None:
    """A graph that takes one has no batch: gtco sets numbers to the batch itself."""
    graph, arguments = seen(Double(), torch.randn(5, 4))
    batch = batch_in(graph, arguments)
    assert batch is not None and len(batch.numbers) == 1
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    number = nodes[batch.numbers[0]]
    number.meta["example_value"] = 2 * number.meta["example_value"]
    assert batch_in(graph, arguments) is None


# floats and places --------------------------------------------------------------------------------
def test_floats_are_what_the_graph_reads_by_item_alone() -> None:
    """A tensor that is also added to something stays an argument."""

    def placeholder(*users: Any) -> Any:
        meta = {"grapharg": SimpleNamespace(pass_arg_as_tensor=True)}
        return SimpleNamespace(op="placeholder", meta=meta, users=users)

    item = SimpleNamespace(op="call_method", target="item")
    add = SimpleNamespace(op="call_function", target="add")
    nodes = [placeholder(item), placeholder(item, add), placeholder()]
    assert floats_of(SimpleNamespace(graph=SimpleNamespace(nodes=nodes))) == (0, 2)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (1, 2), True),
        ((2, 3), (1, 3), False),
        ((1, 3), (7, 1), True),
        ((3, 1), (1, 99), True),
    ],
)
def test_strides_of_axes_of_one_element_do_not_count(
    shape: tuple[int, ...], strides: tuple[int, ...], dense: bool
) -> None:
    assert Place(shape, strides, 0).dense is dense
