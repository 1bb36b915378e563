"""A convolution that has loops of its own, beside the product that the ``gemm`` sketch makes of
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gtco.tensor.analysis.contraction import ConvView
from gtco.tensor.sketch.shared.of_gemm import OfGemm


@dataclass(frozen=True)
class ImageProduct(OfGemm):
    """``product`` is a convolution."""

    @cached_property
    def view(self) -> ConvView:
        view = self.product.view
        assert isinstance(view, ConvView)
        return view
