"""Gathers against numpy and the reference: an index may count from the end, every lane may have an
index of its own, and what is gathered may be padding.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx.parser import parse_model

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites import canonicalize
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.space import configs
from gtco.tensor.stage import Stage, TensorType, make_stage
from tests.kernels import (
    build,
    finest,
    fresh_seed,
    reference,
    runnable,
    small_tasks,
    some_kernels,
    targets,
)
from tests.sketch.test_elementwise import op

T = TensorType


def test_gather_with_negative_indices() -> None:
    machine = runnable("x86-64-v3")
    g = make_stage(
        [op("gather", "x i", "g", (3, 4, 19), axis=1), op("negative", "g", "y", (3, 4, 19))],
        {"x": TensorType((3, 9, 19)), "i": TensorType((4,), "int64")},
        [],
    )
    sketch = elementwise.match(g, machine)
    assert sketch is not None
    x = np.random.default_rng(fresh_seed()).standard_normal((3, 9, 19)).astype(np.float32)
    i = np.array([8, -1, 0, -9])
    got = build(sketch, next(iter(configs(sketch))), machine)(x, i)
    np.testing.assert_array_equal(got, -np.take(x, i, axis=1))


@pytest.mark.parametrize("name", targets())
def test_gather_along_the_last_axis(name: str) -> None:
    """Every lane has its own index."""
    machine = runnable(name)
    g = make_stage(
        [op("gather", "x i", "y", (3, 2, 21), axis=1)],
        {"x": TensorType((3, 9)), "i": TensorType((2, 21), "int64")},
        [],
    )
    sketch = elementwise.match(g, machine)
    assert sketch is not None
    rng = np.random.default_rng(fresh_seed())
    x, i = rng.standard_normal((3, 9)).astype(np.float32), rng.integers(-9, 9, (2, 21))
    np.testing.assert_array_equal(
        build(sketch, next(iter(configs(sketch))), machine)(x, i), np.take(x, i, axis=1)
    )


@pytest.mark.parametrize("name", targets())
def test_a_gather_behind_a_padding_reads_inside_too(name: str) -> None:
    """The row that is gathered is known only at run time. The analysis once took row 0, which is
    padding, for every row, and so it saw rows of a constant.
    """
    machine = runnable(name)
    padding = {"before": (1, 3, 0), "after": (1, 3, 3), "value": 0.0}
    for axis, shape in ((0, (6, 7, 6)), (1, (5, 6, 6)), (2, (5, 7, 6))):
        built = make_stage(
            [
                op("pad", "x", "p", (5, 7, 6), **padding),
                op("gather", "p at", "y", shape, axis=axis),
            ],
            {"x": TensorType((3, 1, 3)), "at": TensorType((6,), "int64")},
            [],
        )
        sketch = elementwise.match(built, machine)
        assert sketch is not None
        x = np.arange(1, 10, dtype=np.float32).reshape(3, 1, 3)
        inputs = [x, np.array([3, -1, 4, -5, 4, -2])]
        if axis == 2:
            inputs[1][3] = 0
        for kernel in some_kernels(sketch, machine):
            np.testing.assert_array_equal(kernel(*inputs), reference(built, inputs, precise=False))


def elements(
    shape: tuple[int, ...], taken: tuple[int, ...], axis: int, dtype: str, indices: str
) -> tuple[Stage, dict[str, np.ndarray]]:
    """GatherElements as it is lowered, a gather of flat places, and the constants of that."""
    imported = parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g ({dtype}{list(shape)} x, {indices}{list(taken)} i) => ({dtype}{list(taken)} y)
        {{ y = GatherElements<axis={axis}>(x, i) }}""")
    graph = canonicalize(lower(load_onnx(imported)))
    return make_stage(graph.operators.values(), graph.types, graph.constants), graph.constants


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    ("shape", "taken", "dtype", "indices"),
    [
        ((3, 5, 41), (2, 4, 37), "float", "int64"),
        ((7, 2, 4), (9, 2, 3), "float", "int32"),
        ((3, 6, 19), (3, 6, 50), "uint8", "int64"),
        ((2, 300), (2, 531), "float16", "int32"),
        ((4, 9, 8), (4, 9, 8), "bool", "int64"),
    ],
)
def test_gather_elements(
    shape: tuple[int, ...], taken: tuple[int, ...], dtype: str, indices: str, name: str
) -> None:
    """Along every axis, with indices that count from the end, against numpy."""
    machine, rng = runnable(name), np.random.default_rng(fresh_seed())
    x = rng.integers(-99, 99, shape).astype({"float": "float32"}.get(dtype, dtype))
    for axis, extent in enumerate(shape):
        cut = tuple(
            n if a == axis else min(n, m) for a, (n, m) in enumerate(zip(taken, shape, strict=True))
        )
        stage, constants = elements(shape, cut, axis, dtype, indices)
        i = rng.integers(-extent, extent, cut).astype(indices)
        places = [
            np.arange(n).reshape([-1 if a == b else 1 for b in range(len(cut))])
            for a, n in enumerate(cut)
        ]
        places[axis] = i
        sketch = elementwise.match(stage, machine)
        assert sketch is not None
        given = [{"x": x, "i": i}.get(n.name, constants.get(n.name)) for n in stage.inputs]
        with small_tasks():
            kernel = build(sketch, finest(sketch), machine)
        np.testing.assert_array_equal(kernel(*given, unaligned=True), x[tuple(places)])


@pytest.mark.parametrize("name", targets())
def test_gathers_of_places_that_are_gathered(name: str) -> None:
    """Both the indices and the data of a gather may be gathers, and two may meet. The data is
    computed, and so is what becomes of the elements.
    """
    machine, rng = runnable(name), np.random.default_rng(fresh_seed())
    n = 300
    stage = make_stage(
        [
            op("negative", "x", "m", (5, 40)),
            op("gather", "table i", "j", (n,), axis=0, dtype="int64"),
            op("gather", "m j", "a", (5, n), axis=1),
            op("gather", "w at", "v", (5, 17), axis=1),
            op("gather", "v i", "b", (5, n), axis=1),
            op("multiply", "a b", "y", (5, n)),
        ],
        {
            "x": T((5, 40)),
            "table": T((17,), "int64"),
            "i": T((n,), "int32"),
            "w": T((5, 8)),
            "at": T((17,), "int64"),
        },
        [],
    )
    sketch = elementwise.match(stage, machine)
    assert sketch is not None and sketch.picks
    values = {
        "x": rng.standard_normal((5, 40)).astype(np.float32),
        "table": rng.integers(-40, 40, 17),
        "i": rng.integers(-17, 17, n).astype(np.int32),
        "w": rng.standard_normal((5, 8)).astype(np.float32),
        "at": rng.integers(-8, 8, 17),
    }
    inputs = [values[i.name] for i in stage.inputs]
    for kernel in some_kernels(sketch, machine):
        np.testing.assert_array_equal(kernel(*inputs), reference(stage, inputs, precise=False))


@pytest.mark.parametrize("name", targets())
def test_a_gather_that_is_read_at_two_places(name: str) -> None:
    machine, rng = runnable(name), np.random.default_rng(fresh_seed())
    stage = make_stage(
        [
            op("gather", "x i", "g", (3, 60), axis=1),
            op("slice", "g", "a", (3, 41), begin=(0, 0), strides=(1, 1)),
            op("slice", "g", "b", (3, 41), begin=(0, 19), strides=(1, 1)),
            op("subtract", "a b", "y", (3, 41)),
        ],
        {"x": T((3, 9)), "i": T((60,), "int64")},
        [],
    )
    sketch = elementwise.match(stage, machine)
    assert sketch is not None and sketch.picks
    inputs = [rng.standard_normal((3, 9)).astype(np.float32), rng.integers(-9, 9, 60)]
    kernel = build(sketch, next(iter(configs(sketch))), machine)
    np.testing.assert_array_equal(kernel(*inputs), reference(stage, inputs, precise=False))


@pytest.mark.parametrize("name", targets())
def test_joined_gathers_read_their_own_indices(name: str) -> None:
    """In the rows of one of them the places of the other's indices lie outside of these."""
    machine, rng = runnable(name), np.random.default_rng(fresh_seed())
    rows, n = {"1": 2, "2": 700}, 300
    joined, types = [], {}
    for x, count in rows.items():
        flat = {f"flat{x}": T((count * 50,)), f"i{x}": T((count, n), "int64")}
        joined.append(op("gather", f"flat{x} i{x}", f"g{x}", (count, n), axis=0))
        types |= flat
    joined.append(op("concat", "g1 g2", "y", (sum(rows.values()), n), axis=0))
    stage = make_stage(joined, types, [])
    sketch = elementwise.match(stage, machine)
    assert sketch is not None
    values = {}
    for x, count in rows.items():
        values[f"flat{x}"] = rng.standard_normal(count * 50).astype(np.float32)
        values[f"i{x}"] = rng.integers(-count * 50, count * 50, (count, n))
    inputs = [values[i.name] for i in stage.inputs]
    for kernel in some_kernels(sketch, machine):
        np.testing.assert_array_equal(kernel(*inputs), reference(stage, inputs, precise=False))


@pytest.mark.parametrize("indices", ["int32", "int64"])
def test_an_index_outside_reads_inside(indices: str) -> None:
    """Of memory before an inaccessible page; which element it gives is not defined."""
    machine = runnable("x86-64-v3")
    stage = make_stage(
        [op("gather", "x i", "y", (2, 40), axis=1)],
        {"x": T((2, 9)), "i": T((40,), indices)},
        [],
    )
    sketch = elementwise.match(stage, machine)
    assert sketch is not None
    limits = np.iinfo(indices)
    i = np.resize(np.array([9, -10, 1 << 30, limits.max, limits.min, 3], indices), 40)
    x = np.random.default_rng(fresh_seed()).standard_normal((2, 9)).astype(np.float32)
    got = build(sketch, next(iter(configs(sketch))), machine)(x, i)
    assert np.isin(got, x).all() and (got[:, 5::6] == x[:, 3:4]).all()
