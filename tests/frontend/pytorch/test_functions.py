"""Functions of torch that vision models call, as the exporter and gtco's translations read them.
All of a family are the outputs of one module, so they cost one export.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.lower.walk import lower

# of a tensor of floats and one of integers, both [2, 6, 4, 4]
Function = Callable[[Tensor, Tensor], Any]

WEIGHT = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
GRID = torch.rand(2, 3, 5, 2, generator=torch.Generator().manual_seed(3)) * 2.4 - 1.2
PLACES = torch.tensor([3, 0, 2])

FAMILIES: dict[str, dict[str, Function]] = {
    "one axis": {
        "softmax": lambda x, i: x.softmax(-1),
        "log_softmax": lambda x, i: F.log_softmax(x, 1),
        "softmin": lambda x, i: F.softmin(x, 2),
        "mean": lambda x, i: x.mean(1),
        "mean of all": lambda x, i: x.mean(),
        "mean of axes": lambda x, i: x.mean((2, 3), keepdim=True),
        "sum of integers": lambda x, i: i.sum(1),
        "std": lambda x, i: x.std((1, 3)),
        "var": lambda x, i: x.var(1, correction=0),
        "var_mean": lambda x, i: torch.var_mean(x, 1),
        "amax": lambda x, i: x.amax((1, 2)),
        "max": lambda x, i: x.max(1),
        "argmin": lambda x, i: x.argmin(-1),
        "logsumexp": lambda x, i: torch.logsumexp(x * 100, (0, 1)),
        "prod": lambda x, i: x.prod(1),
        "norm": lambda x, i: torch.linalg.vector_norm(x, 2, (1, 3)),
        "normalize": lambda x, i: F.normalize(x, dim=1),
        "cosine": lambda x, i: F.cosine_similarity(x, x.flip(0)),
        "cumsum": lambda x, i: x.cumsum(2),
        "any": lambda x, i: (i > 2).any(1),
        "all": lambda x, i: (i > -9).all(),
        "topk": lambda x, i: x.topk(3, 1),
        "sort": lambda x, i: x.sort(1, descending=True),
        "diff": lambda x, i: x.diff(dim=1),
    },
    "one element": {
        **{
            name: (lambda x, i, name=name: getattr(F, name)(x * 3))  # type: ignore[misc]
            for name in "relu6 elu celu selu silu mish hardswish hardsigmoid softplus softsign "
            "logsigmoid leaky_relu hardtanh gelu softshrink tanhshrink relu".split()
        },
        **{
            name: (lambda x, i, name=name: getattr(torch, name)(x.abs() + 0.1))  # type: ignore[misc]
            for name in "sqrt rsqrt reciprocal log log2 log1p exp exp2 expm1 sin cos tan atan sinh "
            "tanh sigmoid erf ceil floor round trunc frac sign abs neg square".split()
        },
        "gelu by tanh": lambda x, i: F.gelu(x, approximate="tanh"),
        "glu": lambda x, i: F.glu(x, 1),
        "prelu": lambda x, i: F.prelu(x, WEIGHT[:, 0, 0, 0]),
        "clamp": lambda x, i: x.clamp(-0.3, 0.4),
        "clamp from below": lambda x, i: i.clamp(-1),
        "nan_to_num": lambda x, i: torch.nan_to_num(x / (i > 0).float()),
        "pow": lambda x, i: x**3,
        "power of two": lambda x, i: 2**x,
        "remainder": lambda x, i: torch.remainder(i, 4),
        "floor divided": lambda x, i: i // 4,
        "divided": lambda x, i: i / 4,
        "truncated": lambda x, i: torch.div(i, -4, rounding_mode="trunc"),
        "where": lambda x, i: torch.where(i > 0, x, 2.0),
        "masked_fill": lambda x, i: x.masked_fill(i > 0, -1e4),
        "lerp": lambda x, i: torch.lerp(x, x.flip(0), 0.3),
        "addcmul": lambda x, i: torch.addcmul(x, x, x, value=0.5),
        "atan2": lambda x, i: torch.atan2(x, i.float()),
        "long": lambda x, i: (x * 9).long(),
        "bytes": lambda x, i: (x.abs() * 99).to(torch.uint8),
        "bool": lambda x, i: i.bool(),
        "and": lambda x, i: (i > 0) & (x > 0),
        "not": lambda x, i: ~(i > 0),
        "times a mask": lambda x, i: x * (i > 0),
    },
    "guards": {
        "log": lambda x, i: torch.log(x.relu() + 1e-8),
        "divided": lambda x, i: x.relu() / (x.relu() + 1e-8),
        "reciprocal": lambda x, i: 1 / (x.relu().double() + 1e-12).float(),
        "less": lambda x, i: 1 / (x.relu() - 1e-9),
        "power": lambda x, i: (x.relu() + 1e-10) ** -0.5,
        "factor": lambda x, i: x * 1.000004 - x,
        "clamps that are apart": lambda x, i: x.clamp(1, 2).clamp(5, 6),
        "nothing is left": lambda x, i: F.relu(x.clamp(-3, -1)),
    },
    "places": {
        "pad": lambda x, i: F.pad(x, (1, 2, 0, 1)),
        "pad that cuts": lambda x, i: F.pad(x, (-2, 3, 1, -1), mode="replicate"),
        "pad that cuts all": lambda x, i: F.pad(x, (-4, 5, 0, 0), mode="replicate"),
        "pad around what is cut": lambda x, i: F.pad(x, (-1, 2, 0, 0), mode="circular"),
        "pad by reflection": lambda x, i: F.pad(x, (1, 2, 3, 1), mode="reflect"),
        "pad around": lambda x, i: F.pad(x, (1, 2, 3, 1), mode="circular"),
        "roll": lambda x, i: x.roll((1, -2), (2, 3)),
        "flip": lambda x, i: x.flip((1, 3)),
        "rot90": lambda x, i: torch.rot90(x, 1, (2, 3)),
        "permute": lambda x, i: x.permute(0, 2, 3, 1),
        "flatten": lambda x, i: x.flatten(2).transpose(1, 2),
        "unflatten": lambda x, i: x.unflatten(1, (2, -1)),
        "chunk": lambda x, i: x.chunk(3, 1),
        "split": lambda x, i: x.split([1, 2, 3], 1),
        "unbind": lambda x, i: x.unbind(1)[2],
        "stack": lambda x, i: torch.stack((x, x * 2), 2),
        "cat of types": lambda x, i: torch.cat((x, i), 1),
        "expand": lambda x, i: x[:1].expand(3, -1, -1, -1),
        "repeat": lambda x, i: x.repeat(1, 2, 1, 3),
        "repeat_interleave": lambda x, i: x.repeat_interleave(2, 1),
        "index_select": lambda x, i: x.index_select(1, PLACES),
        "gather": lambda x, i: x.gather(1, i.abs().clamp(max=5)),
        "indices": lambda x, i: x[:, PLACES, :, PLACES],
        "negative indices": lambda x, i: x[..., PLACES - 4],
        "scatter": lambda x, i: x.scatter(1, i.abs().clamp(max=5)[:, :1], 9.0),
        "scatter_add": lambda x, i: x.scatter_add(1, i.abs().clamp(max=5), x),
        "assigned": lambda x, i: torch.slice_scatter(x, x[:, :2], 1, 1, 5, 2),
        "one_hot": lambda x, i: F.one_hot(i.abs(), 10),
        "embedding": lambda x, i: F.embedding(i.abs().clamp(max=8), TABLE),
        "bucketize": lambda x, i: torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5])),
        "tril": lambda x, i: x.tril(-1),
        "diagonal": lambda x, i: x.diagonal(dim1=2, dim2=3),
        "meshgrid": lambda x, i: torch.meshgrid(x[0, :, 0, 0], x[0, 0, :, 0], indexing="ij"),
        "arange": lambda x, i: torch.arange(4) + i,
        "unfold": lambda x, i: F.unfold(x, 3, padding=1, stride=2),
        "windows": lambda x, i: x.unfold(2, 2, 2).unfold(3, 2, 2),
        "pixel_shuffle": lambda x, i: F.pixel_shuffle(x[:, :4], 2),
        "pixel_unshuffle": lambda x, i: F.pixel_unshuffle(x, 2),
    },
    "windows": {
        "conv": lambda x, i: F.conv2d(x, WEIGHT, padding="same", groups=2),
        "of rows": lambda x, i: F.conv1d(x[..., 0], WEIGHT[:, :, 0], padding=1, groups=2),
        "of volumes": lambda x, i: F.conv3d(x[:, None], WEIGHT[:, None, 0, :, :, None]),
        "padded": lambda x, i: F.conv3d(x[:, None], WEIGHT[:, :1, None], padding="same"),
        "with options": lambda x, i: F.conv3d(
            x[:, None], WEIGHT[:, :1, None], stride=(1, 2, 1), padding=1, dilation=(2, 1, 1)
        ),
        "transposed": lambda x, i: F.conv_transpose2d(x, WEIGHT, stride=2, output_padding=1),
        "max_pool": lambda x, i: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        "avg_pool": lambda x, i: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "adaptive": lambda x, i: F.adaptive_avg_pool2d(x, (3, 2)),
        "adaptive_max": lambda x, i: F.adaptive_max_pool2d(x, 1),
        "nearest": lambda x, i: F.interpolate(x, scale_factor=2.0),
        "bilinear": lambda x, i: F.interpolate(x, (7, 5), mode="bilinear"),
        "bicubic": lambda x, i: F.interpolate(x, (7, 5), mode="bicubic", align_corners=True),
        "grid_sample": lambda x, i: F.grid_sample(x, GRID, align_corners=False),
        "affine_grid": lambda x, i: F.affine_grid(x[:, 0, :2, :3], (2, 1, 3, 4), False),
    },
    "products and norms": {
        "matmul": lambda x, i: x @ x.mT,
        "of integers": lambda x, i: i @ i.mT,
        "einsum": lambda x, i: torch.einsum("bchw,bcij->bhwij", x, x),
        "baddbmm": lambda x, i: torch.baddbmm(x[0], x[1], x[0], beta=0.5, alpha=2),
        "linear": lambda x, i: F.linear(x, TABLE[:, :4]),
        "outer": lambda x, i: torch.outer(x[0, 0, 0], x[0, 1, 0]),
        "layer_norm": lambda x, i: F.layer_norm(x, (4, 4)),
        "group_norm": lambda x, i: F.group_norm(x, 3),
        "instance_norm": lambda x, i: F.instance_norm(x),
        "rms_norm": lambda x, i: F.rms_norm(x, (4,)),
        "attention": lambda x, i: F.scaled_dot_product_attention(x, x, x),
        "masked": lambda x, i: F.scaled_dot_product_attention(x, x, x, attn_mask=i > -9),
        "causal": lambda x, i: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "fft": lambda x, i: torch.fft.rfft2(x).abs(),
    },
}


class Family(nn.Module):
    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        made = (function(x, i) for function in self.functions.values())
        return tuple(t for one in made for t in ([one] if isinstance(one, Tensor) else one))


@pytest.mark.parametrize("family", FAMILIES)
def test_functions(family: str) -> None:
    """Within 3e-6 of the largest value of each result; all but floats are equal."""
    functions = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 4, 4, generator=generator)
    i = torch.randint(-9, 10, (2, 6, 4, 4), generator=generator)
    graph = lower(load_pytorch(Family(functions), (x, i), simplify=False))
    got = list(graph.evaluate({"x": x.numpy(), "i": i.numpy()}).values())
    for name, function in functions.items():
        wanted = function(x, i)
        for theirs in [wanted] if isinstance(wanted, Tensor) else wanted:
            ours, theirs = got.pop(0), theirs.numpy()
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            atol = 3e-6 * np.abs(theirs).max() if theirs.dtype == np.float32 else 0
            if family == "guards":
                np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=3e-7, err_msg=name)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=name)
    assert not got
