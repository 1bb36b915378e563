"""A product that has loops of its own, beside those of the ``gemm`` sketch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gtco.machine.target import Target
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.sketch.gemm.cpu import Gemm
from gtco.tensor.space import Config, Option
from gtco.tensor.stage import Stage


@dataclass(frozen=True)
class OfGemm:
    """``product`` is the same stage as the ``gemm`` sketch sees it."""

    product: Gemm

    @property
    def stage(self) -> Stage:
        return self.product.stage

    @property
    def target(self) -> Target:
        return self.product.target

    def row(self, chosen: Config | Mapping[str, Option]) -> MicroKernel:
        """The micro-kernel that was chosen."""
        return self.product.row(chosen)
