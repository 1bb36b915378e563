"""The models that ``end_to_end --suite wide`` times and ``models`` does not name: other batches and
image sizes of its models, and published models that ``transformers`` builds from their
configurations. All have random weights.

``python -m bench.models.wide NAME FILE.onnx`` exports one of these, or one of ``models``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from torch import nn

from gtco import models
from gtco.models.__main__ import main as models_main
from gtco.models.family import Member
from gtco.models.family.huggingface import LOGITS, HuggingFace

_IMAGENET = {"num_labels": 1000}


def _image(batch: int, side: int) -> tuple[tuple[int, ...], ...]:
    return ((batch, 3, side, side),)


def _vit(name: str, side: int) -> partial[nn.Module]:
    return partial(models.find(name).constructor, image_size=(side, side))


_MEMBERS = (
    Member("vit-ti-16-batch16", _vit("vit-ti-16", 224), _image(16, 224)),
    Member("vit-s-16-512", _vit("vit-s-16", 512), _image(1, 512)),
    Member(
        "beit-b-16",
        HuggingFace(
            "BeitForImageClassification",
            "BeitConfig",
            {**_IMAGENET, "use_relative_position_bias": True},
            LOGITS,
        ),
        _image(1, 224),
    ),
    Member(
        "swinv2-t",
        HuggingFace(
            "Swinv2ForImageClassification",
            "Swinv2Config",
            {**_IMAGENET, "image_size": 256, "window_size": 8},
            LOGITS,
        ),
        _image(1, 256),
    ),
    Member(
        "mobilevit-s",
        HuggingFace(
            "MobileViTForImageClassification",
            "MobileViTConfig",
            {**_IMAGENET, "image_size": 256},
            LOGITS,
        ),
        _image(1, 256),
    ),
)
MEMBERS: dict[str, Member] = {member.name: member for member in _MEMBERS}


def create(name: str) -> nn.Module:
    """The module with a name of this file or of ``models``, in eval mode."""
    return MEMBERS[name].create() if name in MEMBERS else models.create(name)


def main(name: str, file: str) -> int:
    if name not in MEMBERS:
        return models_main(["export", name, "-o", file])
    models.export_onnx(MEMBERS[name].create(), MEMBERS[name].inputs(), Path(file))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
