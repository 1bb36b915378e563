"""A text detector and a text recognizer: small, and used with images of any size.

:class:`TextRecognizer` has the shape of PP-OCRv3's (Li et al. 2022): depthwise convolutions that
take the height of a line of text to 1, two transformer layers along its width (SVTR, Du et al.
2022), and CTC's classes for each place. :class:`TextDetector` is DB with a ResNet-18 (Liao et al.
2020): a pyramid of features, and the probability that a pixel belongs to a text's core.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block

# Output channels, side of the filter, stride, squeeze and excitation: MobileNetV1Enhance, halved.
_SEPARABLE: tuple[tuple[int, int, int | tuple[int, int], bool], ...] = (
    (32, 3, 1, False),
    (64, 3, 1, False),
    (64, 3, 1, False),
    (128, 3, (2, 1), False),
    (128, 3, 1, False),
    (256, 3, (2, 1), False),
    *((256, 5, 1, False),) * 5,
    (512, 5, (2, 1), True),
    (512, 5, (1, 2), True),
)


def _convolution(
    inputs: int, outputs: int, side: int, stride: int | tuple[int, int] = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution that keeps the size, but for its stride, and its norm."""
    convolution = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class SqueezeExcite(nn.Module):
    """Scales each channel by a function of all channels' means: [B, C, H, W] -> same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))
        return x * F.hardsigmoid(self.expand(y))


class TextRecognizer(nn.Module):
    """Line of text [B, 3, 48, W] -> probabilities [B, W / 8, classes] of characters and a blank.

    ``image_size``: (48, W); the module takes any multiple of 8 for W.
    """

    output_names = ("characters",)
    settles_on = (48, 64)

    def __init__(
        self, image_size: tuple[int, int] = (48, 320), width: int = 120, classes: int = 97
    ) -> None:
        super().__init__()
        layers = [*_convolution(3, 16, 3, 2), nn.Hardswish()]
        channels = 16
        for outputs, side, stride, squeezed in _SEPARABLE:
            layers += [*_convolution(channels, channels, side, stride, channels), nn.Hardswish()]
            layers += [SqueezeExcite(channels)] if squeezed else []
            layers += [*_convolution(channels, outputs, 1), nn.Hardswish()]
            channels = outputs
        self.backbone = nn.Sequential(*layers, nn.AvgPool2d(2))
        self.reduce = nn.Sequential(
            *_convolution(channels, channels // 8, 3),
            nn.SiLU(),
            *_convolution(channels // 8, width, 1),
            nn.SiLU(),
        )
        self.blocks = nn.Sequential(*(Block(width, 8, 2 * width) for _ in range(2)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Sequential(*_convolution(width, channels, 1), nn.SiLU())
        self.fuse = nn.Sequential(*_convolution(2 * channels, channels // 8, 3), nn.SiLU())
        self.project = nn.Sequential(*_convolution(channels // 8, width, 1), nn.SiLU())
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        features = self.backbone(image)  # [B, C, 1, W / 8]
        tokens = self.reduce(features).flatten(2).transpose(1, 2)
        tokens = self.norm(self.blocks(tokens))
        mixed = self.expand(tokens.transpose(1, 2).unsqueeze(2))
        mixed = self.project(self.fuse(torch.cat((features, mixed), dim=1)))
        return torch.softmax(self.head(mixed.flatten(2).transpose(1, 2)), dim=-1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: [B, C, H, W] -> [B, outputs, H / stride, W / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, outputs, 3, stride), nn.ReLU(), *_convolution(outputs, outputs, 3)
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class TextDetector(nn.Module):
    """Image [B, 3, H, W] -> probability [B, 1, H, W] that a pixel is of a text's core.

    ``image_size``: (H, W), multiples of 32; the module takes any others.
    """

    output_names = ("probability",)
    settles_on = (64, 64)

    def __init__(self, image_size: tuple[int, int] = (640, 640), width: int = 256) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        sides = (64, 128, 256, 512)
        self.stages = nn.ModuleList(
            nn.Sequential(
                BasicBlock(sides[max(at - 1, 0)], outputs, 2 if at else 1),
                BasicBlock(outputs, outputs, 1),
            )
            for at, outputs in enumerate(sides)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(side, width, 1, bias=False) for side in sides)
        part = width // 4
        self.smooth = nn.ModuleList(nn.Conv2d(width, part, 3, padding=1, bias=False) for _ in sides)
        self.head = nn.Sequential(
            *_convolution(width, part, 3),
            nn.ReLU(),
            nn.ConvTranspose2d(part, part, 2, 2),
            nn.BatchNorm2d(part),
            nn.ReLU(),
            nn.ConvTranspose2d(part, 1, 2, 2),
        )

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.stem(image)]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        merged = [lateral(x) for lateral, x in zip(self.lateral, levels[1:], strict=True)]
        for at in (2, 1, 0):  # from the coarsest down
            merged[at] = merged[at] + F.interpolate(merged[at + 1], scale_factor=2.0)
        smoothed = [smooth(x) for smooth, x in zip(self.smooth, merged, strict=True)]
        spread = [F.interpolate(x, scale_factor=2.0**at) for at, x in enumerate(smoothed)]
        return torch.sigmoid(self.head(torch.cat(spread[::-1], dim=1)))
