"""Which configs of a product are built and timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.form import ClassForm
from gtco.search.closed_form.policy import facts_of
from gtco.search.closed_form.products import Product
from gtco.tensor.space import Config, Pick

from .examples import Example, example, sketch_of
from .fit import FIRST
from .measuring import CANDIDATE
from .shapes import name_of, stage_of

Candidates = list[tuple[str, Pick]]  # who picked it, and what
Most = Callable[[Product], int]
REGULAR = 6.0  # a config of twice the least price must lie e ** (6 ln 2) times as far to be taken


def spread(one: Example, n: int) -> list[Config]:
    """``n`` configs of little cost that differ from each other as much as they can, the cheapest
    first.
    """
    places, cost = one.rows.terms[:, FIRST:], one.rows.cost
    taken = [int(cost.argmin())]
    far = np.linalg.norm(places - places[taken[0]], axis=1)
    while len(taken) < min(n, len(cost)):
        worth = far * np.exp(-REGULAR * np.log(cost))
        best = int(worth.argmax())
        if worth[best] <= 1e-9:
            break
        taken.append(best)
        far = np.minimum(far, np.linalg.norm(places - places[best], axis=1))
    return [one.rows.configs[k] for k in taken]


def to_learn_from(
    products: Sequence[Product], policy: AnalyticPolicy, most: Most
) -> Iterator[tuple[Product, Candidates]]:
    """The policy's pick of each product, and configs that are spread over the good ones,
    ``most`` together."""
    for product in products:
        one, n = example(product, policy), most(product)
        if one is not None:
            configs = dict.fromkeys([_picked(product, policy).config, *spread(one, n)])
            picks = [Pick(one.sketch, c, policy.price(one.sketch, c)) for c in configs]
            yield product, [("", pick) for pick in picks[:n]]


def to_judge(
    products: Sequence[Product],
    policy: AnalyticPolicy,
    forms: Mapping[str, Mapping[str, ClassForm]],
    most: Most,
    known: Collection[Product] = (),
) -> Iterator[tuple[Product, Candidates]]:
    """The analytic policy's pick of each product, that of each closed form in ``forms`` (by name
    and operator class), and others: the policy's best ones, its alternatives to its own pick and to
    the first form's, and configs that are spread over the good ones, ``most`` together. Of products
    that are ``known`` only the forms' picks.
    """
    for product in products:
        if product in known:
            yield product, _of_forms(product, policy, forms)
            continue
        one, n = example(product, policy), most(product)
        if one is None:
            continue
        stage, pick = stage_of(product), _picked(product, policy)
        found = [("analytic", pick), *_of_forms(product, policy, forms)]
        taken = {p.config for _, p in found}
        others = [
            policy.best(stage, 4),
            policy.alternatives(stage, found[0][1], taken),
            policy.alternatives(stage, found[1][1], taken),
            [Pick(one.sketch, c, policy.price(one.sketch, c)) for c in spread(one, n)],
        ]
        turns = (p for turn in zip(*map(_endless, others), strict=False) for p in turn if p)
        left = {p.config: p for p in turns if p.config not in taken}
        found += [(CANDIDATE, p) for p in list(left.values())[: max(0, n - len(taken))]]
        yield product, found


def _of_forms(
    product: Product, policy: AnalyticPolicy, forms: Mapping[str, Mapping[str, ClassForm]]
) -> Candidates:
    sketch, machine = sketch_of(product, policy), facts_of(policy)
    assert sketch is not None and machine is not None
    found = []
    for name, classes in forms.items():
        config = classes[product.operator_class].choose(product, sketch, machine)
        found.append((name, Pick(sketch, config, policy.price(sketch, config))))
    return found


def _endless(picks: Sequence[Pick]) -> Iterator[Pick | None]:
    yield from picks
    for _ in range(64):
        yield None


def _picked(product: Product, policy: AnalyticPolicy) -> Pick:
    pick = policy.choose(stage_of(product))
    assert pick is not None, name_of(product)
    return pick
