"""Contractions with int8 weights and float32 inputs, against float64 of the same operands. The
weights are widened by the micro-kernel or in scratch.
"""

from __future__ import annotations

import pytest

from gtco.machine.target import TARGETS
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.stage import Stage, TensorType
from tests.sketch.test_bfloat16 import chain, machines
from tests.sketch.widened import check, stages

T = TensorType


def byte(*shape: int) -> TensorType:
    return T(shape, "int8")


def dense(m: int, n: int, k: int, batch: tuple[int, ...] = ()) -> Stage:
    """With the scale of each column and a bias behind the product."""
    made = T((*batch, m, n))
    return chain(
        {"x": T((*batch, m, k)), "w": byte(*batch, k, n), "scale": T((n,)), "bias": T((n,))},
        ("matmul", "x w", "c", made, {}),
        ("multiply", "c scale", "d", made, {}),
        ("add", "d bias", "y", made, {}),
    )


def blocks(m: int, n: int, k: int, block: int) -> Stage:
    """With the scales of blocks of k."""
    made, scales = T((m, n)), T((-(-k // block), n))
    return chain(
        {"x": T((m, k)), "w": byte(k, n), "wscales": scales, "bias": T((n,))},
        ("matmul", "x w wscales", "c", made, {"block": block}),
        ("add", "c bias", "y", made, {}),
    )


STAGES = {
    "dense": dense(29, 72, 48),
    "odd": dense(13, 37, 33),
    "deep": dense(37, 40, 301),  # several blocks of k
    "one_row": dense(1, 50, 130),
    "batches": dense(5, 19, 21, (3,)),
    **stages("int8"),
}


BLOCKS = {
    "whole": blocks(29, 72, 64, 16),
    "odd": blocks(13, 37, 77, 32),
    "deep": blocks(37, 40, 1100, 128),  # several blocks of k, that are not those of the scales
    "one_row": blocks(1, 50, 130, 64),
}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", STAGES)
def test_products(stage: str, name: str) -> None:
    assert check(gemm.match, STAGES[stage], name, "byte") == {False, True}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", BLOCKS)
def test_scales_of_blocks(stage: str, name: str) -> None:
    """Panels are widened and scaled in scratch."""
    assert check(gemm.match, BLOCKS[stage], name, "byte") == {False}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", ["conv3x3", "conv_odd", "stem", "grouped"])
def test_windows_read_in_place(stage: str, name: str) -> None:
    assert check(convolution.match, STAGES[stage], name, "byte") == {True}


def test_what_no_kernel_is_for() -> None:
    """Winograd's transform would round the weights, and a computed B has no panels."""
    assert winograd.match(STAGES["conv3x3"], TARGETS["x86-64-v3"]) is None
    computed = chain({"x": T((5, 7)), "b": byte(7, 9)}, ("matmul", "x b", "y", T((5, 9)), {}))
    assert gemm.match(computed, TARGETS["x86-64-v3"]) is None
    # nor has TVM a product with the scales of blocks
    alone = chain(
        {"x": T((3, 32)), "w": byte(32, 5), "wscales": T((2, 5))},
        ("matmul", "x w wscales", "y", T((3, 5)), {"block": 16}),
    )
    assert [s.name for s in space_of(alone, TARGETS["x86-64-v3"]).sketches] == ["gemm"]
