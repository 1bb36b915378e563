"""Kernels that differ in numbers alone become one that reads them from an array."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from gtco.codegen.generalize import generalized, outline
from gtco.codegen.load import load
from gtco.codegen.outlines import Outline, arguments
from gtco.machine.target import detect
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.stage import TensorType


def sums(rows: int, columns: int, step: int = 1, lanes: int = 1) -> Any:
    """``out[i] = 1 / columns + sum of x[i, :] + lanes * i * step``, over rows as tasks; a loop of
    ``lanes`` iterations is unrolled.
    """

    def body(em: Emitter, args: KernelArguments) -> None:
        (x,) = args.inputs.values()
        with em.loop(args.end - args.begin, "task") as task:
            row = em.let_index(task + args.begin, "row")
            # a float that follows from a size, as a mean's divisor does
            em.store(args.output, [row], tirx.const(1.0 / columns, "float32"))
            with em.loop(columns, "column") as column:
                em.store(
                    args.output, [row], em.load(args.output, [row]) + em.load(x, [row, column])
                )
            for _ in range(lanes):
                value = em.load(args.output, [row]) + tirx.Cast("float32", row * step)
                em.store(args.output, [row], value)

    types = {"x": TensorType((rows, columns))}
    return kernel("sums", types, TensorType((rows,)), 0, 1, body)


def test_outlines_are_equal_without_their_numbers() -> None:
    one, other = outline(sums(3, 5, 7)), outline(sums(4, 9, 2))
    assert one.key == other.key and one.numbers != other.numbers
    assert outline(sums(3, 5, 7)) == one
    assert outline(sums(3, 5, 7, lanes=2)).key != one.key
    assert outline(sums(3, 1, 7)).key != one.key  # a loop of one iteration disappears


def test_a_kernel_for_both_sizes() -> None:
    sizes = ((3, 5, 7), (4, 9, 2))
    made = [sums(*size) for size in sizes]
    outlines = [outline(function) for function in made]
    wanted = arguments(outlines)
    target = detect()
    for function in made:  # either of them becomes the kernel of both
        library = load([generalized(function, wanted)], target)
        for (rows, columns, step), each in zip(sizes, outlines, strict=True):
            x = np.random.default_rng(0).standard_normal((rows, columns)).astype("float32")
            out, work = np.zeros(rows, "float32"), np.zeros(64, "float32")
            numbers = np.array(wanted.values(each.numbers), wanted.dtype)
            pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, out, numbers, work)]
            library.sums(*pointers, ctypes.c_int64(0), ctypes.c_int64(rows))
            right = 1 / columns + x.sum(1) + step * np.arange(rows)
            np.testing.assert_allclose(out, right, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "columns", "least", "dtype"),
    [
        ([(1, 5, 5), (1, 7, 7)], {1: 0, 2: 0}, (1,), "int32"),  # equal ones are one argument
        ([(0, 2), (3, 4)], {0: 0, 1: 1}, (0, 1), "int32"),
        ([(-3,), (4,)], {0: 0}, (-1,), "int32"),
        ([(1, 2**31), (2, 5)], {0: 0, 1: 1}, (1, 1), "int64"),
        ([(4, 2), (4, 2)], {}, (), "int32"),
    ],
)
def test_which_numbers_are_arguments(
    rows: list[tuple[int, ...]], columns: dict[int, int], least: tuple[int, ...], dtype: str
) -> None:
    found = arguments([Outline("key", row) for row in rows])
    assert (found.columns, found.least, found.dtype) == (columns, least, dtype)
    for row in rows:
        values = found.values(row)
        assert all(values[column] == row[place] for place, column in columns.items())
