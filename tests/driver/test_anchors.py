"""The sizes at which a library of hundreds has its configs chosen, and what the others take."""

from __future__ import annotations

from itertools import product as pairs
from math import exp, hypot, log

import numpy as np
import pytest

from gtco.driver.sizes.anchors import ANCHORS, anchors
from gtco.driver.sizes.forms import Forms
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.space import check
from tests.driver.test_forms import MACHINE, image, product
from tests.kernels import fresh_seed


def test_anchors_lie_in_all_corners() -> None:
    steps = range(32, 1281, 32)
    sizes = [{"height": height, "width": width} for height, width in pairs(steps, steps)]
    found = [tuple(sizes[number].values()) for number in anchors(sizes)]
    assert len({*found}) == ANCHORS
    assert {*found} >= {*pairs((32, 1280), (32, 1280))}
    for one in sizes:  # no size is farther from all of them than by a factor of 3
        places = [zip(one.values(), anchor, strict=True) for anchor in found]
        assert min(hypot(*(log(a / b) for a, b in place)) for place in places) < log(3)


def test_few_sizes_are_all_anchors() -> None:
    assert anchors([{"width": n} for n in range(1, ANCHORS + 1)]) == [*range(ANCHORS)]


@pytest.mark.parametrize(
    ("made", "known"),
    [(product, (16, 64, 256, 1024)), (image, (8, 12, 16, 24, 32, 48, 64))],
)
def test_sizes_between_take_what_the_anchors_have(made, known) -> None:  # type: ignore[no-untyped-def]
    """Their own configs, with the cuts that are closest, and nearly as fast as the best."""
    policy, forms = AnalyticPolicy(MACHINE), Forms()
    for size in known:
        best = policy.choose(made(size))
        assert best is not None
        forms.add(made(size), best.config)
    forms.settled = True
    drawn = np.random.default_rng(fresh_seed()).integers(known[0] + 1, known[-1], 20)
    ratios = []
    for size in {*map(int, drawn)} - {*known}:
        near, best = forms.near(policy, made(size)), policy.choose(made(size))
        assert best is not None and 1 <= len(near) <= len(known)
        assert [p.seconds for p in near] == sorted(p.seconds for p in near)
        for pick in near:
            assert check(pick.sketch, pick.config) is None
            assert pick.seconds == policy.price(pick.sketch, pick.config)
        ratios.append(near[0].seconds / best.seconds)
    # over all sizes the mean is 1.02 at most, and the worst 1.15
    assert exp(sum(map(log, ratios)) / len(ratios)) < 1.1


def test_of_another_kind_nothing_is_known() -> None:
    policy, forms = AnalyticPolicy(MACHINE), Forms()
    best = policy.choose(product(64))
    assert best is not None
    forms.add(product(64), best.config)
    forms.settled = True
    assert forms.near(policy, product(96))
    assert not forms.near(policy, product(96, 128))
    assert forms.predict(policy, product(96, 128)) == policy.predict(product(96, 128))
