"""The workloads whose stages the language model learns from and is judged by (TLM, Section 4.3).

A workload is a model of ``models/``, of its family or of ``bench/models/wide.py``, with a batch, an
image size, a number format and a kind of machine. The models of :data:`HELD_OUT` are never trained
on: a stage that one of them has is left out of training wherever it occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gtco import models
from gtco.models.family import FAMILY
from gtco.models.setr import Setr
from gtco.models.vit import DinoV2, VisionTransformer
from gtco.models.weights import initialise

from ...models.names import FIVE
from ...models.wide import MEMBERS as WIDE

# Layers of these repeat, so two of them have every stage.
REPEATED, LAYERS = (VisionTransformer, DinoV2, Setr), 2
HELD_OUT = (
    *("vit-s-16", "deit-s-16", "dinov2-s-14", "segformer-b0"),
    *("beit-b-16", "beit", "pvtv2", "levit", "convnextv2", "hiera", "mobilevit", "mobilevit-s"),
    *("coat-lite", "maxvit", "xcit", "rt-detr"),
)
SIDES = {  # other image sizes, where the model's constructor takes one
    "vit-ti-16": (384,),
    "vit-base-16": (384, 512),
    "vit-s-16": (384,),
    "dinov2-s-14": (224, 392),
    "swin-t": (448,),
    "segformer-b0": (256, 1024),
    "setr-naive-base": (512,),
}
BATCH = 4
# They have the stages of another model; that is enough in one format and batch.
ALIKE = ("detr-resnet50-e3", "detr-resnet50-e12", "setr-naive-base", "vit-ti-16-batch16")
CPU, GPU = "cpu", "cuda"
TARGETS = {CPU: "znver4", GPU: "cuda:a100"}  # the machine that a workload is cut into stages for


@dataclass(frozen=True)
class Workload:
    """``side`` is 0 where the model has its own image size."""

    model: str
    machine: str = CPU
    precision: str = "fp32"
    batch: int = 1
    side: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}.{self.machine}.{self.precision}.{self.batch}.{self.side}"

    @property
    def held_out(self) -> bool:
        return self.model in HELD_OUT

    def built(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """The module with weights from a seed, and inputs."""
        if self.model in models.MODELS:
            return self._named()
        member = FAMILY.get(self.model) or WIDE[self.model]
        inputs = member.inputs()
        if self.batch > 1:
            inputs = tuple(torch.cat([x] * self.batch) for x in inputs)
        return member.create(), inputs

    def _named(self) -> tuple[nn.Module, tuple[Any, ...]]:
        spec = models.find(self.model)
        size = (self.side, self.side) if self.side else None
        constructor: Any = spec.constructor
        made = getattr(constructor, "func", constructor)
        fewer = {"depth": LAYERS} if made in REPEATED else {}
        module = constructor(image_size=size or spec.input_shape[2:], **fewer)
        initialise(module, 0)
        inputs = models.example_inputs(self.model, self.batch, size)
        return module.eval().requires_grad_(False), inputs


# Members of the family that differ most from each other, and half of what is held out: after them a
# corpus is worth training on.
EARLY = (
    *("swin", "pvtv2", "convnext", "levit", "resnet", "efficientvit", "hiera", "mobilenetv2"),
    *("twins", "coat-lite", "poolformer", "segformer", "xcit", "davit", "siglip", "mobilevit"),
    *("edgenext", "detr", "maxvit", "cvt", "focalnet", "convnextv2", "depth-anything", "beit"),
)


def workloads() -> list[Workload]:
    """All workloads, those first that sampling should not miss if it is stopped early."""
    return list(dict.fromkeys(_ordered()))


def _ordered() -> Iterator[Workload]:
    named = [*models.MODELS, *WIDE, *EARLY, *(name for name in FAMILY if name not in EARLY)]
    named = list(dict.fromkeys(named))
    early = [*FIVE, *EARLY]
    for name in HELD_OUT:  # before anything is trained on, their stages are known
        yield Workload(name)
    for name in named[: len(models.MODELS) + len(WIDE)]:
        yield Workload(name)
    for n, name in enumerate(early):
        yield Workload(name)
        if n % 2 == 0:
            yield Workload(name, GPU, "fp16")
        if n % 4 == 1:
            yield Workload(name, precision="bf16")
    named = [name for name in named if name not in ALIKE]
    for name in named:
        yield Workload(name)
    for name in named:
        yield Workload(name, GPU, "fp16")
    for name, sides in SIDES.items():
        for side in sides:
            yield Workload(name, side=side)
    for name in named:
        if name in models.MODELS or len((FAMILY.get(name) or WIDE[name]).shapes) == 1:
            yield Workload(name, batch=BATCH)
    for name in named:
        yield Workload(name, precision="bf16")
