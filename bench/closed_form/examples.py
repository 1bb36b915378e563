"""What the polynomials are fitted to: for each product the configs that cost little (DyGen, Section
III-A3: "the top-K performing configurations of each operator shape").

The teacher is the analytic price of the policy's own candidates, because a price takes 50 us and a
reading a second. Candidates that differ from the best ones in a decision that the analytic policy
does not vary (the order of loops, what is prefetched) stand beside them, for what was measured to
decide about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.form import ClassForm, DecisionForm, Machine, Walk
from gtco.search.closed_form.policy import facts_of
from gtco.search.closed_form.products import Product, feature_names
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Decision, Sketch, check

from .shapes import stage_of

SKETCH = "gemm"
NEAR = 1.12  # times the least price: what is worth keeping
MOST = 300  # configs of a product
VARIED = 12  # of the best configs, with each other order and prefetching
# The decisions of products on CPUs in their order, with the words of those that have words and the
# axis that some cut.
DECISIONS: Mapping[str, tuple[int, tuple[str, ...], str]] = {
    "tile": (2, (), ""),
    "chunks_m": (1, (), "m"),
    "chunks_n": (1, (), "n"),
    "a": (2, ("direct", "packed"), ""),
    "b": (2, ("direct", "packed"), ""),
    "kc": (1, (), ""),
    "order": (2, ("panels", "rows"), ""),
    "mc": (1, (), ""),
    "prefetch": (3, ("next", "none", "both"), ""),
}


def blank() -> ClassForm:
    """Polynomials that are 0 everywhere."""
    found, before = [], len(feature_names())
    for name, (coordinates, words, axis) in DECISIONS.items():
        found.append(DecisionForm(name, np.zeros((coordinates, before)), words, axis))
        before += coordinates
    return ClassForm(SKETCH, tuple(found))


@dataclass(frozen=True)
class Rows:
    """Configs of a product that the rules admit.

    - ``terms``: [configs, terms], what the polynomials would see and should give;
    - ``open``: [configs, decisions], True where the space offered more than one option;
    - ``cost``: seconds over the least seconds of the product.
    """

    configs: tuple[Config, ...]
    terms: np.ndarray
    open: np.ndarray
    cost: np.ndarray


@dataclass(frozen=True)
class Example:
    """A product with its configs. ``best`` is its least price in seconds."""

    product: Product
    machine: Machine
    sketch: Sketch
    best: float
    rows: Rows


def sketch_of(product: Product, policy: AnalyticPolicy) -> Sketch | None:
    """The product's sketch of :data:`DECISIONS`; None if it has none."""
    sketches = space_of(stage_of(product), policy.target).sketches
    return next((sketch for sketch in sketches if sketch.name == SKETCH), None)


def examples(products: Iterable[Product], policy: AnalyticPolicy) -> Iterator[Example]:
    """The examples of these products, by price alone. Products that have other sketches, or all of
    whose good configs the rules exclude, are left out.
    """
    for product in products:
        found = example(product, policy)
        if found is not None:
            yield found


def example(product: Product, policy: AnalyticPolicy) -> Example | None:
    sketch, machine = sketch_of(product, policy), facts_of(policy)
    if sketch is None or machine is None:
        return None
    configs, seconds = policy.compared(sketch)
    policy._shared.clear()  # candidates of hundreds of products would fill the memory
    order = np.argsort(seconds, kind="stable")
    best = float(seconds[order[0]])
    near = [int(n) for n in order if seconds[n] <= NEAR * best]
    if len(near) > MOST:
        near = near[: MOST // 2] + Random(0).sample(near[MOST // 2 :], MOST - MOST // 2)
    cost = {configs[n]: float(seconds[n]) / best for n in near}
    for config in list(cost)[:VARIED]:
        for other in varied(sketch, config):
            cost.setdefault(other, policy.price(sketch, other) / best)
    rows = rows_of(product, sketch, machine, cost)
    return Example(product, machine, sketch, best, rows) if len(rows.configs) else None


def varied(sketch: Sketch, config: Config) -> Iterator[Config]:
    """The configs that differ from this one in order or prefetching alone."""
    for name in ("order", "prefetch"):
        for word in DECISIONS[name][1]:
            choices = tuple((n, word if n == name else c) for n, c in config.choices)
            other = Config(config.sketch, choices)
            if other != config and check(sketch, other) is None:
                yield other


def rows_of(
    product: Product, sketch: Sketch, machine: Machine, cost: Mapping[Config, float]
) -> Rows:
    """What the polynomials would see of configs, without those that the rules exclude."""
    form = blank()
    kept, terms, opened, costs = [], [], [], []
    for config, one in cost.items():
        seen = walked(form, product, sketch, machine, config)
        if seen is not None:
            kept.append(config)
            terms.append(seen[0])
            opened.append(seen[1])
            costs.append(one)
    return Rows(tuple(kept), np.array(terms), np.array(opened), np.array(costs))


def walked(
    form: ClassForm, product: Product, sketch: Sketch, machine: Machine, config: Config
) -> tuple[np.ndarray, list[bool]] | None:
    """The terms and the open decisions of a config; None if a rule excludes one of its options."""
    walk = Walk(form, product, machine)
    opened = dict.fromkeys(DECISIONS, False)
    for name, option in config.choices:
        decision: Decision | None = sketch.next_decision(walk.chosen)
        assert decision is not None and decision.name == name
        if not walk.admitted(decision)[decision.options.index(option)]:
            return None
        opened[name] = len(decision.options) > 1
        walk.take(decision, option)
    return walk.terms, list(opened.values())


def repriced(one: Example, factor: np.ndarray) -> Example:
    """The example with each cost times a factor, relative to the least one again."""
    cost = one.rows.cost * factor
    least = float(cost.min())
    return replace(one, best=one.best * least, rows=replace(one.rows, cost=cost / least))
