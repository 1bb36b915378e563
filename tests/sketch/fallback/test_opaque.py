"""The fallback on operators that only Relax knows: their values, their tasks, what the fallback
refuses, and what its kernels call.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as R

from gtco.codegen.llvm import object_code
from gtco.tensor import space
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.space import Config, Program, Rejection
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.kernels import build, fresh_seed, random_inputs, runnable
from tests.sketch.fallback.test_fallback import MACHINE, T, check, run, single


def opaque(make: Any, types: list[TensorType], result: int = -1) -> Stage:
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var(f"p{i}", relax.TensorType(t.shape, t.dtype)) for i, t in enumerate(types)
    ]
    with builder.function("main", parameters):
        with builder.dataflow():
            value = builder.emit_output(builder.emit(make(*parameters)))
        builder.emit_func_output(value)
    module = builder.get()
    made = module["main"].ret_ty
    made = made.fields[result] if result >= 0 else made
    out = T(tuple(int(d) for d in made.shape), str(made.dtype))
    return single("relax", types, out, module=tvm.ir.save_json(module), op="test", result=result)


OPAQUE: dict[str, Stage] = {
    "topk values": opaque(lambda x: R.topk(x, k=4, axis=1), [T((3, 11))], 0),
    "topk indices": opaque(
        lambda x: R.topk(x, k=4, axis=0, largest=False, dtype="int64"), [T((13, 3))], 1
    ),
    "sort": opaque(lambda x: R.sort(x, axis=-1, descending=True), [T((2, 3, 37))]),
    "argsort": opaque(lambda x: R.argsort(x, axis=1, dtype="int64"), [T((2, 8, 3))]),
    "argmax": opaque(lambda x: R.argmax(x, axis=1), [T((3, 11, 2))]),
    "argmin": opaque(lambda x: R.argmin(x, axis=0, keepdims=True), [T((9, 4), "int64")]),
    "cumsum": opaque(lambda x: R.cumsum(x, axis=1), [T((3, 7))]),
    "einsum": opaque(lambda a, b: R.einsum((a, b), "bij,bjk->bik"), [T((2, 3, 4)), T((2, 4, 5))]),
    "split": opaque(lambda x: R.split(x, 3, axis=1), [T((4, 9))], 1),
    "group_norm": opaque(
        lambda x, g, b: R.nn.group_norm(x, g, b, num_groups=3, channel_axis=1, axes=[2, 3]),
        [T((2, 6, 4, 5)), T((6,)), T((6,))],
    ),
    "conv2d_transpose": opaque(
        lambda x, w: R.nn.conv2d_transpose(x, w, strides=2, padding=1),
        [T((1, 3, 5, 5)), T((3, 4, 4, 4))],
    ),
    "conv3d": opaque(
        lambda x, w: R.nn.conv3d(x, w, padding=1), [T((1, 2, 4, 5, 3)), T((3, 2, 3, 3, 3))]
    ),
    "grid_sample": opaque(
        lambda x, g: R.image.grid_sample(x, g, "bilinear", "NCHW", "zeros", False),
        [T((2, 3, 6, 8)), T((2, 2, 5, 7))],
    ),
    "variance": opaque(lambda x: R.variance(x, axis=[1]), [T((5, 12))]),
    "tril": opaque(lambda x: R.tril(x, 1), [T((5, 7))]),
    "one_hot": opaque(
        lambda i: R.one_hot(
            i,
            relax.prim_value(tvm.tirx.FloatImm("float32", 1.0)),
            relax.prim_value(tvm.tirx.FloatImm("float32", 0.0)),
            9,
            -1,
        ),
        [T((4,), "int64")],
    ),
    "the input itself": opaque(lambda x: R.reshape(x, (3, 4)), [T((3, 4), "int64")]),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_relax(name: str) -> None:
    check(OPAQUE[name])


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        # all axes but the last, which is left to LLVM
        ("grid_sample", 2 * 3 * 5),
        ("tril", 5),
        # a scan of each row: several functions, each of which needs the one before
        ("cumsum", 3),
        ("group_norm", 1),
    ],
)
def test_independent_iterations_are_tasks(name: str, tasks: int) -> None:
    sketch = fallback.match(OPAQUE[name], runnable(MACHINE))
    assert sketch is not None
    program = space.build(sketch, Config(sketch.name), "k")
    assert isinstance(program, Program) and program.tasks == tasks


def test_relax_scatter() -> None:
    stage = opaque(
        lambda x, i, u: R.scatter_nd(x, i, u, "update"), [T((6, 3)), T((2, 1), "int64"), T((2, 3))]
    )
    x, _, u = random_inputs(stage, fresh_seed())
    check(stage, x, np.array([[4], [1]]), u)
    stage = opaque(
        lambda x, i, u: R.scatter_elements(x, i, u, axis=1),
        [T((2, 5)), T((2, 2), "int64"), T((2, 2))],
    )
    x, _, u = random_inputs(stage, fresh_seed())
    check(stage, x, np.array([[4, 0], [1, 3]]), u)


def test_sort_keeps_the_order_of_equal_elements() -> None:
    x = np.array([[2, 1, 2, 1, 2, 0, 1]], "int64")
    for descending in (False, True):
        stage = opaque(
            lambda x, d=descending: R.argsort(x, axis=1, descending=d, dtype="int64"),
            [T(x.shape, "int64")],
        )
        key = -x if descending else x
        np.testing.assert_array_equal(run(stage, [x]), np.argsort(key, axis=1, kind="stable"))


def test_sort_has_nan_above_all_numbers() -> None:
    """NaN once had no place: which elements came before it depended on where the merge met it."""
    x = np.array([[3, np.nan, 1, np.nan, np.inf, 2, -np.inf, 0]], "float32")
    for descending, order in ((False, [6, 7, 2, 5, 0, 4, 1, 3]), (True, [1, 3, 4, 0, 5, 2, 7, 6])):
        stage = opaque(
            lambda x, d=descending: R.argsort(x, axis=1, descending=d, dtype="int64"), [T(x.shape)]
        )
        np.testing.assert_array_equal(run(stage, [x]), [order])


def test_same_tensor_twice_and_zero_dimensional() -> None:
    stage = make_stage([Operator("matmul", ("x", "x"), "y", T((5, 5)))], {"x": T((5, 5))}, [])
    check(stage)
    check(opaque(lambda x: R.sum(x), [T((3, 4))]))
    check(single("add", [T(()), T(())], T(())))


# what it refuses, what it leaves ------------------------------------------------------------------
def test_dynamic_shapes_are_rejected_with_a_reason() -> None:
    module = tvm.ir.save_json(_nonzero())
    stage = single(
        "relax", [T((3, 4), "bool")], T((2, 5), "int64"), module=module, op="nonzero", result=-1
    )
    # type: ignore[union-attr]
    answer = space.build(fallback.match(stage, runnable(MACHINE)), Config("fallback"), "k")
    assert isinstance(answer, Rejection) and answer.detail.startswith("nonzero: ")


def _nonzero() -> Any:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4), "bool"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit_output(builder.emit(R.nonzero(x)))
        builder.emit_func_output(value)
    return builder.get()


def test_more_than_one_operator_or_a_symbolic_size_does_not_match() -> None:
    machine = runnable(MACHINE)
    two = make_stage(
        [Operator("relu", ("x",), "a", T((3,))), Operator("exp", ("a",), "y", T((3,)))],
        {"x": T((3,))},
        [],
    )
    assert fallback.match(two, machine) is None
    assert fallback.match(single("relu", [T(("n",))], T(("n",))), machine) is None


SYMBOLS = [
    *OPAQUE.values(),
    single("gelu", [T((9,))], T((9,))),
    single("softmax", [T((4, 9))], T((4, 9)), axis=1),
    single("power", [T((9,)), T((9,))], T((9,))),
]


def test_kernels_need_libm_alone() -> None:
    machine = runnable(MACHINE)
    functions = []
    for i, stage in enumerate(SYMBOLS):
        # type: ignore[union-attr]
        sketch = fallback.match(stage, machine)
        program = space.build(sketch, Config("fallback"), f"kernel_{i}")
        assert isinstance(program, Program)
        functions.append(program.function)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.o"
        path.write_bytes(object_code(functions, machine))
        lines = subprocess.run(
            ["nm", str(path)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    undefined = {line.split()[-1] for line in lines if " U " in line or " w " in line}
    assert undefined <= {"expf", "logf", "powf", "erff", "tanhf", "memset", "memcpy", "memmove"}, (
        undefined
    )


def test_nothing_happens_in_an_empty_range() -> None:
    import ctypes

    machine = runnable(MACHINE)
    for stage in (
        single("relu", [T((4,))], T((4,))),
        single("softmax", [T((1, 4))], T((1, 4)), axis=1),
    ):
        # type: ignore[arg-type]
        kernel = build(fallback.match(stage, machine), Config("fallback"), machine)
        x, out, work = np.ones(4, "float32"), np.full(4, 7, "float32"), np.zeros(1024, "uint8")
        getattr(kernel.library, kernel.symbol)(
            *(ctypes.c_void_p(a.ctypes.data) for a in (x, out, work)),
            ctypes.c_int64(1),
            ctypes.c_int64(1),
        )
        assert (out == 7).all()
