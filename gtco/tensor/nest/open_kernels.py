"""The kernel of each nest whose sizes are arguments."""

from __future__ import annotations

from typing import Any

from gtco.tensor.nest.open import FewColumns, OpenNest
from gtco.tensor.nest.open_columns import columns_kernel
from gtco.tensor.nest.open_filtering import filtering_kernel
from gtco.tensor.nest.open_lines import lines_kernel
from gtco.tensor.nest.open_loops import product_kernel


def open_kernel(nest: OpenNest | FewColumns, symbol: str) -> Any:
    """The kernel ``symbol(a, b, numbers, out, workspace, begin, end)`` of a nest."""
    if isinstance(nest, FewColumns):
        return columns_kernel(nest, symbol)
    made = {"lines": lines_kernel, "filtered": filtering_kernel}.get(nest.feed, product_kernel)
    return made(nest, symbol)
