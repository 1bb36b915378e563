"""What torch's ONNX exporter gets wrong is refused, and what stands beside it is compiled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    avg_pool2d,
    batch_norm,
    cross_entropy,
    instance_norm,
    interpolate,
    pad,
    scaled_dot_product_attention,
)

from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.lower.walk import lower
from gtco.support.errors import UnsupportedError

ONES = torch.ones(2)
PLACES = torch.tensor([[[[0, 0, 1]] * 8] * 2])


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def averaged(x: Tensor, how: str) -> Tensor:
    return x.scatter_reduce(3, PLACES, torch.ones(1, 2, 8, 3), how)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: avg_pool2d(x, 3, divisor_override=5), "divisor_override"),
        (lambda x: averaged(x, "mean"), "reduce='mean'"),
        (lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.1), "dropout_p"),
        (lambda x: batch_norm(x, ONES[:], ONES[:], training=True), "statistics of the batch"),
        (lambda x: cross_entropy(x, x[:, 0].long(), label_smoothing=0.1), "label_smoothing"),
        (lambda x: cross_entropy(x, x.softmax(1)), "probabilities"),
        (lambda x: x.to(torch.uint8) >> 1, "bytes have no sign"),
        (lambda x: interpolate(x, scale_factor=0.55, mode="bilinear", antialias=True), "factor"),
        (
            lambda x: interpolate(x, (4, 5), mode="bicubic", antialias=True, align_corners=True),
            "align_corners beside antialias",
        ),
    ],
    ids=["divisor", "mean", "dropout", "batch", "smoothing", "soft", "shift", "factor", "corners"],
)
def test_what_the_exporter_leaves_out_is_refused(
    function: Callable[[Tensor], Tensor], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        load_pytorch(Of(function).eval(), (torch.randn(1, 2, 8, 10),))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: avg_pool2d(x, 3),
        lambda x: averaged(x, "sum"),
        lambda x: batch_norm(x, ONES, ONES),
        lambda x: batch_norm(x, None, None, training=True),
        lambda x: instance_norm(x, ONES, ONES, use_input_stats=False),
        lambda x: instance_norm(x, ONES[:], ONES[:]),
        lambda x: cross_entropy(x, x[:, 0].abs().long().clamp(max=1), reduction="none"),
        lambda x: x.to(torch.int32) >> 1,
        lambda x: pad(x, (-2, 3, 0, 0), mode="circular"),
        lambda x: pad(x, (-2, 3, 0, 0), mode="reflect"),
        lambda x: interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        lambda x: interpolate(x, (4, 5), mode="bicubic", antialias=True),
    ],
    ids="pool sum running of_batch running_input of_input entropy shift wrapped reflected factor "
    "size".split(),
)
def test_what_it_writes_rightly_is_compiled(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 10)
    graph = lower(load_pytorch(Of(function).eval(), (x,), simplify=False))
    (got,) = graph.evaluate({"x": x.numpy()}).values()
    np.testing.assert_allclose(got, function(x).numpy(), rtol=0, atol=1e-5)


def test_a_tensor_that_is_clamped_twice() -> None:
    """The exporter's optimizer loses its bounds. It happens where a detector refines its boxes."""

    def refined(x: Tensor) -> Tensor:
        start, boxes = x.sigmoid().detach(), []
        for _ in range(2):
            inside = start.clamp(min=0, max=1)
            odds = inside.clamp(min=1e-5) / (1 - inside).clamp(min=1e-5)
            boxes.append((x + odds.log()).sigmoid())
            x = x + start.unsqueeze(1).squeeze(1)
        return torch.stack(boxes)

    x = torch.randn(3, 4)
    graph = lower(load_pytorch(Of(refined).eval(), (x,), simplify=False))
    (got,) = graph.evaluate({"x": x.numpy()}).values()
    np.testing.assert_allclose(got, refined(x).numpy(), rtol=0, atol=1e-5)
