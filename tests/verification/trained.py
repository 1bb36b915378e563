"""Small models, fully trained in seconds on data that is made here. Trained weights saturate
softmax and logistic, which random weights never do.

The data: ten shapes of strokes on 12x12 pixels, shifted and noisy; and lines of bytes from four
alphabets, padded with 256.
"""

from __future__ import annotations

import io
import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, CLASSES, BYTES, LINE, PADDING = 12, 10, 257, 40, 256
ALPHABETS = ((32, 64), (97, 123), (128, 192), (0, 32))


def images(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """[count, 1, 12, 12] pixels, their classes, and the places of the strokes."""
    shapes = np.random.default_rng(7)
    strokes = np.zeros((CLASSES, 8, 8), bool)
    for shape in strokes:
        for _ in range(2):
            shape[shapes.integers(8)] = True
            shape[:, shapes.integers(8)] = True
    kinds = rng.integers(CLASSES, size=count)
    found = np.zeros((count, SIDE, SIDE), np.float32)
    for image, kind, (top, left) in zip(found, kinds, rng.integers(0, 5, (count, 2)), strict=True):
        image[top : top + 8, left : left + 8] = strokes[kind]
    noisy = found + 0.1 * rng.standard_normal(found.shape).astype(np.float32)
    return tuple(map(torch.from_numpy, (noisy[:, None], kinds, found[:, None])))  # type: ignore[return-value]


def lines(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """[count, 40] int64 bytes and their alphabets; the ends are padding."""
    kinds = rng.integers(len(ALPHABETS), size=count)
    low, high = np.array(ALPHABETS)[kinds].T
    text = rng.integers(low[:, None], high[:, None], (count, LINE))
    text[np.arange(LINE) >= rng.integers(5, LINE + 1, count)[:, None]] = PADDING
    return torch.from_numpy(text), torch.from_numpy(kinds)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5
        if keep is not None:
            scores = scores + (1 - keep.to(x.dtype))[:, None, None, :] * -1e9
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        wide = 2 * width
        self.first, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.second = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.first(x), keep)
        return x + self.mlp(self.second(x))


class Vit(nn.Module):
    """Patches of 4x4, two blocks, and the probabilities of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 4, 4)
        self.places = nn.Parameter(0.1 * torch.randn(1, 9, 32))
        self.blocks = nn.ModuleList([Block(32, 4), Block(32, 4)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(-1)


class Map(nn.Module):
    """The places of strokes: one convolution down, one up, and a logistic."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(24, 16, 2, 2), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1),
        )  # fmt: skip

    def logits(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).sigmoid()


class Text(nn.Module):
    """Each byte is compared with all possible bytes; attention and mean leave out the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(BYTES, 32))
        self.register_buffer("all", torch.arange(BYTES))
        self.block, self.head = Block(32, 2), nn.Linear(32, len(ALPHABETS))

    def logits(self, text: Tensor) -> Tensor:
        keep = text != PADDING
        x = (text[..., None] == self.all).to(self.table.dtype) @ self.table
        x = self.block(x, keep) * keep[..., None].to(x.dtype)
        return self.head(x.sum(1) / keep.sum(1, keepdim=True).clamp(min=1))

    def forward(self, text: Tensor) -> Tensor:
        return self.logits(text).softmax(-1)


def _train(module: Any, steps: int, loss: Any) -> None:
    optimizer = torch.optim.Adam(module.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    rng, threads = np.random.default_rng(0), torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are so small that threads would only wait for each other
    for _ in range(steps):
        optimizer.zero_grad()
        loss(rng).backward()
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)


@cache
def trained(name: str) -> nn.Module:
    """``vit``, ``map`` or ``text``; the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name == "vit":
            vit = Vit()

            def classes(rng: np.random.Generator) -> Tensor:
                x, kinds, _ = images(64, rng)
                return F.cross_entropy(vit.logits(x), kinds)

            _train(vit, 250, classes)
            return vit.eval().requires_grad_(False)
        if name == "map":
            found = Map()

            def strokes(rng: np.random.Generator) -> Tensor:
                x, _, there = images(16, rng)
                return F.binary_cross_entropy_with_logits(found.logits(x), there)

            _train(found, 250, strokes)
            return found.eval().requires_grad_(False)
        text = Text()

        def alphabets(rng: np.random.Generator) -> Tensor:
            x, kinds = lines(64, rng)
            return F.cross_entropy(text.logits(x), kinds)

        _train(text, 150, alphabets)
        return text.eval().requires_grad_(False)


def example(name: str) -> Tensor:
    rng = np.random.default_rng(99)
    return lines(3, rng)[0] if name == "text" else images(3, rng)[0]


@cache
def exported(name: str) -> onnx.ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            trained(name), (example(name),), file, dynamo=False, opset_version=17,
            input_names=["x"], output_names=["y"],
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())
