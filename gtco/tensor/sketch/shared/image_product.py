"""A convolution that has loops of its own, beside the product that the ``gemm`` sketch makes of
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gtco.machine.target import Target
from gtco.tensor.analysis.contraction import ConvView
from gtco.tensor.sketch.gemm.cpu import Gemm
from gtco.tensor.stage import Stage


@dataclass(frozen=True)
class ImageProduct:
    """``product`` is the same stage as the ``gemm`` sketch sees it."""

    product: Gemm

    @property
    def stage(self) -> Stage:
        return self.product.stage

    @property
    def target(self) -> Target:
        return self.product.target

    @property
    def view(self) -> ConvView:
        view = self.product.view
        assert isinstance(view, ConvView)
        return view
