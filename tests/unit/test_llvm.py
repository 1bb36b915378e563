"""Code that LLVM makes of plain loops: it computes what the loops say."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from tvm import relax

from gtco.tensor import relax_bridge
from gtco.tensor.stage import TensorType
from tests.kernels import link, runnable, targets

# Each came out wrong on one target at least while LLVM 22's loop vectorizer was on.
WRAPPED = [((3, 8, 1), (5, 4, 2)), ((3, 8, 3), (5, 8, 2)), ((3, 8, 5), (5, 4, 1))]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(("shape", "repeats"), WRAPPED)
def test_a_masked_counter_wraps(
    target: str, shape: tuple[int, ...], repeats: tuple[int, ...]
) -> None:
    """``y[i, j, k] = x[i % 3, j & 7, k % n]`` (see gtco.codegen.llvm.OPTIONS)."""
    output = tuple(n * r for n, r in zip(shape, repeats, strict=True))
    builder = relax.BlockBuilder()
    parameter = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [parameter]):
        with builder.dataflow():
            tiled = builder.emit_output(builder.emit(relax.op.tile(parameter, list(repeats))))
        builder.emit_func_output(tiled)
    function, _, tasks = relax_bridge.lower_module(
        builder.get(), "tile", [TensorType(shape)], [0], TensorType(output)
    )
    library, folder = link([function], runnable(target))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    y = np.zeros(output, np.float32)
    with folder:
        pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), None)
        library.tile(*pointers, ctypes.c_int64(0), ctypes.c_int64(tasks))
    np.testing.assert_array_equal(y, np.tile(x, repeats))
