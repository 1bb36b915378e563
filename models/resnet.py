"""ResNet-50 as DETR's backbone uses it: four stages, frozen batch norm, no classifier.

Source: He et al. 2016, with the stride in the 3x3 convolution as in torchvision's ``resnet50``,
whose parameter names these are. Frozen batch norm keeps its four vectors as buffers, so they do not
count as parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with fixed statistics and affine terms, all buffers: [B, C, H, W] -> same."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=1e-5
        )


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided), 1x1 convolutions and a shortcut: [B, C, H, W] -> [B, 4 * width, h, w]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = FrozenBatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = FrozenBatchNorm2d(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False),
                FrozenBatchNorm2d(4 * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Image [B, 3, H, W] -> the last feature map [B, channels, H / 32, W / 32], rounded up."""

    def __init__(self, depths: tuple[int, int, int, int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = FrozenBatchNorm2d(width)
        channels = width
        for stage, depth in enumerate(depths):
            stage_width = width * 2**stage
            blocks = []
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, stage_width, stride))
                channels = 4 * stage_width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.channels = channels

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(image)))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x
