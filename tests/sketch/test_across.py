"""Normalisation across rows, with vectors along pixels, against the reference, for 8 and 16
lanes.
"""

from __future__ import annotations

import numpy as np
import pytest

from gtco.graph.graph import Graph
from gtco.graph.rewrites.split_reductions import split_reductions
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.sketch.across import cpu as across
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


def channels_first(
    shape: tuple[int, int, int], kind: str = "layer_norm", before: str = "", behind: str = ""
) -> Stage:
    """Batch, channels, pixels, normalised over the channels in place. One operator comes before it;
    one comes after it, and also reads a tensor of the image's shape.
    """
    n, c, s = shape
    types = {"x": T(shape), "g": T((c,)), "b": T((c,)), "r": T(shape)}
    rows: list[Operator] = []

    def add(kind: str, inputs: str, output: str, made: tuple[int, ...], **attrs: object) -> str:
        rows.append(Operator(kind, tuple(inputs.split()), output, T(made), make_attrs(**attrs)))
        return output

    x = add(before, "x", "e", shape) if before else "x"
    p = add("permute", x, "p", (n, s, c), axes=(0, 2, 1))
    affine = "g b" if kind == "layer_norm" else "g"
    y = add(kind, f"{p} {affine}", "y", (n, s, c), epsilon=1e-5)
    q = add("permute", y, "q", shape, axes=(0, 2, 1))
    if behind:
        add(behind, f"{q} r", "z", shape)
    return make_stage(rows, types, ["g", "b"])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    "shape",
    [(1, 96, 147), (2, 5, 19), (1, 3, 300), (1, 200, 70), (3, 2, 16), (1, 700, 33)],
)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_sizes_that_divide_nothing(kind: str, shape: tuple[int, int, int], name: str) -> None:
    made, machine = channels_first(shape, kind), runnable(name)
    sketch = across.match(made, machine)
    assert sketch is not None
    arrays = random_inputs(made, fresh_seed())
    # Two values may be so near to their mean that they are divided by epsilon alone. Then the
    # result is the rounding of their mean, times 1 / sqrt(epsilon).
    near = 2.0**-23 * np.abs(arrays[0]).max() / 1e-5**0.5 if shape[1] == 2 else 0.0
    for built in some_kernels(sketch, machine):
        assert_close(built(*arrays, unaligned=True), reference(made, arrays), 1e-5 + near)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("before, behind", [("gelu", ""), ("", "add"), ("relu", "multiply")])
def test_operators_around_it(before: str, behind: str, name: str) -> None:
    made, machine = channels_first((2, 37, 50), before=before, behind=behind), runnable(name)
    sketch = across.match(made, machine)
    assert sketch is not None
    arrays = random_inputs(made, fresh_seed())
    for built in some_kernels(sketch, machine):
        assert_close(built(*arrays), reference(made, arrays), 1e-5)


@pytest.mark.parametrize("name", targets())
def test_a_mean_far_from_zero_and_rows_that_are_not_finite(name: str) -> None:
    """The variance is computed from distances to the mean, so only the mean's own rounding is lost:
    some units of 6e-5. NaN and infinities stay in their pixel.
    """
    made, machine = channels_first((1, 64, 40)), runnable(name)
    sketch = across.match(made, machine)
    assert sketch is not None
    built = build(sketch, first_config(sketch), machine)
    x, g, b = random_inputs(made, 3)
    wanted = reference(made, [x + np.float32(1000), g, b])
    assert_close(built(x + np.float32(1000), g, b), wanted, 5e-4)
    x[0, 7, 5], x[0, 9, 30] = np.nan, np.inf
    got, wanted = built(x, g, b), reference(made, [x, g, b])
    bad = np.isnan(wanted).any(axis=(0, 1))
    assert bad.sum() == 2 and np.isnan(got[:, :, bad]).all()
    assert_close(got[:, :, ~bad], wanted[:, :, ~bad], 1e-5)


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("channels", [40, 150, 600])
def test_a_first_channel_far_from_all_others(channels: int, name: str) -> None:
    """Blocks of channels are taken about their first one. This loses at most a factor of 64 of the
    variance's rounding, even if the first channel is the only one that differs.
    """
    made, machine = channels_first((1, channels, 70)), runnable(name)
    sketch = across.match(made, machine)
    assert sketch is not None
    x, g, b = random_inputs(made, fresh_seed())
    flat = np.full_like(x, 3.7)
    for far in (x, flat):
        far[:, 0] = 1000.0
        for built in some_kernels(sketch, machine):
            assert_close(built(far, g, b), reference(made, [far, g, b]), 5e-5)
    if sketch.in_one_pass:  # all distances of a row of one value are 0, and its mean is that value
        even = np.broadcast_to(b[:, None], x.shape)
        for built in some_kernels(sketch, machine):
            assert np.abs(built(np.full_like(x, 3.7), g, b) - even).max() <= 1e-5


def test_rows_in_one_piece_are_left_to_the_other_sketch() -> None:
    """Nothing is permuted, or the permute moves no channel, or there are too few pixels for a
    vector.
    """
    machine = runnable("x86-64-v3")
    plain = [
        Operator("layer_norm", ("x", "g", "b"), "y", T((1, 50, 8)), make_attrs(epsilon=1e-5)),
    ]
    types = {"x": T((1, 50, 8)), "g": T((8,)), "b": T((8,))}
    assert across.match(make_stage(plain, types, []), machine) is None
    swap = Operator("permute", ("w",), "x", T((2, 50, 8)), make_attrs(axes=(1, 0, 2)))
    rows = [swap, Operator("layer_norm", ("x", "g", "b"), "y", T((2, 50, 8)), plain[0].attrs)]
    moved = make_stage(rows, {**types, "w": T((50, 2, 8)), "x": T((2, 50, 8))}, [])
    assert across.match(moved, machine) is None
    assert across.match(channels_first((1, 8, 7)), machine) is None


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_an_image_is_normalised_in_one_stage(kind: str, name: str) -> None:
    """Height and width become one axis, and this sketch takes the whole stage."""
    from gtco.graph.fusion.stages import fuse

    graph = Graph(("x",), ("y",), {"x": T((2, 24, 9, 11))})
    affine = [
        graph.add_constant(np.full(24, v, np.float32))
        for v in (1.5, 0.5)[: 1 + (kind == "layer_norm")]
    ]
    last = graph.add("permute", ("x",), axes=(0, 2, 3, 1))
    norm = graph.add(kind, (last, *affine), epsilon=1e-5)
    graph.outputs = (graph.add("permute", (norm,), output="y", axes=(0, 3, 1, 2)),)
    machine = runnable(name)
    policy = AnalyticPolicy(machine)
    _, partition = fuse(
        split_reductions(graph.check(), 2), policy.predict, policy.floor, policy.possible
    )
    (stage,) = partition.stages
    pick = policy.choose(stage)
    assert pick is not None and pick.sketch.name == "across"
    arrays = random_inputs(stage, fresh_seed())
    assert_close(build(pick.sketch, pick.config, machine)(*arrays), reference(stage, arrays), 1e-5)
