"""Kernels of every family as models of one or two stages with float16 inputs and outputs. ``bench
gpu`` compares them with torch's own kernels (``bench/gpu/kernel_times.py``): products with cuBLAS,
convolutions with cuDNN, attention with scaled_dot_product_attention. Sizes are those of ViT-B,
Swin-T, DETR and DINOv2-S at batch 32 (products of ViT-B at batch 1 too), and odd ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gtco.models.family import Member

Shape = tuple[int, ...]


class _Function(nn.Module):
    """A function of its inputs and of weights drawn for it."""

    def __init__(self, function: Callable[..., Tensor], *weights: Shape) -> None:
        super().__init__()
        self.function = function
        drawn = (torch.randn(shape) * shape[-1] ** -0.5 for shape in weights)
        self.weights = nn.ParameterList(map(nn.Parameter, drawn))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def _case(
    name: str, function: Callable[..., Tensor], *shapes: Shape, weights: tuple[Shape, ...] = ()
) -> Member:
    return Member(name, lambda: _Function(function, *weights), shapes)


def _product(rows: int, depth: int, columns: int) -> Member:
    name = f"product-{rows}x{depth}x{columns}"
    return _case(name, F.linear, (1, rows, depth), weights=((columns, depth),))


def _attention(name: str, batch: int, heads: int, tokens: int, keys: int, width: int) -> Member:
    q, kv = ((batch, heads, n, width) for n in (tokens, keys))
    return _case(f"attention-{name}", F.scaled_dot_product_attention, q, kv, kv)


def _fused(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias)) + residual


def _normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _image(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(F.conv2d(x, weight, padding=1), 8)


def _sampled(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid.tanh(), align_corners=False)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


_WINDOWS = (2048, 3, 49, 32)  # Swin-T's first stage
_CASES = (
    *(_product(rows, 768, 2304) for rows in (197, 6304)),
    *(_product(rows, 768, 768) for rows in (197, 6304)),
    *(_product(rows, 768, 3072) for rows in (197, 6304)),
    *(_product(rows, 3072, 768) for rows in (197, 6304)),
    _product(1050, 250, 91),  # no row of it is whole pieces of 16 bytes
    _case("product-fused", _fused, (32, 197, 768), (32, 197, 3072), weights=((3072, 768), (3072,))),
    _case("products-batched", torch.matmul, (384, 197, 64), (384, 64, 197)),
    _attention("vit-b", 32, 12, 197, 197, 64),
    _attention("vit-b-one", 1, 12, 197, 197, 64),
    _attention("dinov2-s", 32, 6, 1370, 1370, 64),
    _attention("detr", 4, 8, 100, 1050, 32),
    _case("attention-windows", _biased, *[_WINDOWS] * 3, weights=((1, 3, 49, 49),)),
    _case(
        "convolution-3x3",
        lambda x, w: F.conv2d(x, w, padding=1),
        (32, 64, 56, 56),
        weights=((64, 64, 3, 3),),
    ),
    _case(
        "convolution-7x7",
        lambda x, w: F.conv2d(x, w, stride=2, padding=3),
        (8, 3, 224, 224),
        weights=((64, 3, 7, 7),),
    ),
    _case(
        "convolution-patches",
        lambda x, w: F.conv2d(x, w, stride=16),
        (32, 3, 224, 224),
        weights=((768, 3, 16, 16),),
    ),
    _case(
        "depthwise-3x3",
        lambda x, w: F.conv2d(x, w, padding=1, groups=256),
        (32, 256, 56, 56),
        weights=((256, 1, 3, 3),),
    ),
    _case("layer-norm", _normalised, (32, 197, 768), weights=((768,), (768,))),
    _case("softmax-rows", lambda x: x.softmax(-1), (32, 12, 197, 197)),
    _case("softmax-columns", lambda x: x.softmax(1), (32, 197, 768)),
    _case("mean-of-tokens", lambda x: x.mean(1), (32, 197, 768)),
    _case("greatest", lambda x: x.argmax(-1), (2, 8, 1000)),
    _case("group-norm", lambda x: F.group_norm(x, 8), (8, 64, 112, 112)),
    _case("norm-of-image", _image, (1, 64, 112, 112), weights=((64, 64, 3, 3),)),
    _case("gelu", lambda x, y: F.gelu(x) + y, (32, 197, 3072), (32, 197, 3072)),
    _case("transposed", lambda x: x.permute(0, 2, 3, 1).contiguous(), (32, 96, 55, 57)),
    _case("joined", lambda x, y: torch.cat((x, y), 1), (32, 1, 768), (32, 196, 768)),
    _case("pool-greatest", lambda x: F.max_pool2d(x, 3, 2, 1), (32, 64, 112, 112)),
    _case("pool-mean", lambda x: F.avg_pool2d(x, 2), (32, 64, 112, 112)),
    _case(
        "resize-linear",
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        (8, 256, 56, 56),
    ),
    _case("resize-nearest", lambda x: F.interpolate(x, scale_factor=2.0), (8, 256, 56, 56)),
    _case("grid-sample", _sampled, (8, 64, 56, 56), (8, 28, 28, 2)),
    _case("counted", lambda x: (x > 0).long().sum(1), (8, 1000)),
    _case("places", lambda x: (x > 0).long().cumsum(1), (8, 1000)),
    _case("sorted", lambda x: x.topk(100).values, (8, 900)),
)
KERNELS: dict[str, Member] = {case.name: case for case in _CASES}
# Whose inputs and weights are float32: the sums of an image are split in that alone.
SINGLE = frozenset({"norm-of-image"})


def dtype_of(name: str) -> torch.dtype:
    """The dtype of the kernel's inputs and weights."""
    return torch.float32 if name in SINGLE else torch.float16
