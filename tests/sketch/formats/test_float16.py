"""Contractions with float16 weights and float32 inputs, against float64 of the same operands. The
weights are widened by the micro-kernel or in scratch.
"""

from __future__ import annotations

import pytest

from gtco.machine.target import TARGETS
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.stage import Stage, TensorType
from tests.sketch.formats.test_bfloat16 import chain, machines
from tests.sketch.formats.widened import check, stages

T = TensorType


def half(*shape: int) -> TensorType:
    return T(shape, "float16")


def dense(m: int, n: int, k: int) -> Stage:
    return chain(
        {"x": T((m, k)), "w": half(k, n), "bias": T((n,))},
        ("matmul", "x w", "c", T((m, n)), {}),
        ("add", "c bias", "y", T((m, n)), {}),
    )


STAGES = {
    "dense": dense(29, 72, 48),
    "odd": dense(13, 37, 33),
    "deep": dense(37, 40, 301),  # several blocks of k
    "one_row": dense(1, 50, 130),
    "both": chain({"x": half(13, 33), "w": half(33, 37)}, ("matmul", "x w", "y", T((13, 37)), {})),
    **stages("float16"),
}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", STAGES)
def test_products(stage: str, name: str) -> None:
    assert check(gemm.match, STAGES[stage], name, "half") == {False, True}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", ["conv3x3", "conv_odd", "stem", "grouped"])
def test_windows_read_in_place(stage: str, name: str) -> None:
    assert check(convolution.match, STAGES[stage], name, "half") == {True}


def test_what_no_kernel_is_for() -> None:
    """Winograd's transform would round the weights again, and a computed B has no panels."""
    assert winograd.match(STAGES["conv3x3"], TARGETS["x86-64-v3"]) is None
    computed = chain({"x": T((5, 7)), "b": half(7, 9)}, ("matmul", "x b", "y", T((5, 9)), {}))
    assert gemm.match(computed, TARGETS["x86-64-v3"]) is None
