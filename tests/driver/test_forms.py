"""Configs of other sizes: near the best, and only where no other micro-kernel promises more."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from gtco.driver.sizes.forms import Forms, form_of
from gtco.machine.target import TARGETS
from gtco.search.analytic import AnalyticPolicy
from gtco.search.recorded import RecordedPolicy
from gtco.tensor.space import check
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage

MACHINE = TARGETS["x86-64-v4"]


def product(rows: int, k: int = 120, n: int = 240) -> Stage:
    shapes = {"x": (1, rows, k), "w": (k, n), "b": (n,), "y": (1, rows, n), "z": (1, rows, n)}
    types = {name: TensorType(shape) for name, shape in shapes.items()}
    ops = [
        Operator("matmul", ("x", "w"), "y", types["y"]),
        Operator("add", ("y", "b"), "z", types["z"]),
    ]
    return make_stage(ops, types, {"w", "b"})


def image(side: int, channels: int = 48) -> Stage:
    shape = TensorType((1, side, side, channels))
    types = {"x": shape, "w": TensorType((channels, channels, 3, 3)), "y": shape}
    attrs = make_attrs(
        strides=(1, 1), padding=(1, 1, 1, 1), dilation=(1, 1), groups=1, layout="NHWC"
    )
    return make_stage([Operator("conv2d", ("x", "w"), "y", shape, attrs)], types, {"w"})


@pytest.mark.parametrize(("made", "searched"), [(product, (16, 64, 256, 1024)), (image, (8, 64))])
def test_what_other_sizes_have_is_near_the_best(made, searched) -> None:  # type: ignore[no-untyped-def]
    policy, forms = AnalyticPolicy(MACHINE), Forms()
    for size in searched:
        forms.learn(policy, made(size))
    drawn = np.random.default_rng(0).integers(searched[0] + 1, searched[-1], 40)
    ratios = []
    for size in {*map(int, drawn)} - {*searched}:
        near, best = forms.near(policy, made(size)), policy.choose(made(size))
        assert best is not None
        assert [p.seconds for p in near] == sorted(p.seconds for p in near)
        for pick in near:
            assert pick.sketch.stage is made(size) or pick.sketch.stage == made(size)
            assert check(pick.sketch, pick.config) is None
            assert pick.seconds == policy.price(pick.sketch, pick.config) >= best.seconds
        ratios.append(near[0].seconds / best.seconds)
    assert exp(sum(map(log, ratios)) / len(ratios)) < 1.03
    assert max(ratios) < 1.1


def test_few_rows_are_looked_at_in_full() -> None:
    """A micro-kernel of many rows multiplies nothing but padding there."""
    policy, forms = AnalyticPolicy(MACHINE), Forms()
    forms.learn(policy, product(640))
    assert forms.near(policy, product(320))
    near, best = forms.near(policy, product(1)), policy.choose(product(1))
    assert best is not None and form_of(best.config) not in forms.of(product(1))
    assert near[0].config == best.config
    assert forms.predict(policy, product(1)) == best.seconds


def test_filtering_has_known_micro_kernels_beside_its_best() -> None:
    """The best one depends on the size; the weights of a known one are there already."""
    policy, forms = AnalyticPolicy(MACHINE), Forms()
    forms.learn(policy, image(64, 128))
    (known,) = (one.by_name["tile"] for one in forms.of(image(64, 128)))
    beside = 0
    for side in {*range(16, 128, 8)} - {64}:
        tiles = [p.config.by_name["tile"] for p in forms.near(policy, image(side, 128))]
        best = policy.choose(image(side, 128))
        assert best is not None and tiles[0] == best.config.by_name["tile"]
        beside += known in tiles and tiles[0] != known
    assert beside >= 3


def test_what_is_chosen_stands() -> None:
    """Neither a stage that has its config nor one of another kind is taken from elsewhere."""
    policy, forms = AnalyticPolicy(MACHINE), Forms()
    forms.learn(policy, product(64))
    assert not forms.near(policy, product(64)) and not forms.near(policy, product(64, 128))
    assert forms.near(RecordedPolicy(policy), product(96))
