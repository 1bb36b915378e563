"""Operators for which torch's ONNX exporter has no translation, and defaults of those that gtco
translates itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _check(function: Any, *tensors: Tensor, atol: float = 2e-6) -> None:
    """``atol`` is relative where a value is greater than 1."""
    graph = lower(load_pytorch(Function(function), tensors, simplify=False))
    arrays = [x.numpy() for x in tensors]
    got = graph.evaluate(dict(zip(graph.inputs, arrays, strict=True))).values()
    wanted = function(*tensors)
    for one, theirs in zip(got, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True):
        assert str(one.dtype) == str(theirs.dtype).removeprefix("torch.")
        np.testing.assert_allclose(one, theirs.numpy(), rtol=atol, atol=atol)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_equal_elements_stay_in_order(dim: int, descending: bool) -> None:
    x = torch.randint(0, 3, (3, 7, 5)).float()
    _check(lambda x: torch.sort(x, stable=True, dim=dim, descending=descending), x)
    _check(lambda x: torch.argsort(x, stable=True, dim=dim, descending=descending), x)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_places_are_ordered_too(dim: int) -> None:
    """Masked autoencoders put tokens back with the inverse of a permutation. A kernel orders them,
    not Relax, whose call would have the size of the batch in its attributes.
    """
    x = torch.randn(4, 7, 5)

    def inverse(x: Tensor) -> Any:
        places = torch.argsort(x, dim=dim)
        return torch.argsort(places, dim=dim), torch.sort(places, dim=dim, descending=True).values

    _check(inverse, x)
    graph = lower(load_pytorch(Function(inverse), (x,), simplify=False))
    kinds = [op.kind for op in graph.operators.values()]
    assert kinds.count("topk") == 3 and "relax" not in kinds


def test_a_number_is_in_order() -> None:
    _check(lambda x: torch.sort(x, stable=True), torch.tensor(3.0))


@pytest.mark.parametrize("options", [{}, {"right": True}, {"side": "right", "out_int32": True}])
def test_places_in_a_sequence(options: Any) -> None:
    """Rows of their own, one sequence for all, a number, and elements that are equal."""

    def places(ordered: Tensor, x: Tensor) -> Tensor:
        return torch.searchsorted(ordered, x, **options)

    rows = torch.randint(0, 9, (2, 3, 7)).float().sort(-1).values
    x = torch.randint(-1, 10, (2, 3, 4)).float()
    _check(places, rows, x)
    _check(places, rows[0, 0].contiguous(), x)
    _check(places, rows[0, 0].contiguous(), torch.tensor(4.0))


def test_a_sorter_is_refused() -> None:
    with pytest.raises(ModelError, match="sorter"):
        _check(
            lambda o, x: torch.searchsorted(o, x, sorter=torch.argsort(o)),
            torch.randn(5),
            torch.randn(3),
        )


def test_hypotenuses_of_all_sizes() -> None:
    some = torch.tensor([0.0, 1.0, -1.5, 3e30, -3e30, 1e-30, torch.inf, -torch.inf])
    x, y = torch.cartesian_prod(some, some).T.contiguous()
    _check(torch.hypot, x, y)


def test_signs() -> None:
    some = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, 1e-40])
    x, y = torch.cartesian_prod(some, some).T.contiguous()
    _check(torch.copysign, x, y)
    _check(torch.signbit, y)
    _check(torch.signbit, torch.tensor([0, -1, 2, -3]))


def test_extremes_that_pass_over_nan() -> None:
    some = torch.tensor([0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan])
    x, y = torch.cartesian_prod(some, some).T.contiguous()
    _check(lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), x, y)
    _check(torch.fmax, torch.randint(-5, 5, (9,)), torch.randint(-5, 5, (9,)))


@pytest.mark.parametrize("function", [torch.floor, torch.ceil, torch.round, torch.trunc])
def test_rounding(function: Any) -> None:
    _check(function, torch.randint(-5, 5, (9,)))
    _check(function, torch.tensor([-2.5, -1.5, -0.4, 0.5, 1.5, 2.5, torch.inf, torch.nan]))


@pytest.mark.parametrize("rows", [(4, 7), (30, 9)], ids=["differences", "product"])
@pytest.mark.parametrize("p", [0.0, 0.7, 1.0, 2.0, 3.0, torch.inf])
def test_distances(p: float, rows: tuple[int, int]) -> None:
    x, y = (torch.randn(2, n, 6) for n in rows)
    if p == 0.0:
        x, y = x.round(), y.round()
    _check(lambda x, y: torch.cdist(x, y, p), x, y, atol=1e-5)
    modes = ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")
    for mode in modes if p == 2.0 else ():
        _check(lambda x, y: torch.cdist(x, y, compute_mode=mode), x[0], y[0], atol=1e-5)  # noqa: B023


def test_running_products() -> None:
    _check(lambda x: torch.cumprod(x, 1), torch.randn(2, 6, 3))
    _check(lambda x: torch.cumprod(x, 0), torch.randint(-3, 4, (5, 2)))


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 2)], ids=str)
def test_side_by_side(shape: tuple[int, ...]) -> None:
    _check(lambda x, y: torch.hstack((x, y, x)), torch.randn(shape), torch.randn(shape))


@pytest.mark.parametrize("dims", [0, 1, -1, (0, 1), (1, 2), (0, -1)], ids=str)
def test_axes_that_are_not_1_stay(dims: Any) -> None:
    _check(lambda x: x.squeeze(dims), torch.randn(3, 1, 2))
    _check(lambda x: x.squeeze(0), torch.tensor(2.0))


def test_a_sum_of_booleans_is_either() -> None:
    _check(lambda x, y: x + y, torch.rand(3, 4) > 0.5, torch.rand(4) > 0.5)
    _check(lambda x: x + True, torch.rand(3, 4) > 0.5)


@pytest.mark.parametrize(
    "function",
    [
        torch.log_softmax,
        torch.softmax,
        torch.mean,
        torch.cumsum,
        torch.sort,
        torch.cumprod,
        torch.logsumexp,
    ],
)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)], ids=str)
def test_functions_along_an_axis_without_options(function: Any, shape: tuple[int, ...]) -> None:
    """gtco's own translations also take calls that leave their options out."""
    _check(lambda x: function(x, -1), torch.randn(shape))
    _check(lambda x: function(x, 0), torch.randn(shape))


@pytest.mark.parametrize("made", [(1, 1), (3, 5), (4, 3), (7, 10), (9, 12)], ids=str)
@pytest.mark.parametrize("lead", [(2, 3), (3,)], ids=str)
def test_the_largest_of_adapted_windows(lead: tuple[int, ...], made: tuple[int, int]) -> None:
    """Sizes that divide the map's, sizes that do not, and greater ones; the places too."""
    x = torch.randn(*lead, 6, 10)
    _check(lambda x: torch.nn.functional.adaptive_max_pool2d(x, made), x)
    _check(lambda x: torch.nn.functional.adaptive_max_pool2d(x, made, return_indices=True), x)


def test_the_largest_of_adapted_windows_of_lines_and_volumes() -> None:
    line, volume = torch.randn(2, 3, 11), torch.randn(2, 3, 4, 6, 5)
    _check(lambda x: torch.nn.functional.adaptive_max_pool1d(x, 4, return_indices=True), line)
    _check(lambda x: torch.nn.functional.adaptive_max_pool3d(x, (2, 4, 5), True), volume)
