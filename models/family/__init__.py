"""Small members of the vision transformer family, for ``make check-models``.

Each has the structure, widths and resolution of a published model, but few layers, and weights
drawn from a seed. A compiler treats it like the real model, within seconds. ``huggingface``,
``encoders`` and ``dense`` build the members that ``transformers`` has; the other files are plain
torch, written from the papers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gtco.support.errors import OptionError

from ..export import EXPORTERS
from ..weights import initialise
from . import dense, encoders, huggingface, hybrid, vision, windows

__all__ = ["FAMILY", "Member", "find"]

Shape = tuple[int, ...]

TRANSFORMERS = huggingface.MODELS | encoders.MODELS | dense.MODELS
# These select queries by the rank of their scores. On inputs of zeros or ones all scores are equal
# up to rounding, and each engine has an order of its own.
RANKED = ("rt-detr", "rt-detr-v2", "d-fine", "rf-detr", "lw-detr")
# What an exporter of torch itself cannot do, and why.
NOT_EXPORTED: Mapping[tuple[str, str], str] = {
    ("dinov2-registers", "torchscript"): "aten::_upsample_bicubic2d_aa is not supported",
    ("dinov3", "torchscript"): "it miscounts no register tokens; ONNX Runtime refuses it",
    ("siglip2", "torchscript"): "aten::_upsample_bilinear2d_aa is not supported",
    ("rf-detr", "torchscript"): "aten::_upsample_bicubic2d_aa is not supported",
    ("llama4-vision", "torchscript"): "rotary embeddings of complex numbers",
    ("efficientloftr", "torchscript"): "it miscounts expand(-1); ONNX Runtime refuses it",
    ("mobilevitv2", "torchscript"): "col2im: an object is None",
    ("upernet-swin", "torchscript"): "adaptive pooling to a size that divides nothing",
}


@dataclass(frozen=True)
class Member:
    """One model of the family: how it is built, its inputs' shapes, and the checks that suit it.

    - ``exporters``: torch's exporters that can export it
    - ``ranked``: its outputs are sorted by values that tie on constant inputs
    - ``masks``: so many of the last inputs are integers, 1 for valid places and 0 for padding
    """

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    exporters: tuple[str, ...] = EXPORTERS
    ranked: bool = False
    masks: int = 0

    def create(self, seed: int = 0) -> nn.Module:
        """The module in eval mode with weights from ``seed``. The global random state is unchanged.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        initialise(model, seed)
        return model.eval().requires_grad_(False)

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Normal random tensors of the inputs' shapes, and masks whose last quarter is padding."""
        generator = torch.Generator().manual_seed(seed)
        plain = len(self.shapes) - self.masks
        tensors = [torch.randn(shape, generator=generator) for shape in self.shapes[:plain]]
        for *lead, count in self.shapes[plain:]:
            tensors.append((torch.arange(count) < count * 3 // 4).long().expand(*lead, -1))
        return tuple(tensors)


def _member(
    name: str, build: Callable[[], nn.Module], shapes: tuple[Shape, ...], masks: int = 0
) -> Member:
    exporters = tuple(e for e in EXPORTERS if (name, e) not in NOT_EXPORTED)
    return Member(name, build, shapes, exporters, name in RANKED, masks)


FAMILY: dict[str, Member] = {
    **{n: _member(n, m, m.shapes, m.masks) for n, m in TRANSFORMERS.items()},
    **{
        name: _member(name, build, ((1, 3, size, size),))
        for name, (build, size) in (vision.MODELS | windows.MODELS | hybrid.MODELS).items()
    },
}


def find(name: str) -> Member:
    """The member called ``name``; :class:`OptionError` with the nearest name otherwise."""
    if name not in FAMILY:
        close = difflib.get_close_matches(name, FAMILY, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise OptionError(f"unknown model {name!r}.{hint} Known: {', '.join(FAMILY)}")
    return FAMILY[name]
