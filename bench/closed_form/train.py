"""Coefficients for this machine, from prices and readings.

Every third product of each class is held apart: by these the way of fitting is chosen and judged.
The coefficients that are written come from all products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.coefficients import Trained, text
from gtco.search.closed_form.form import ClassForm
from gtco.search.closed_form.policy import facts_of
from gtco.search.closed_form.products import Product
from gtco.tensor.space import Config, check

from ..harness.readings import PRODUCTS
from ..harness.readings import load as readings_of
from .correction import Correction, Measured, corrected
from .examples import Example, blank, examples, sketch_of, walked
from .fit import fit, through_forest
from .shapes import KINDS, name_of, named, training

OTHER_CORES = 8  # one product in so many is also priced for half and for twice the cores
POOL = 8  # products are drawn for one that is taken of each class
APART = 3
Say = Callable[[str], None]
PRODUCT_NAMES = {f"product {m}x{k}x{n}": Product(KINDS[0], 1, m, n, k) for m, k, n in PRODUCTS}


def train(
    options: argparse.Namespace, policy_for: Callable[[int], AnalyticPolicy], say: Say
) -> int:
    """The step ``train``: writes the file of coefficients."""
    classes: dict[str, ClassForm] = {}
    by_price: dict[str, ClassForm] = {}
    policy = policy_for(options.threads)
    read = measured_of(options.readings, policy)
    for kind in KINDS:
        count = options.count if kind.endswith("weights") else options.count // 2
        found = list(every_example(kind, count, options.threads, policy_for, options.seed))
        correction = Correction(read.get(kind, []), options.seed)
        read_configs = sum(len(one.seconds) for one in read.get(kind, []))
        said = [f"  corrected by {name}: {part:.0%}" for name, part in correction.importance()[:6]]
        say("\n".join([f"{kind}: {len(found)} products, {read_configs} readings", *said]))
        for name in sorted({one.product.operator_class for one in found}):
            own = [one for one in found if one.product.operator_class == name]
            classes[name], lines = learned(own, correction, policy_for)
            say("\n".join([f"{name}: {len(own)} products", *lines]))
            if options.by_price:
                by_price[name], lines = learned(own, Correction([]), policy_for)
                say("\n".join([f"{name}, by price alone", *lines]))
    for file, forms in ((options.out, classes), (options.by_price, by_price)):
        if file is not None:
            file.write_text(text((Trained(policy.target.mcpu, options.about, forms),)))
    say(f"{options.out}: {options.out.stat().st_size} bytes")
    return 0


def every_example(
    kind: str, count: int, threads: int, policy_for: Callable[[int], AnalyticPolicy], seed: int
) -> Iterator[Example]:
    """The examples of a kind for ``threads`` cores, and some for half and twice as many: ``count``
    products of few rows and as many of more.
    """
    for cores in dict.fromkeys((threads, max(1, threads // 2), 2 * threads)):
        n = count if cores == threads else count // OTHER_CORES
        drawn = training(kind, POOL * n, seed + cores - threads)
        few = [product for product in drawn if product.operator_class != kind]
        more = [product for product in drawn if product.operator_class == kind]
        yield from examples([*few[:n], *more[:n]], policy_for(cores))


def learned(
    found: Sequence[Example],
    correction: Correction,
    policy_for: Callable[[int], AnalyticPolicy],
) -> tuple[ClassForm, list[str]]:
    """The polynomials of a class, and how good each way of fitting is on products held apart."""
    known = corrected(found, correction)
    order = np.random.default_rng(0).permutation(len(known))
    apart = [known[n] for n in order[::APART]]
    rest = [known[n] for n in order if n not in set(order[::APART].tolist())]
    ways: Mapping[str, Callable[[Sequence[Example]], ClassForm]] = {
        "towards the law": fit,
        "through a forest": through_forest,
    }
    lines, means = [], {}
    for name, way in ways.items():
        share = shares(way(rest), apart, correction, policy_for)
        means[name] = float(np.exp(np.log(share).mean()))
        lines.append(f"  {name}: {means[name]:.3f} of the teacher's best, worst {share.min():.3f}")
    best = max(means, key=means.__getitem__)
    return ways[best](known), [*lines, f"  kept: {best}"]


def shares(
    form: ClassForm,
    judged: Sequence[Example],
    correction: Correction,
    policy_for: Callable[[int], AnalyticPolicy],
) -> np.ndarray:
    """The teacher's least seconds of each product over those of the closed form's config."""
    policies: dict[int, AnalyticPolicy] = {}
    found = []
    for one in judged:
        policy = policies.setdefault(one.machine.cores, policy_for(one.machine.cores))
        config = form.choose(one.product, one.sketch, one.machine)
        seen = walked(form, one.product, one.sketch, one.machine, config)
        assert seen is not None, "the closed form chose what its own rules exclude"
        factor = float(correction.factor(seen[0][None])[0])
        found.append(one.best / (policy.price(one.sketch, config) * factor))
    return np.array(found)


def measured_of(files: Sequence[Path], policy: AnalyticPolicy) -> Mapping[str, list[Measured]]:
    """The measured products of files of readings, by class. Files of other machines are ignored,
    and so are configs that the space no longer contains or that the rules exclude.
    """
    found: dict[str, list[Measured]] = {}
    for file in files:
        readings = readings_of(file)
        if readings.table.target.mcpu != policy.target.mcpu:
            continue
        for name, seconds in readings.seconds.items():
            product = PRODUCT_NAMES.get(name)
            if product is None and name.partition(" ")[0] not in ("convolution", "attention"):
                product = named(name)
            if product is None:
                continue
            one = _measured(product, seconds, policy)
            if one is not None:
                found.setdefault(product.kind, []).append(one)
    return found


def _measured(
    product: Product, seconds: Mapping[Config, float], policy: AnalyticPolicy
) -> Measured | None:
    sketch, machine, form = sketch_of(product, policy), facts_of(policy), blank()
    assert sketch is not None and machine is not None, name_of(product)
    terms, prices, times = [], [], []
    for config, one in seconds.items():
        if config.sketch != sketch.name or check(sketch, config) is not None:
            continue
        seen = walked(form, product, sketch, machine, config)
        if seen is not None:
            terms.append(seen[0])
            prices.append(policy.price(sketch, config))
            times.append(one)
    if len(times) < 3:
        return None
    return Measured(np.array(terms), np.array(prices), np.array(times))
