"""Element-wise and data-movement stages against the reference, for 8 lanes and 16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest

from gtco.machine.target import target
from gtco.tensor import space
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.space import Program, configs
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


def op(
    kind: str,
    inputs: str,
    output: str,
    shape: Sequence[int],
    dtype: str = "float32",
    **attrs: object,
) -> Operator:
    return Operator(
        kind, tuple(inputs.split()), output, TensorType(tuple(shape), dtype), make_attrs(**attrs)
    )


def stage(operators: list[Operator], **shapes: Sequence[int]) -> Stage:
    return make_stage(operators, {k: TensorType(tuple(v)) for k, v in shapes.items()}, [])


def bias_gelu() -> Stage:
    return stage(
        [op("add", "x b", "s", (197, 100)), op("gelu", "s", "y", (197, 100))],
        x=(197, 100),
        b=(100,),
    )


def heads() -> Stage:
    """[197, 192] -> [3, 197, 64], which splits the heads of attention."""
    return stage(
        [
            op("reshape", "x", "r", (197, 3, 64)),
            op("permute", "r", "y", (3, 197, 64), axes=(1, 0, 2)),
        ],
        x=(197, 192),
    )


def windows() -> Stage:
    """Swin: a roll, then windows of 7 x 7."""
    return stage(
        [
            op("roll", "x", "a", (1, 14, 14, 24), shifts=(0, -3, -3, 0)),
            op("reshape", "a", "b", (2, 7, 2, 7, 24)),
            op("permute", "b", "y", (2, 2, 7, 7, 24), axes=(0, 2, 1, 3, 4)),
        ],
        x=(1, 14, 14, 24),
    )


def concat_last() -> Stage:
    return stage([op("concat", "a b c", "y", (5, 40), axis=1)], a=(5, 3), b=(5, 20), c=(5, 17))


def concat_first() -> Stage:
    return stage(
        [op("concat", "a b", "s", (1, 197, 33), axis=1), op("add", "s p", "y", (1, 197, 33))],
        a=(1, 1, 33),
        b=(1, 196, 33),
        p=(1, 197, 33),
    )


def pad_all() -> Stage:
    return stage(
        [op("pad", "x", "y", (2, 9, 12, 23), before=(0, 1, 2, 3), after=(0, 1, 3, 1), value=1.5)],
        x=(2, 7, 7, 19),
    )


PADDED = {"before": (0, 2), "after": (0, 4), "value": 0.0}


def merged_heads() -> Stage:
    """[3, 197, 64] -> [197, 192]: neighbours of a row lie together in pieces of 64."""
    return stage(
        [
            op("permute", "x", "p", (197, 3, 64), axes=(1, 0, 2)),
            op("reshape", "p", "r", (197, 192)),
            op("add", "r b", "y", (197, 192)),
        ],
        x=(3, 197, 64),
        b=(192,),
    )


def flattened_heads() -> Stage:
    """The whole tensor as one run, in which no axis keeps its place."""
    return stage([op("reshape", "x", "y", (5, 12 * 49))], x=(5, 12, 49))


def cut_groups() -> Stage:
    """DaViT's groups of channels, merged again into one run. Tasks cut it inside groups."""
    return stage([op("reshape", "x", "y", (32, 64, 96))], x=(2048, 3, 32))


def odd_pieces() -> Stage:
    """Windows of 7 x 7, merged again in pieces of 7 * 3 positions, with a rest in every vector."""
    return stage(
        [
            op("reshape", "x", "a", (2, 2, 7, 7, 3)),
            op("permute", "a", "b", (2, 7, 2, 7, 3), axes=(0, 2, 1, 3, 4)),
            op("reshape", "b", "y", (14, 42)),
        ],
        x=(4, 49, 3),
    )


@pytest.mark.parametrize(("made", "length"), [(merged_heads, 64), (odd_pieces, 21)])
def test_rows_that_lie_in_pieces(made: Callable[[], Stage], length: int) -> None:
    """They are copied by vectors and priced so: no lane is gathered, and no block is turned."""
    sketch = elementwise.match(made(), target("x86-64-v4"))
    assert sketch is not None
    assert sketch.grid.regular and sketch.grid.length == length
    assert sketch.gathers == 0 and sketch.blocks is None


@pytest.mark.parametrize("made", [merged_heads, flattened_heads, cut_groups, odd_pieces])
def test_regular_rows_have_no_address_a_lane(made: Callable[[], Stage]) -> None:
    machine = target("x86-64-v3")
    sketch = elementwise.match(made(), machine)
    assert sketch is not None and sketch.grid.regular
    program = space.build(sketch, first_config(sketch), "k")
    assert isinstance(program, Program)
    assert "Broadcast" not in str(program.function.script()), "a division of every lane's position"


@pytest.mark.parametrize("kind", ["divide", "multiply", "power", "mod", "log", "rsqrt", "sigmoid"])
def test_padding_is_computed_with_as_ieee_says(kind: str) -> None:
    """x / 0 and inf * 0; the 0 is padding, a constant that TVM would fold."""
    two = kind in ("divide", "multiply", "power", "mod")
    built = stage(
        [
            op("pad", "x", "p", (3, 40), **PADDED),
            op(kind, "z p" if two else "p", "y", (3, 40)),
        ],
        **({"z": (3, 40)} if two else {}),
        x=(3, 34),
    )
    machine = runnable("x86-64-v3")
    sketch = elementwise.match(built, machine)
    assert sketch is not None
    z = np.tile(np.array([1, -1, 0, np.inf, -np.inf, np.nan, 2, 3], np.float32), (3, 5))
    arrays = [z if i.name == "z" else np.full((3, 34), 2, np.float32) for i in built.inputs]
    want = reference(built, arrays, precise=False)
    assert not np.isfinite(want).all() or kind == "sigmoid"
    for built in some_kernels(sketch, machine):
        got = built(*arrays)
        np.testing.assert_allclose(got, want, rtol=1e-5)


def pad_gelu() -> Stage:
    """A condition inside a row, followed by bound values."""
    return stage(
        [
            op("gelu", "x", "g", (3, 19)),
            op("pad", "g", "p", (3, 25), before=(0, 2), after=(0, 4), value=0.0),
            op("silu", "p", "y", (3, 25)),
        ],
        x=(3, 19),
    )


def transpose() -> Stage:
    return stage([op("permute", "x", "y", (64, 197), axes=(1, 0))], x=(197, 64))


def transpose_add() -> Stage:
    """Channels moved from first to last, and an operand that already has them last."""
    return stage(
        [
            op("permute", "x", "t", (1, 7, 9, 37), axes=(0, 2, 3, 1)),
            op("add", "t r", "y", (1, 7, 9, 37)),
        ],
        x=(1, 37, 7, 9),
        r=(1, 7, 9, 37),
    )


def transpose_one_block(side: int) -> Stage:
    """An input that two operators read, turned in one block: all of its places are numbers."""
    return stage(
        [
            op("relu", "x", "r", (side, side)),
            op("multiply", "r x", "m", (side, side)),
            op("permute", "m", "y", (side, side), axes=(1, 0)),
        ],
        x=(side, side),
    )


def transpose_block_of_8() -> Stage:
    return transpose_one_block(8)


def transpose_block_of_16() -> Stage:
    return transpose_one_block(16)


def roll_last() -> Stage:
    return stage([op("roll", "x", "y", (4, 50), shifts=(1, 13))], x=(4, 50))


def strided_slice() -> Stage:
    return stage([op("slice", "x", "y", (3, 12), begin=(4, 1), strides=(-2, 3))], x=(9, 40))


def patch_merging() -> Stage:
    """Swin: four strided slices side by side."""
    parts = [
        op("slice", "x", f"s{i}", (1, 4, 4, 10), begin=(0, i % 2, i // 2, 0), strides=(1, 2, 2, 1))
        for i in range(4)
    ]
    return stage([*parts, op("concat", "s0 s1 s2 s3", "y", (1, 4, 4, 40), axis=3)], x=(1, 8, 8, 10))


def long_row() -> Stage:
    return stage([op("multiply", "x a", "y", (3, 224 * 224))], x=(3, 224 * 224), a=(3, 1))


def small_axes() -> Stage:
    """Merged axes: [2, 3, 5, 7] is one run of 210."""
    return stage(
        [op("add", "a b", "s", (2, 3, 5, 7)), op("relu", "s", "y", (2, 3, 5, 7))],
        a=(2, 3, 5, 7),
        b=(2, 3, 5, 7),
    )


def scalar_operand() -> Stage:
    return stage([op("multiply", "x c", "y", (7, 11))], x=(7, 11), c=())


def middle_broadcast() -> Stage:
    return stage([op("add", "x b", "y", (4, 6, 9))], x=(4, 6, 9), b=(4, 1, 9))


def broadcast_to() -> Stage:
    return stage([op("broadcast", "x", "y", (5, 4, 21))], x=(4, 1))


def interleave() -> Stage:
    """Columns regrouped 5 by 5: many short runs in a row."""
    return stage(
        [
            op("reshape", "x", "r", (3, 20, 5)),
            op("permute", "r", "p", (3, 5, 20), axes=(0, 2, 1)),
            op("reshape", "p", "y", (3, 100)),
        ],
        x=(3, 100),
    )


def atan_of_gelu() -> Stage:
    """A function of libm after vector arithmetic."""
    return stage([op("gelu", "x", "g", (3, 21)), op("atan", "g", "y", (3, 21))], x=(3, 21))


def rank0() -> Stage:
    return stage([op("exp", "x", "y", ())], x=())


CASES = [
    bias_gelu,
    heads,
    merged_heads,
    flattened_heads,
    cut_groups,
    odd_pieces,
    windows,
    concat_last,
    concat_first,
    pad_all,
    pad_gelu,
    transpose,
    transpose_add,
    transpose_block_of_8,
    transpose_block_of_16,
    roll_last,
    strided_slice,
    patch_merging,
    long_row,
    small_axes,
    scalar_operand,
    middle_broadcast,
    broadcast_to,
    interleave,
    atan_of_gelu,
    rank0,
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("make", CASES, ids=[c.__name__ for c in CASES])
def test_stage(make, name: str) -> None:  # type: ignore[no-untyped-def]
    machine = runnable(name)
    sketch = elementwise.match(make(), machine)
    assert sketch is not None
    inputs = random_inputs(sketch.stage, fresh_seed())
    wanted = reference(sketch.stage, inputs)
    for built in some_kernels(sketch, machine):
        assert_close(built(*inputs, unaligned=True), wanted, 1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int32", "int8", "uint8", "bool"])
def test_movement_of_other_dtypes(dtype: str) -> None:
    machine = runnable("x86-64-v3")
    s = make_stage(
        [
            op("permute", "x", "p", (5, 3, 11), dtype, axes=(1, 0, 2)),
            op("concat", "p c", "y", (5, 4, 11), dtype, axis=1),
        ],
        {"x": TensorType((3, 5, 11), dtype), "c": TensorType((5, 1, 11), dtype)},
        [],
    )
    sketch = elementwise.match(s, machine)
    assert sketch is not None
    inputs = random_inputs(s, fresh_seed())
    np.testing.assert_array_equal(
        build(sketch, next(iter(configs(sketch))), machine)(*inputs),
        reference(s, inputs, precise=False),
    )


def test_mask_from_integers() -> None:
    machine = runnable("x86-64-v3")
    s = make_stage(
        [op("less", "i n", "m", (6, 21), "bool"), op("where", "m x z", "y", (6, 21))],
        {
            "i": TensorType((21,), "int64"),
            "n": TensorType((6, 1), "int64"),
            "x": TensorType((6, 21)),
            "z": TensorType(()),
        },
        [],
    )
    sketch = elementwise.match(s, machine)
    assert sketch is not None
    inputs = random_inputs(s, fresh_seed())
    np.testing.assert_array_equal(
        build(sketch, next(iter(configs(sketch))), machine)(*inputs),
        reference(s, inputs, precise=False),
    )


def concat_alike(parts: int) -> Stage:
    """Swin's patch merging: parts of the same width, each from its own place."""
    names = [f"s{k}" for k in range(parts)]
    slices = [
        op("slice", "x", name, (3, 24), begin=(k, 0), strides=(2, 1))
        for k, name in enumerate(names)
    ]
    joined = op("concat", " ".join(names), "y", (3, 24 * parts), axis=1)
    return stage([*slices, joined], x=(9, 24))


@pytest.mark.parametrize("name", targets())
def test_parts_of_one_width_are_vectors(name: str) -> None:
    machine = runnable(name)
    made = concat_alike(4)
    sketch = elementwise.match(made, machine)
    assert isinstance(sketch, elementwise.Elementwise)
    assert [(s.begin, s.length, s.smooth) for s in sketch.segments] == [
        (24 * k, 24, True) for k in range(4)
    ]
    inputs = random_inputs(made, fresh_seed())
    for built in some_kernels(sketch, machine):
        got = built(*inputs, unaligned=True)
        np.testing.assert_array_equal(got, reference(made, inputs, precise=False))


def test_rows_stay_one_run_where_they_can() -> None:
    machine = target("x86-64-v4")
    sketch = elementwise.Elementwise(small_axes(), machine)
    assert (sketch.grid.outer, prod(sketch.grid.inner), len(sketch.segments)) == ((), 210, 1)
    sketch = elementwise.Elementwise(concat_last(), machine)
    assert [(s.begin, s.length, s.smooth) for s in sketch.segments] == [
        (0, 3, True),
        (3, 20, True),
        (23, 17, True),
    ]
    assert elementwise.Elementwise(long_row(), machine).grid.units >= 2 * machine.cores


def test_not_its_business() -> None:
    machine = target("x86-64-v4")
    assert (
        elementwise.match(stage([op("softmax", "x", "y", (3, 4), axis=1)], x=(3, 4)), machine)
        is None
    )
    symbolic = make_stage(
        [Operator("relu", ("x",), "y", TensorType(("n", 4)))], {"x": TensorType(("n", 4))}, []
    )
    assert elementwise.match(symbolic, machine) is None
