"""Values that the emitter binds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from gtco.codegen.load import load
from gtco.tensor.analysis.indices import floordiv, floormod
from gtco.tensor.emit import vector_math
from gtco.tensor.emit.arithmetic import cast
from gtco.tensor.emit.emitter import Emitter, Expr, KernelArguments, kernel
from gtco.tensor.emit.vector_math import constant
from gtco.tensor.stage import TensorType
from tests.kernels import Built, elementwise_kernel, runnable, targets


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_a_condition_is_bound_in_vectors(name: str, explicit: bool) -> None:
    def function(em: Emitter, x: Expr) -> Expr:
        above = em.let(x >= constant(x, 0.5))
        return tirx.Select(above, x, constant(x, 0.0)) + tirx.Select(above, x, constant(x, 1.0))

    x = np.linspace(0, 1, 64, dtype=np.float32)
    got = elementwise_kernel(function, x.size, runnable(name), explicit)(x)
    np.testing.assert_array_equal(got, np.where(x >= 0.5, x + x, 1))


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
def test_a_condition_as_a_number_is_bound_in_vectors(explicit: bool) -> None:
    def function(em: Emitter, x: Expr) -> Expr:
        one = em.let(cast(x >= constant(x, 0.5), "bool", "float32"))
        return one * x + one

    x = np.linspace(0, 1, 64, dtype=np.float32)
    got = elementwise_kernel(function, x.size, runnable("x86-64-v3"), explicit)(x)
    np.testing.assert_array_equal(got, np.where(x >= 0.5, x + 1, 0))


def mish_written_out(em: Emitter, x: Expr) -> Expr:
    """x tanh(softplus(x)), as ONNX's importer writes Mish."""
    x = em.let(x)
    return em.let(x * vector_math.tanh(em, vector_math.softplus(em, x)))


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("name", targets())
def test_long_chains_compile(name: str, explicit: bool) -> None:
    """Mish three times. If its variables were written out in each other, it would have over 10^15
    nodes.
    """

    def function(em: Emitter, x: Expr) -> Expr:
        for _ in range(3):
            x = mish_written_out(em, x)
        return x

    x = np.linspace(-9, 9, 64, dtype=np.float32)
    got = elementwise_kernel(function, x.size, runnable(name), explicit)(x)
    wanted = x.astype(np.float64)
    for _ in range(3):
        wanted = wanted * np.tanh(np.log1p(np.exp(wanted)))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("explicit", [False, True], ids=["loop", "vectors"])
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "uint8", "float16"])
def test_long_chains_of_any_type_compile(dtype: str, explicit: bool) -> None:
    """Fifty values, each made of the one before. Written out in each other they would have 3^50
    nodes.
    """

    def function(em: Emitter, x: Expr) -> Expr:
        x = em.let(cast(x, "float32", dtype))
        for _ in range(50):
            x = em.let(x + x - x)
        return cast(x, dtype, "float32")

    x = np.arange(64, dtype=np.float32)
    got = elementwise_kernel(function, x.size, runnable("x86-64-v3"), explicit)(x)
    np.testing.assert_array_equal(got, x)


def test_a_long_chain_of_what_all_lanes_share_stays_one_value() -> None:
    """The chain does not vary inside a vectorized loop, so it may decide a branch."""
    machine = runnable("x86-64-v3")
    types = TensorType((machine.lanes,))

    def body(em: Emitter, args: KernelArguments) -> None:
        with em.vector(em.lanes) as lane:
            shared = em.load(args.inputs["x"], [3])
            for _ in range(50):
                shared = em.let(shared + shared - shared)
            assert not em.varies(shared)
            mine = em.let(em.load(args.inputs["x"], [lane]) + shared)
            assert em.varies(mine)
            em.store(args.output, [lane], mine)

    made = kernel("shared", {"x": types}, types, 0, machine.lanes, body)
    library = load([made], machine)
    x = np.arange(machine.lanes, dtype=np.float32)
    built = Built(library, "shared", (("x", types),), types, 1, 0, {})
    np.testing.assert_array_equal(built(x), x + 3)


@pytest.mark.parametrize(
    "value",
    [
        lambda i, j: floormod(0 - i, 6),
        lambda i, j: floormod(floormod(0 - i, 6) - j + 3, 4),
        lambda i, j: floordiv(floormod(12 - 2 * i, 6) - 3, 2) + 4,
        lambda i, j: floormod(floormod(3 - i, 4) * 3 - floormod(6 - j, 3) - 2, 7),
        lambda i, j: floordiv(0 - i * 2, 6) * 5 + floordiv(j * 3, -2),
        lambda i, j: floormod(floordiv(2 - i, -3) - 2, -7) + 7,
    ],
)
def test_an_index_divides_by_positive_numbers(value: Callable[..., Any]) -> None:
    """The simplifier makes ``i % -6 * -1`` of ``-i % 6``. TVM's code generator may refuse it."""
    em = Emitter(8)
    i, j = em.variables([13, 7])
    index = em.index(value(i, j))
    assert not re.search("(%|//) -", str(index))
    for at in np.ndindex(13, 7):
        here = Emitter(8)
        for var, place in zip((i, j), at, strict=True):
            here.bind(var, 1, place)
        assert here.index(index) == value(*at)
