"""Contractions with int8 and int4 weights and float32 inputs, against float64 of the same operands.
The weights are widened by the micro-kernel or in scratch.
"""

from __future__ import annotations

import pytest

from gtco.machine.target import TARGETS
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.stage import Stage, TensorType
from tests.sketch.formats.test_bfloat16 import chain, machines
from tests.sketch.formats.widened import check, conv, stages

T = TensorType
KINDS = {"int8": "byte", "int4": "nibble"}


def dense(dtype: str, m: int, n: int, k: int, batch: tuple[int, ...] = ()) -> Stage:
    """With the scale of each column and a bias behind the product."""
    made, w = T((*batch, m, n)), T((*batch, k, n), dtype)
    return chain(
        {"x": T((*batch, m, k)), "w": w, "scale": T((n,)), "bias": T((n,))},
        ("matmul", "x w", "c", made, {}),
        ("multiply", "c scale", "d", made, {}),
        ("add", "d bias", "y", made, {}),
    )


def blocks(
    dtype: str, m: int, n: int, k: int, block: int, scales: str = "float32", zeros: bool = False
) -> Stage:
    """With the scales of blocks of k, and with their zero points if there are ``zeros``."""
    made, shape = T((m, n)), (-(-k // block), n)
    types = {"x": T((m, k)), "w": T((k, n), dtype), "wscales": T(shape, scales), "bias": T((n,))}
    inputs = "x w wscales"
    if zeros:
        types["wzeros"], inputs = T(shape, "int8"), f"{inputs} wzeros"
    return chain(
        types,
        ("matmul", inputs, "c", made, {"block": block}),
        ("add", "c bias", "y", made, {}),
    )


def by_column(dtype: str) -> dict[str, Stage]:
    return {
        "dense": dense(dtype, 29, 72, 48),
        "odd": dense(dtype, 13, 37, 33),
        "deep": dense(dtype, 37, 40, 301),  # several blocks of k
        "one_row": dense(dtype, 1, 50, 130),
        "batches": dense(dtype, 5, 19, 21, (3,)),
        **stages(dtype),
    }


def by_block(dtype: str) -> dict[str, Stage]:
    return {
        "whole": blocks(dtype, 29, 72, 64, 16, "float16"),
        "odd": blocks(dtype, 13, 37, 77, 32, zeros=True),
        # several blocks of k, that are not those of the scales
        "deep": blocks(dtype, 37, 40, 1100, 128, "float16", zeros=True),
        "deeper": blocks(dtype, 20, 33, 1100, 256),
        "one_row": blocks(dtype, 1, 50, 130, 64),
        "one_block": blocks(dtype, 3, 20, 37, 37, zeros=True),
    }


FEW = ("dense", "odd", "deep", "batches", "grouped", "transposed")  # their layouts have all cases
STAGES = {f"int8-{name}": stage for name, stage in by_column("int8").items()}
STAGES |= {f"int4-{name}": by_column("int4")[name] for name in FEW}
BLOCKS = {f"{dtype}-{name}": s for dtype in KINDS for name, s in by_block(dtype).items()}
WINDOWS = ("conv3x3", "conv_odd", "stem", "grouped")


def kind(stage: str) -> str:
    return KINDS[stage.partition("-")[0]]


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", STAGES)
def test_products(stage: str, name: str) -> None:
    assert check(gemm.match, STAGES[stage], name, kind(stage)) == {False, True}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", BLOCKS)
def test_scales_of_blocks(stage: str, name: str) -> None:
    """Panels are widened and scaled in scratch."""
    assert check(gemm.match, BLOCKS[stage], name, kind(stage)) == {False}


@pytest.mark.parametrize("name", machines())
@pytest.mark.parametrize("stage", [f"int8-{name}" for name in WINDOWS] + ["int4-whole_words"])
def test_windows_read_in_place(stage: str, name: str) -> None:
    found = STAGES.get(stage, conv("int4", 6, 16, 20, 3))
    assert check(convolution.match, found, name, kind(stage)) == {True}


def test_what_no_kernel_is_for() -> None:
    """Winograd transforms weights of 8 bits alone, and a computed B has no panels."""
    target = TARGETS["x86-64-v3"]
    assert winograd.match(stages("int8")["conv3x3"], target) is not None
    assert winograd.match(stages("int4")["conv3x3"], target) is None
    for dtype in KINDS:
        types = {"x": T((5, 7)), "b": T((7, 9), dtype)}
        computed = chain(types, ("matmul", "x b", "y", T((5, 9)), {}))
        assert gemm.match(computed, target) is None
    # runs of 3 taps by 12 channels end within a word of eight int4
    assert convolution.match(stages("int4")["conv3x3"], target) is None
    # nor has TVM a product with the scales of blocks, or with int4
    scaled = chain(
        {"x": T((3, 32)), "w": T((32, 5), "int8"), "wscales": T((2, 5))},
        ("matmul", "x w wscales", "y", T((3, 5)), {"block": 16}),
    )
    types = {"x": T((3, 32)), "w": T((32, 5), "int4")}
    alone = chain(types, ("matmul", "x w", "y", T((3, 5)), {}))
    for stage in (scaled, alone):
        assert [s.name for s in space_of(stage, target).sketches] == ["gemm"]
