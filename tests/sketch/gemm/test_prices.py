"""The price of a product sees how its operands and its output lie in memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gtco.graph.infer import infer_type
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.stage import make_stage
from tests.kernels import fresh_seed, runnable
from tests.sketch.gemm.test_gemm import T, op


def test_stores_to_a_line_for_each_element_are_priced() -> None:
    """Drawn permutations of a product: the price has stores for each element if columns of the
    product lie far apart in the output, and rows not side by side.
    """
    print(f"seed {(seed := fresh_seed())}")
    rng, machine, seen = random.Random(seed), runnable("x86-64-v3"), set()
    for axes in [
        (2, 1, 0),
        (0, 2, 1),
        (1, 0, 2),
        *(tuple(rng.sample(range(3), 3)) for _ in "12345678"),
    ]:
        b, m, n = (rng.choice((2, 5, 16, 40)) for _ in range(3)) if seen else (40, 5, 16)
        shape = tuple((b, m, n)[a] for a in axes)
        stage = make_stage(
            [
                op("matmul", ("x", "w"), "c", (b, m, n)),
                op("permute", ("c",), "d", shape, axes=axes),
            ],
            {"x": T((b, m, 8)), "w": T((b, 8, n))},
            ["w"],
        )
        places = np.arange(b * m * n).reshape(shape).transpose(np.argsort(axes))
        rows, columns = (np.abs(np.diff(places, axis=a)).max() for a in (1, 2))
        sketch = gemm.match(stage, machine)
        assert sketch is not None
        priced = sum(e.amount * e.units for e in sketch.behind if e.kernel == "store")
        alone = rows > 1 and columns >= 16
        assert priced == (gemm.SCATTERED * b * m * n if alone else 0)
        seen.add(priced > 0)
    assert seen == {True, False}


@pytest.mark.parametrize("kind", ["conv_transpose2d", "conv2d"])
def test_packing_channels_that_lie_apart_is_priced_by_element(kind: str) -> None:
    """Channels of an image that is read through a permutation lie a whole plane apart. Those of a
    convolution may be read along columns instead, but not if its filter is one column wide.
    """
    w = (16, 16, 4, 1)
    attrs: dict[str, object] = {"padding": (1, 0, 1, 0), "groups": 1, "layout": "NHWC"}
    if kind == "conv2d":
        attrs |= {"strides": (2, 1), "dilation": (1, 1)}
    else:
        attrs |= {"strides": (2, 1), "output_padding": (0, 0)}
    images = {"x": T((1, 8, 8, 16)), "w": T(w)}
    given = infer_type(kind, (images["x"], images["w"]), attrs)
    alone = make_stage([op(kind, ("x", "w"), "y", given.shape, **attrs)], images, ["w"])
    behind = make_stage(
        [
            op("permute", ("n",), "x", (1, 8, 8, 16), axes=(0, 2, 3, 1)),
            op(kind, ("x", "w"), "y", given.shape, **attrs),
        ],
        {"n": T((1, 16, 8, 8)), "w": T(w)},
        ["w"],
    )
    machine = runnable("x86-64-v3")
    near, far = (gemm.match(stage, machine) for stage in (alone, behind))
    assert near is not None and far is not None
    assert near.packing_vectors < far.packing_vectors
    if kind == "conv_transpose2d":  # start a run, load and store, for each element of k
        assert far.packing_vectors == 5.0 * far.view.k


def test_packing_tokens_whose_channels_come_first_is_priced_by_element() -> None:
    """Tokens of an image [channels, pixels], and heads that are joined, whose channels are runs."""

    def packing(image: tuple[int, ...], split: tuple[int, ...], axes: tuple[int, ...]) -> float:
        moved = tuple(split[a] for a in axes)
        stage = make_stage(
            [
                op("reshape", ("n",), "s", split),
                op("permute", ("s",), "p", moved, axes=axes),
                op("reshape", ("p",), "x", (20, 32)),
                op("matmul", ("x", "w"), "y", (20, 24)),
            ],
            {"n": T(image), "w": T((32, 24))},
            ["w"],
        )
        sketch = gemm.match(stage, runnable("x86-64-v3"))
        assert sketch is not None
        return sketch.packing_vectors

    assert packing((32, 4, 5), (32, 20), (1, 0)) == 2.0 * 32
    assert packing((2, 20, 16), (2, 20, 16), (1, 0, 2)) == 2.0 * 32 / 8
