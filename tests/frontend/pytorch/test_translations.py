"""Operators that torch's own exporter does not translate, among them
``scaled_dot_product_attention`` of any number of axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def _tensors(*lead: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*lead, length, 16) for length in (6, 9, 9))


def _check(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    graph = lower(load_pytorch(module, inputs, simplify=False))
    arrays = [x.numpy() for x in inputs]
    (got,) = graph.evaluate(dict(zip(graph.inputs, arrays, strict=True))).values()
    np.testing.assert_allclose(got, module(*inputs).numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 5), (1, 2, 3, 2)], ids=str)
def test_any_number_of_axes(lead: tuple[int, ...]) -> None:
    """torch's exporter translates four axes alone."""
    _check(Attention(scale=0.3), _tensors(*lead))


@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_of_other_ranks(causal: bool) -> None:
    q, k, v = _tensors(2, 3)
    _check(Attention(is_causal=causal), (q[0, 0], k, v))
    _check(Attention(is_causal=causal), (q, k[0], v[0]))


@pytest.mark.parametrize("mask", [torch.rand(6, 9) > 0.3, torch.randn(2, 1, 1, 6, 9)])
def test_masks_are_added_or_hide(mask: Tensor) -> None:
    _check(Attention(), (*_tensors(2, 3, 5), mask))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("lead", [(3,), (2, 4)], ids=str)
def test_rows_of_which_all_keys_are_hidden(lead: tuple[int, ...], kind: str) -> None:
    """torch gives zeros."""
    mask = torch.rand(6, 9) > 0.3
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(6, 9).masked_fill(~mask, -torch.inf)
    _check(Attention(), (*_tensors(*lead), mask))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_of_grouped_queries_of_which_all_keys_are_hidden(groups: int) -> None:
    mask = torch.rand(3, 1, 5, 7) > 0.3
    mask[1, :, 2] = False
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, groups, 7, 8), torch.randn(3, groups, 7, 6)
    _check(Attention(enable_gqa=True), (q, k, v, mask))


def test_causal() -> None:
    _check(Attention(is_causal=True), _tensors(3))


def test_an_error_of_the_exporter_says_its_first_cause() -> None:
    q, k, v = (torch.randn(1, 1, heads, 5, 16) for heads in (4, 2, 2))
    with pytest.raises(ModelError, match=r"scaled_dot_product_attention.*: only 4D query") as error:
        load_pytorch(Attention(enable_gqa=True), (q, k, v))
    assert "stack trace" not in str(error.value)


class Asked(nn.Module):
    """Whether all and any of the values of two tensors are above 0, beside the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = [torch.ops.aten._is_all_true(y > 0), torch.ops.aten._is_any_true(y > 0)]
        return torch.cat([x, torch.stack(found).float()])


@pytest.mark.parametrize("y", [[1.0, 2.0], [-1.0, 2.0], [[-1.0, -2.0]], 1.0, -1.0], ids=str)
def test_all_and_any_of_a_tensor(y: Any) -> None:
    """transformers asks so about masks (siglip2) and anchors (d-fine)."""
    _check(Asked(), (torch.zeros(2), torch.tensor(y)))


@pytest.mark.parametrize("lead", [(3,), (2, 4)], ids=str)
def test_a_negative_scale(lead: tuple[int, ...]) -> None:
    _check(Attention(scale=-0.4), _tensors(*lead))


def test_grouped_queries() -> None:
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    _check(Attention(enable_gqa=True), (q, k, v))


class OfOne(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, 1, dtype=torch.float32),
        lambda x: torch.log_softmax(x, -1, dtype=torch.float32),
        lambda x: x.mean(1, dtype=torch.float32),
        lambda x: x.mean((0, 2), keepdim=True, dtype=torch.float32),
        lambda x: x.mean([], dtype=torch.float32),
        lambda x: x.float().mean([0, -1], keepdim=True),
        lambda x: x.float().mean(None, keepdim=True),
        lambda x: torch.ops.aten.softmax.int(x.float(), 1, None),
    ],
    ids=["softmax", "log_softmax", "mean", "means", "all", "floats", "all_floats", "softmax_none"],
)
def test_integers_are_cast_first(function: Any) -> None:
    _check(OfOne(function), (torch.randint(-3, 4, (2, 5, 3)),))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("function", [torch.cummax, torch.cummin], ids=["max", "min"])
def test_running_extremes(function: Any, dtype: Any, dim: int) -> None:
    """Of equal ones the last has the place."""
    x = torch.randint(-3, 4, (4, 6, 5)).to(dtype)
    x[1, 2, 3] = -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    _check(OfOne(lambda x: function(x, dim).values), (x,))
    _check(OfOne(lambda x: function(x, dim).indices), (x,))


def test_running_extremes_along_an_open_axis() -> None:
    module, x = OfOne(lambda x: torch.cummax(x, 1).values), torch.randn(2, 5)
    open_axis = {"x": {1: torch.export.Dim("n", min=2, max=8)}}
    program = torch.export.export(module, (x,), dynamic_shapes=open_axis)
    graph = lower(load_pytorch(program, shapes={"x": (2, 7)}))
    given = torch.randn(2, 7)
    (got,) = graph.evaluate({"x": given.numpy()}).values()
    np.testing.assert_array_equal(got, module(given).numpy())


class OfTwo(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


@pytest.mark.parametrize("function", [torch.atan2, torch.logaddexp])
def test_functions_of_two(function: Any) -> None:
    """All signs and zeros, and numbers whose exponentials overflow."""
    some = torch.tensor([0.0, 1.0, -1.0, 162.0, -162.0, 3e-5])
    x, y = torch.cartesian_prod(some, some).T.contiguous()
    _check(OfTwo(function), (x, y))
    if function is torch.logaddexp:
        endless = torch.tensor([float("inf"), -float("inf")])
        _check(OfTwo(function), (endless, endless.clone()))


class Put(nn.Module):
    """A mask chooses what a token replaces, as in masked image modelling."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(shape), requires_grad=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[mask] = self.token
        return x


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5)], ids=str)
def test_a_mask_chooses_what_is_written(shape: tuple[int, ...]) -> None:
    _check(Put(*shape), (torch.randn(2, 7, 5), torch.rand(2, 7) > 0.5))


def test_a_mask_of_all_axes() -> None:
    _check(Put(), (torch.randn(2, 7, 5), torch.rand(2, 7, 5) > 0.5))


class PutBehind(Put):
    """The axes before those of the mask are whole."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[:, mask] = self.token
        return x


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (1, 1, 5), (2, 1, 5)], ids=str)
@pytest.mark.parametrize("masked", [(7,), (3, 4)], ids=str)
def test_a_mask_behind_whole_axes(masked: tuple[int, ...], shape: tuple[int, ...]) -> None:
    _check(PutBehind(*shape), (torch.randn(2, *masked, 5), torch.rand(masked) > 0.5))


def test_a_mask_of_the_last_axis() -> None:
    _check(PutBehind(2, 1), (torch.randn(2, 7), torch.rand(7) > 0.5))


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_places_of_a_mask_choose_what_is_written(lead: tuple[int, ...]) -> None:
    """So OneFormer shows everything to queries whose mask hides everything."""

    def shown(x: Tensor) -> Tensor:
        hidden = x > 0
        hidden[torch.where(hidden.sum(-1) == hidden.shape[-1])] = False
        return hidden.float()

    _check(OfOne(shown), (torch.randn(*lead, 9, 2),))


class Projected(nn.Module):
    """All that an LSTM with projections returns, as one tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(5, 6, proj_size=3, **options)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, (h, c) = self.lstm(x, (h, c))
        return torch.cat([y.flatten(), h.flatten(), c.flatten()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "num_layers": 2},
        {"bidirectional": True, "num_layers": 2, "batch_first": True},
    ],
    ids=["plain", "layers", "directions"],
)
def test_an_lstm_with_projections(options: dict[str, Any]) -> None:
    """torch's exporter leaves the projection out, and takes it for a weight of the next layer."""
    module = Projected(**options)
    states = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    batch = 4 if options.get("batch_first") else 2
    x, h, c = (torch.randn(4, 2, 5), torch.randn(states, batch, 3), torch.randn(states, batch, 6))
    with torch.no_grad():
        _check(module, (x, h, c))
