"""Values bound by the emitter."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import tirx

from gtco.tensor.emit import Emitter, Expr
from gtco.tensor.math import constant
from gtco.tensor.scalar import cast
from tests.kernels import elementwise_kernel, runnable, targets


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
