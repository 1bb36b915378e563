"""Every kind of row multiplies the contents of its layouts, and a target gets the rows that it can
run.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.machine.target import TARGETS, V4
from gtco.search.calibration.rates import RateTable
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.intrinsics.emission import Operand
from gtco.tensor.intrinsics.product import multiply, prepared
from gtco.tensor.intrinsics.table import (
    KINDS,
    WEIGHTS,
    Layout,
    MicroKernel,
    every_micro_kernel,
    kinds,
    micro_kernels,
)
from gtco.tensor.stage import TensorType
from tests.kernels import (
    EMULATED,
    Built,
    assert_close,
    fresh_seed,
    machine_called,
    runnable,
)

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "uint8": np.uint8,
    "int8": np.int8,
}
DEPTH = 7  # odd: pairs end in zeros
TILE_REGISTERS = 8


# 8 lanes, 16 lanes, or this machine with each kind of row that it has or emulates
ROWS = [
    (name, kind)
    for name in ("x86-64-v3", "alderlake", "x86-64-v4", "native")
    for kind, row in KINDS.items()
    if row.admitted(machine_called(name))
] + [(EMULATED, "tiles")]


def laid_out(matrix: np.ndarray, layout: Layout) -> np.ndarray:
    """[k, columns] as [k / step][column][step], with zeros at the end, and two int4 in a byte."""
    padded = np.pad(matrix, [(0, -len(matrix) % layout.step), (0, 0)])
    laid = padded.reshape(-1, layout.step, matrix.shape[1]).transpose(0, 2, 1).copy()
    return laid[..., ::2] & 15 | laid[..., 1::2] << 4 if layout.dtype == "int4" else laid


def product(tile: MicroKernel) -> tuple[TensorType, TensorType, object]:
    kind = tile.kind
    depth = DEPTH + -DEPTH % kind.step
    a = TensorType((tile.rows, depth + 3), kind.a.dtype)  # with a gap between rows
    b = TensorType(
        (depth // kind.b.step, kind.b.places(tile.columns * kind.b.step)),
        "int8" if kind.b.dtype == "int4" else kind.b.dtype,
    )

    def body(em: Emitter, args: KernelArguments) -> None:
        given, taken = (Operand.of(args.inputs[x], [0, 0]) for x in "ab")
        with prepared(em, tile, tile.rows):
            multiply(em, tile, DEPTH, given, taken, args.output)

    out = TensorType((tile.rows, tile.columns), kind.accumulator)
    return a, b, kernel(tile.kernel.replace(":", "_"), {"a": a, "b": b}, out, 0, tile.lanes, body)


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_a_row_multiplies(name: str, kind: str) -> None:
    machine = runnable(name)
    row = KINDS[kind]
    every = [t for t in every_micro_kernel(machine) if t.kind is row]
    tiles = {t.vectors: t for t in reversed(every)} | {0: every[0], -1: every[-1]}
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    made = [product(t) for t in tiles.values()]
    library = load([function for _, _, function in made], machine)
    for tile, (a_type, b_type, _) in zip(tiles.values(), made, strict=True):
        integers = row.accumulator == "int32"
        if integers:
            a = rng.integers(0, 256, (tile.rows, DEPTH)).astype(np.uint8)
            b = rng.integers(-128, 128, (DEPTH, tile.columns)).astype(np.int8)
        elif row.operand in (WEIGHTS, "int4"):
            most = 128 if row.operand == WEIGHTS else 8
            a = rng.standard_normal((tile.rows, DEPTH)).astype(np.float32)
            b = rng.integers(-most, most, (DEPTH, tile.columns)).astype(np.int8)
        else:
            a = rng.standard_normal((tile.rows, DEPTH)).astype(DTYPES[row.operand])
            b = rng.standard_normal((DEPTH, tile.columns)).astype(DTYPES[row.operand])
        held_a = np.full(a_type.shape, 77 if integers else np.nan, DTYPES[row.a.dtype])
        held_a[:, : DEPTH + -DEPTH % row.step] = 0
        held_a[:, :DEPTH] = a
        held_b = np.zeros(b_type.shape, DTYPES[b_type.dtype])
        pairs = laid_out(b, row.b)
        held_b[: len(pairs)] = pairs.reshape(len(pairs), -1)
        out = TensorType((tile.rows, tile.columns), row.accumulator)
        types = (("a", a_type), ("b", b_type))
        built = Built(library, tile.kernel.replace(":", "_"), types, out, 1, 0, {})
        # sums of seven products of about 1, in float32; those of integers are exact
        tolerance = 0 if integers else 1e-6
        assert_close(built(held_a, held_b), a.astype(float) @ b.astype(float), tolerance)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_rows_of_its_instructions(name: str) -> None:
    machine = TARGETS[name]
    for tile in every_micro_kernel(machine):
        assert tile.registers <= (TILE_REGISTERS if tile.kind.in_tiles else machine.registers)
        assert set(tile.kind.features) <= set(machine.features)
        assert MicroKernel.parse(tile.name, machine.lanes) == tile
        assert MicroKernel.parse(tile.kernel, machine.lanes) == tile
    found = [kind.name for kind in kinds(machine, "bfloat16")]
    kinds_of = {"amx-bf16": "tiles", "avx512bf16": "bf16"}
    assert found == [k for f, k in kinds_of.items() if f in machine.features] + ["widened"]
    assert {t.kind.name for t in micro_kernels(machine, "float32")} == {"fma"}


def test_without_the_instruction_its_rows_are_gone() -> None:
    machine = replace(TARGETS["znver4"], features=V4)
    assert {t.kind.name for t in micro_kernels(machine, "bfloat16")} == {"widened"}


def test_the_formula_prefers_pairs_to_widening() -> None:
    """Pairs make twice as many products an instruction if there are enough sums to hide its
    latency. Widening costs something.
    """
    rates = RateTable(TARGETS["znver4"])
    assert rates.rate("bf16:6x4") == pytest.approx(rates.rate("fma:6x4"))
    assert rates.rate("bf16:1x1") < rates.rate("fma:1x1")
    assert rates.rate("widened:6x4") < rates.rate("fma:6x4")
