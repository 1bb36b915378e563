"""Tensors of more elements than int32 counts: their kernels index in int64.

The tests read the code that is emitted for stages of the true sizes: no index of a tensor, and no
integer on the way to one, may leave the range of its type. They run such kernels on small stages,
for which the border is moved; the scheduled tests also run two of 2 GB.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.sym import Analyzer

import gtco.tensor.stage
from gtco.driver.backend import backend_of
from gtco.driver.linking.arena import plan_arena
from gtco.graph.graph import Graph
from gtco.machine.target import target
from gtco.support.errors import ShapeError
from gtco.tensor.emit.emitter import operands
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.space import Program, Rejection
from gtco.tensor.stage import NARROW_INDICES, Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import build, first_config, runnable
from tests.stages import CORES, drawn
from tests.tensor.test_space_property import check_kernels

BORDER = 2**31
T = TensorType


class Reading:
    """The integers of a kernel, read with the ranges of the loops around them."""

    def __init__(self) -> None:
        self.analyzer = Analyzer()
        self.wide = 0  # indices of tensors of more elements than int32 counts

    def statement(self, node: Any) -> None:
        if hasattr(node, "seq"):
            for part in node.seq:
                self.statement(part)
        elif isinstance(node, tirx.For):
            for end in (node.min, node.min + node.extent):
                self.value(end)
            low = self.analyzer.const_int_bound(node.min).min_value
            high = self.analyzer.const_int_bound(node.min + node.extent).max_value
            if high > low:
                ends = (tirx.const(end, str(node.loop_var.ty)) for end in (low, high))
                self.analyzer.bind(node.loop_var, tvm.ir.Range(*ends))
            self.statement(node.body)
        elif isinstance(node, tirx.IfThenElse):
            self.value(node.condition)
            self.statement(node.then_case)
            if node.else_case is not None:
                self.statement(node.else_case)
        elif isinstance(node, tirx.Bind):
            self.value(node.value)
            if str(node.value.ty) == "int32" and reads(node.value):
                ends = (tirx.const(end, "int32") for end in (0, NARROW_INDICES))
                self.analyzer.bind(node.var, tvm.ir.Range(*ends))  # the range that was stored
            elif str(node.value.ty) in ("int32", "int64"):
                self.analyzer.bind(node.var, node.value)
        elif isinstance(node, tirx.BufferStore):
            self.element(node)
            self.value(node.value)
        elif hasattr(node, "body"):
            self.statement(node.body)
        elif hasattr(node, "value"):
            self.value(node.value)

    def value(self, node: Any) -> None:
        if not isinstance(node, tvm.ir.Expr):
            return
        if hasattr(node, "source"):
            self.element(node)
            return
        for part in operands(node):
            self.value(part)

    def element(self, node: Any) -> None:
        (index,) = node.indices
        buffer = node.buffer if isinstance(node, tirx.BufferStore) else node.source
        size = int(buffer.shape[0])
        base = index.base if isinstance(index, tirx.Ramp) else index
        if size > NARROW_INDICES:
            self.wide += 1
            assert str(base.ty).startswith("int64"), f"{index} of {size} elements is {base.ty}"
        self.inside(base)
        self.value(base)

    def inside(self, node: Any) -> None:
        """Checks that no part in int32 leaves its range; a variable has the range of its value."""
        if str(node.ty) == "int32":
            bound = self.analyzer.const_int_bound(node)
            assert -BORDER <= bound.min_value and bound.max_value < BORDER, f"{node}: {bound}"
        for part in operands(node):
            if isinstance(part, tvm.ir.Expr):
                self.inside(part)


def reads(node: Any) -> bool:
    """True if a part of the value is read from memory."""
    return hasattr(node, "source") or any(
        reads(part) for part in operands(node) if isinstance(part, tvm.ir.Expr)
    )


def op(kind: str, inputs: str, output: str, *shape: int, dtype: str, **attrs: Any) -> Operator:
    return Operator(kind, tuple(inputs.split()), output, T(shape, dtype), make_attrs(**attrs))


def negated(*shape: int) -> Stage:
    made = op("negative", "x", "y", *shape, dtype="int8")
    return make_stage([made], {"x": T(shape, "int8")}, [])


def resized(method: str) -> Stage:
    made = op(
        "resize2d", "x", "y", 1, 16384, 16384, 33, dtype="float32", method=method,
        coordinates="half_pixel", rounding="floor", cubic_alpha=-0.75, layout="NHWC",
    )  # fmt: skip
    return make_stage([made], {"x": T((1, 8192, 8192, 33))}, [])


def stages() -> dict[str, Stage]:
    """Stages by family, with a tensor a little over the border."""
    n, long = 2**16 + 3, 2**15 + 1
    f = "float32"
    rows = T((n, long))
    return {
        "element-wise": negated(BORDER + 4096),
        "element-wise of rows": negated(long, n),
        "transposed": make_stage(
            [op("permute", "x", "y", n, long, dtype=f, axes=(1, 0))], {"x": T((long, n))}, []
        ),
        "gather": make_stage(
            [op("gather", "x i", "y", 5, long, dtype=f, axis=0)],
            {"x": rows, "i": T((5,), "int64")},
            [],
        ),
        "gathered result": make_stage(
            [op("gather", "x i", "y", n, long, dtype=f, axis=0)],
            {"x": T((5, long)), "i": T((n,), "int64")},
            [],
        ),
        "scatter": make_stage(
            [op("scatter", "x i u", "y", n, long, dtype=f, rows=n, reduction="add")],
            {"x": rows, "i": T((9,), "int64"), "u": T((9, long))},
            [],
        ),
        "topk": make_stage(
            [op("topk", "x", "y", n, 3, dtype="int64", k=3, largest=1)], {"x": rows}, []
        ),
        "topk of many": make_stage(
            [op("topk", "x", "y", n, 100, dtype="int64", k=100, largest=0)], {"x": rows}, []
        ),
        "softmax": make_stage([op("softmax", "x", "y", n, long, dtype=f, axis=1)], {"x": rows}, []),
        "sum over columns": make_stage(
            [op("sum", "x", "y", long, dtype=f, axes=(0,), keepdims=False)], {"x": rows}, []
        ),
        "places of the largest": make_stage(
            [op("argmax", "x", "y", long, dtype="int64", axis=0, keepdims=False)], {"x": rows}, []
        ),
        **{f"resized, {method}": resized(method) for method in ("nearest", "linear")},
        "sampled": make_stage(
            [
                op(
                    "grid_sample", "x g", "y", 1, 5, 40, 33, dtype=f, method="linear",
                    padding="zeros", align_corners=False, layout="NHWC",
                )
            ],
            {"x": T((1, 8192, 8192, 33)), "g": T((1, 5, 40, 2))},
            [],
        ),
        "layer norm": make_stage(
            [op("layer_norm", "x g b", "y", n, long, dtype=f, epsilon=1e-5)],
            {"x": rows, "g": T((long,)), "b": T((long,))},
            ["g", "b"],
        ),
        "product": make_stage(
            [op("matmul", "a b", "y", n, long, dtype=f)],
            {"a": T((n, 24)), "b": T((24, long))},
            ["b"],
        ),
        "product of much": make_stage(
            [op("matmul", "a b", "y", n, 24, dtype=f)], {"a": rows, "b": T((long, 24))}, ["b"]
        ),
        "attention": make_stage(
            [op("attention", "q k v m", "y", 8, 17000, 16, dtype=f, scale=0.25)],
            {x: T((8, 17000, 16)) for x in "qkv"} | {"m": T((8, 17000, 17000))},
            [],
        ),
        "convolution": make_stage(
            [
                op(
                    "conv2d", "x w", "y", 1, 8192, 8192, 33, dtype=f, strides=(1, 1),
                    padding=(1, 1, 1, 1), dilation=(1, 1), groups=1, layout="NHWC",
                )
            ],
            {"x": T((1, 8192, 8192, 8)), "w": T((33, 8, 3, 3))},
            ["w"],
        ),
        "what lies between": make_stage(  # no tensor in memory is large
            [
                op("broadcast", "x", "b", n, long, dtype=f),
                op("add", "b z", "a", n, long, dtype=f),
                op("sum", "a", "y", n, dtype=f, axes=(1,), keepdims=False),
            ],
            {"x": T((n, 1)), "z": T((1, long))},
            [],
        ),
    }  # fmt: skip


STAGES = stages()


@pytest.mark.parametrize("name", STAGES)
def test_no_index_leaves_its_type(name: str) -> None:
    """In every sketch of the stage."""
    stage, seen = STAGES[name], 0
    assert stage.wide
    for sketch in space_of(stage, target("x86-64-v3")).sketches:
        program = sketch.build(first_config(sketch), "k")
        if isinstance(program, Rejection):
            assert sketch.name == "fallback" and "elements" in program.detail
            continue
        reading = Reading()
        reading.statement(program.function.body)
        seen += reading.wide
        assert 1 <= program.tasks < BORDER
    assert seen or name == "what lies between"


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_kernels_of_wide_indices_compute_the_same(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small stages, for which the border is moved to 0."""
    monkeypatch.setattr(gtco.tensor.stage, "NARROW_INDICES", 0)
    machine = runnable("x86-64-v3")
    random = Random(core.__name__)
    stage = drawn(core, random, random)
    assert stage.wide
    space = space_of(stage, machine)
    check_kernels(space, [first_config(s) for s in space.sketches], machine, random)


def test_small_kernels_keep_int32() -> None:
    sketch = elementwise.match(negated(NARROW_INDICES), target("x86-64-v3"))
    assert sketch is not None
    program = sketch.build(first_config(sketch), "k")
    assert isinstance(program, Program) and 'T.Cast("int32", begin)' in program.function.script()


def test_what_tvm_writes_is_refused_by_name() -> None:
    shape = (2, NARROW_INDICES)
    attrs = make_attrs(module="", op="cumsum", result=-1)
    made = Operator("relax", ("x",), "y", T(shape, "int8"), attrs, "scan")
    graph = Graph(("x",), ("y",), {"x": T(shape, "int8"), "y": T(shape, "int8")})
    graph.operators["y"] = made
    with pytest.raises(ShapeError, match=r"node 'scan' \(cumsum\): the tensor 'x' .* 2\.1 billion"):
        backend_of(target("x86-64-v3")).check_indices(graph)


def test_the_plan_of_memory_is_wide() -> None:
    """Three tensors of 2^31 or more elements; two of them live at once."""
    nbytes = 4 * (BORDER + 64)
    for threads in (1, 2):
        offsets, total = plan_arena([(nbytes, 0, 1), (nbytes, 1, 2), (nbytes, 2, 3)], threads)
        assert total == 2 * nbytes and sorted(offsets) == [0, 0, nbytes]


@pytest.mark.scheduled
@pytest.mark.parametrize("size", [BORDER - 1, BORDER, BORDER + 4096])
def test_real_tensors_at_the_border(size: int) -> None:
    """Tensors of 2 GB: an element-wise operator works in place of its neighbours, and a gather
    reads rows from the far end.
    """
    machine = runnable("x86-64-v3")
    sketch = elementwise.match(negated(size), machine)
    assert sketch is not None
    built = build(sketch, first_config(sketch), machine)
    x = np.resize(np.arange(-127, 128, dtype=np.int8), size)
    got = built(x)
    for begin in range(0, size, 1 << 28):
        part = slice(begin, begin + (1 << 28))
        np.testing.assert_array_equal(got[part], -x[part])


@pytest.mark.scheduled
def test_rows_beyond_the_border_are_gathered() -> None:
    machine = runnable("x86-64-v3")
    rows, length = 2**19 + 5, 4096
    stage = make_stage(
        [op("gather", "x i", "y", 4, length, dtype="int8", axis=0)],
        {"x": T((rows, length), "int8"), "i": T((4,), "int64")},
        [],
    )
    sketch = elementwise.match(stage, machine)
    assert sketch is not None
    x = np.zeros((rows, length), np.int8)
    x[-1], x[-3], x[2**19 - 1] = 1, 2, 3
    i = np.array([rows - 1, -3, 2**19 - 1, 0])
    got = build(sketch, first_config(sketch), machine)(x, i)
    np.testing.assert_array_equal(got[:, 5], [1, 2, 3, 0])
