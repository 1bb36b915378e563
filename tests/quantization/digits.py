"""Small models that are trained in seconds on scikit-learn's digits: 1797 images of 8x8, real ones,
which come with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from models.swin import Swin
from models.vit import VisionTransformer

TRAINED = 1297  # images to train with; the others are for tests
# Of the starting weights. With each of 1 to 7 at least 490 of 500 test images are right, int8 loses
# at most one of them and int8 weights none.
SEED = 3


@dataclass(frozen=True)
class Digits:
    images: Tensor  # [N, 3, side, side], about 0 and 1 wide
    labels: Tensor


@cache
def digits(side: int = 8) -> tuple[Digits, Digits]:
    """The images to train with and those to test with, enlarged to ``side``."""
    data = load_digits()
    images = (torch.tensor(data.images, dtype=torch.float32) / 16 - 0.3) / 0.38
    images = images[:, None].repeat(1, 3, 1, 1)
    if side != images.shape[-1]:
        images = nn.functional.interpolate(images, size=(side, side), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(data.target)[order]
    return Digits(images[:TRAINED], labels[:TRAINED]), Digits(images[TRAINED:], labels[TRAINED:])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.conv2(self.depthwise(torch.relu(self.bn1(self.conv1(x))))))


class Cnn(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first = Residual(width)
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.second = Residual(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(torch.relu(self.stem(image)))
        return self.head(self.second(self.down(x)).mean((2, 3)))


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images, of which about a third is moved by one of the digits' 8 rows or columns."""
    side = images.shape[-1]
    step = side // 8
    padded = nn.functional.pad(images, (step,) * 4, value=float(images.min()))
    directions = torch.randint(0, 12, (len(images),), generator=generator)
    made = images.clone()
    for number, (row, column) in enumerate(((0, 1), (2, 1), (1, 0), (1, 2))):
        moved = directions == number
        row, column = row * step, column * step
        made[moved] = padded[moved, :, row : row + side, column : column + side]
    return made


def train(model: nn.Module, epochs: int, rate: float, batch: int, side: int = 8) -> nn.Module:
    """The model after training on images that are partly moved, in evaluation mode. Labels are
    smoothed, which leaves fewer images with two classes that are near.
    """
    given, _ = digits(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05, fused=True)
    steps = epochs * (len(given.images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    drawn = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(given.images), generator=drawn)
        for at in range(0, len(order) - batch + 1, batch):
            part = order[at : at + batch]
            scores = model(shifted(given.images[part], drawn))
            loss = nn.functional.cross_entropy(scores, given.labels[part], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@cache
def vit() -> nn.Module:
    """A ViT of two blocks, trained."""
    torch.manual_seed(SEED)
    model = VisionTransformer(
        (8, 8), patch_size=2, width=64, depth=2, heads=4, mlp_dim=128, classes=10
    )
    nn.init.normal_(model.cls_token, std=0.02)
    nn.init.normal_(model.pos_embed, std=0.5)
    return train(model, 20, 3e-3, 64)


@cache
def swin() -> nn.Module:
    """A Swin of two stages, trained on images of 16x16: 4x4 patches in windows of 2x2, which the
    second block shifts and masks; then a merging, and one window of what is left.
    """
    torch.manual_seed(SEED)
    model = Swin((16, 16), width=32, depths=(2, 1), heads=(2, 4), window=2, classes=10)
    assert [block.mask is not None for block in model.layers[0].blocks] == [False, True]
    return train(model, 12, 4e-3, 64, side=16)


@cache
def cnn() -> nn.Module:
    """A residual network with batch norms and depthwise convolutions, trained."""
    torch.manual_seed(SEED)
    return train(Cnn(), 8, 4e-3, 48)


def right(scores: np.ndarray) -> int:
    """How many of the test images have the right class, by scores [N, 10]."""
    _, held_out = digits()
    return int((scores.argmax(axis=1) == held_out.labels.numpy()).sum())
