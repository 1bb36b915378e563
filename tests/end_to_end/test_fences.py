"""Whole models with inputs and outputs that end right before an inaccessible page."""

from __future__ import annotations

import numpy as np
import pytest

import gtco
from tests.end_to_end.test_many_threads import MODELS, SHAPES
from tests.fences import ALIGNMENT, fenced
from tests.kernels import shifted


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_read_or_written_behind_a_tensor(name: str) -> None:
    """Kernels see tensors that begin at a multiple of 64 bytes, which may have up to 63 bytes after
    them in their last line. Others are used in place only if their last page has room for as many.
    """
    x = np.random.default_rng().standard_normal(SHAPES[name]).astype(np.float32)
    with gtco.compile_model(MODELS[name], threads=2) as compiled:
        wanted = compiled(x)
        for alignment in (ALIGNMENT, 16, 1):
            out = fenced(np.zeros_like(wanted), alignment)
            compiled(fenced(x, alignment), out=out)
            np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(compiled(shifted(x, 16)), wanted)
