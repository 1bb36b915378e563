"""Running sums of every axis against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from gtco.tensor.sketch import sketches
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.scan import cpu as scan
from gtco.tensor.sketch.scan import facts
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels,
    targets,
)

T = TensorType


def sums(
    shape: tuple[int, ...],
    axis: int,
    exclusive: bool = False,
    reverse: bool = False,
    dtype: str = "float32",
) -> Stage:
    attrs = make_attrs(axis=axis, exclusive=exclusive, reverse=reverse)
    op = Operator("cumsum", ("x",), "y", T(shape, dtype), attrs)
    return make_stage([op], {"x": T(shape, dtype)}, [])


def check(stage: Stage, machine: str, seed: int, some: bool = True) -> None:
    chosen = runnable(machine)
    sketch = scan.match(stage, chosen)
    assert sketch is not None
    arrays = random_inputs(stage, seed)
    kernels = (
        some_kernels(sketch, chosen) if some else [build(sketch, first_config(sketch), chosen)]
    )
    wanted = reference(stage, arrays)
    for kernel in kernels:
        got = kernel(*arrays, unaligned=True)
        if wanted.dtype.kind == "f":
            assert_close(got, wanted)
        else:
            np.testing.assert_array_equal(got, wanted)


ROWS = [((3, 37), 1), ((2, 5), 1), ((100,), 0), ((4, 9, 2), 1), ((5, 33, 4), 1), ((3, 2), 1)]
COLUMNS = [((70, 3), 0), ((2, 50, 100), 1), ((2, 3, 4, 5), 1), ((40, 16), 0), ((3, 1, 9, 300), 2)]


@pytest.mark.parametrize("machine", targets())
@pytest.mark.parametrize(("shape", "axis"), ROWS + COLUMNS)
def test_sums_forward_and_from_the_end(shape: tuple[int, ...], axis: int, machine: str) -> None:
    seed = fresh_seed()
    check(sums(shape, axis), machine, seed)
    check(sums(shape, axis, exclusive=True, reverse=True), machine, seed, some=False)


@pytest.mark.parametrize("machine", targets())
@pytest.mark.parametrize("dtype", ["int64", "int32", "float64", "uint32", "uint64"])
def test_every_dtype(dtype: str, machine: str) -> None:
    for shape, axis in (((5, 41), 1), ((3, 9, 2), 1), ((17, 35), 0)):
        check(sums(shape, axis, exclusive=True, dtype=dtype), machine, fresh_seed(), some=False)
        check(sums(shape, axis, reverse=True, dtype=dtype), machine, fresh_seed(), some=False)


@pytest.mark.parametrize("machine", targets())
def test_wide_chunks_take_a_few_rows_at_a_time(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of tensors that are a good part of the last cache, on a small one."""
    monkeypatch.setattr(facts, "FAR", 1 << 40)
    for shape, axis, reverse in (
        ((10, 70), 0, False),
        ((2, 7, 1500), 1, True),
        ((2, 3, 99), 1, True),
    ):
        for exclusive in (False, True):
            stage = sums(shape, axis, exclusive, reverse)
            sketch = scan.match(stage, runnable(machine))
            assert sketch is not None and sketch.wide and sketch.scratch.nbytes
            check(stage, machine, fresh_seed())


@pytest.mark.parametrize("machine", targets())
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fused_with_what_stands_around_it(axis: int, machine: str) -> None:
    """A mask becomes numbers, a permutation and a flip before, arithmetic and a move after."""
    given, turned = T((11, 6, 9), "bool"), T((6, 11, 9), "bool")
    made = T((6, 11, 9), "int32")
    attrs = make_attrs(axis=axis, exclusive=False, reverse=axis == 1)
    flip = make_attrs(begin=(5, 0, 0), strides=(-1, 1, 1))
    stage = make_stage(
        [
            Operator("permute", ("x",), "p", turned, make_attrs(axes=(1, 0, 2))),
            Operator("slice", ("p",), "f", turned, flip),
            Operator("cast", ("f",), "n", made),
            Operator("cumsum", ("n",), "s", made, attrs),
            Operator("multiply", ("s", "c"), "m", made),
            Operator("permute", ("m",), "y", T((9, 11, 6), "int32"), make_attrs(axes=(2, 1, 0))),
        ],
        {"x": given, "c": T((9,), "int32")},
        [],
    )
    check(stage, machine, fresh_seed())


def test_what_stays_the_first_part_is_not_touched_by_what_follows() -> None:
    """Infinities and NaN reach only the sums from their place on; -0 stays -0."""
    chosen = runnable("x86-64-v3")
    stage = sums((4, 29), 1)
    x = np.random.default_rng(fresh_seed()).standard_normal((4, 29)).astype(np.float32)
    x[0, 13], x[1, 4], x[1, 20], x[2, 28] = np.nan, np.inf, -np.inf, np.inf
    x[3, :5] = -0.0
    sketch = scan.match(stage, chosen)
    assert sketch is not None
    got = build(sketch, first_config(sketch), chosen)(x)
    with np.errstate(invalid="ignore"):  # infinities are compared apart
        assert_close(got, reference(stage, [x]))
    assert np.signbit(got[3, :5]).all()


def test_rounding_is_less_than_that_of_adding_one_by_one() -> None:
    """In the mean of rows: in a single one, adding one by one may be lucky."""
    chosen = runnable("x86-64-v3")
    stage = sums((32, 20000), 1)
    x = np.random.default_rng(fresh_seed()).random((32, 20000)).astype(np.float32)
    sketch = scan.match(stage, chosen)
    assert sketch is not None
    wanted = np.cumsum(x.astype(np.float64), 1)
    found = (build(sketch, first_config(sketch), chosen)(x), np.cumsum(x, 1, dtype=np.float32))
    ours, one_by_one = (np.abs(sums - wanted).max(1).mean() for sums in found)
    assert ours < one_by_one


@pytest.mark.parametrize(("exclusive", "reverse"), [(False, True), (True, False)])
def test_the_fallback_computes_them_too(exclusive: bool, reverse: bool) -> None:
    """It does so for other dtypes, and on GPUs."""
    chosen = runnable("x86-64-v3")
    for dtype, tolerance in (("float16", 4e-3), ("float32", 1e-5)):
        stage = sums((3, 7, 2), 1, exclusive, reverse, dtype)
        sketch = fallback.match(stage, chosen)
        assert sketch is not None
        arrays = random_inputs(stage, fresh_seed())
        got = build(sketch, first_config(sketch), chosen)(*arrays)
        assert_close(got, reference(stage, arrays), tolerance)


@pytest.mark.parametrize(
    "stage", [sums((3, 4), 1, dtype="float16"), sums((3, 1), 1), sums((0, 4), 1)], ids=str
)
def test_what_it_leaves_to_the_fallback(stage: Stage) -> None:
    chosen = runnable("x86-64-v3")
    assert scan.match(stage, chosen) is None
    assert [s.name for s in sketches(stage, chosen)] == ["fallback"]
