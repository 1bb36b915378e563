"""The closed form: every config is in the space, in constant time and always the same."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from bench.closed_form import examples, fit, shapes
from gtco.machine.target import TARGETS, target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.coefficients import SHIPPED, load
from gtco.search.closed_form.form import balanced, cut, fast
from gtco.search.closed_form.policy import ClosedFormPolicy, facts_of
from gtco.search.closed_form.products import Product, feature_names, features, product_of
from gtco.tensor.space import check
from gtco.tensor.stage import Operator, TensorType, make_stage
from tests.tuning.small import linear

MACHINES = ("znver4", "x86-64-v3", "x86-64-v4", "sapphirerapids")
PRIMES = (1, 2, 3, 7, 13, 31, 97, 197, 499, 1009, 4099)


def policy_of(name: str, cores: int) -> AnalyticPolicy:
    from dataclasses import replace

    return AnalyticPolicy(replace(target(name), cores=cores))


def drawn(random: Random) -> Product:
    """Any class, sizes of 1 and primes among them."""
    kind = random.choice(shapes.KINDS)

    def size() -> int:
        return random.choice(PRIMES) if random.random() < 0.5 else round(2 ** random.uniform(0, 13))

    batch = 1 if kind.endswith("weights") else random.choice((1, 1, 2, 5, 12))
    return Product(kind, batch, size(), size(), size())


@pytest.mark.parametrize("name", [m for m in MACHINES if m in TARGETS])
def test_every_prediction_is_in_the_space(name: str) -> None:
    random = Random(name)
    trained = load(SHIPPED)[0]
    for _ in range(60):
        product = drawn(random)
        policy = policy_of(name, random.choice((1, 2, 3, 8, 64)))
        sketch, machine = examples.sketch_of(product, policy), facts_of(policy)
        if sketch is None:  # a machine without rows for this class
            continue
        assert machine is not None
        config = trained.classes[product.operator_class].choose(product, sketch, machine)
        assert check(sketch, config) is None, (product, config)
        again = trained.classes[product.operator_class].choose(product, sketch, machine)
        assert again == config


def test_a_product_is_read_from_its_stage() -> None:
    assert product_of(linear(197, 192, 768)) == Product("float32 weights", 1, 197, 768, 192)
    open_ = TensorType(("batch", 64)), TensorType((64, 8)), TensorType(("batch", 8))
    multiply = Operator("matmul", ("x", "w"), "y", open_[2])
    assert product_of(make_stage([multiply], {"x": open_[0], "w": open_[1]}, ["w"])) is None
    for name in ("bfloat16 weights 1x7x9x11", "float32 3x5x6x7"):
        assert product_of(shapes.stage_of(shapes.named(name))) == shapes.named(name)


def test_terms_are_those_that_are_named() -> None:
    terms = dict(zip(feature_names(), features((2, 4, 8, 16, 32)), strict=True))
    assert terms["1"] == 1 and terms["log batch"] == 1 and terms["log cores"] == 5
    assert terms["n"] == 8 / 4096 and terms["log m log k"] == 2 * 4 and terms["log n log n"] == 9


def test_chunks_that_leave_a_core_idle_are_out() -> None:
    """25 panels for two cores: with 5 chunks one core works on 15 of them, with 4 on 14."""
    options = (1, 2, 4, 5, 9, 25)
    kept = [o for o, good in zip(options, balanced(options, 25, 1, 2), strict=True) if good]
    assert kept == [2, 25]
    # if columns can be cut too, one chunk is as good as any other number of equal ones
    assert balanced((1, 5), 25, 1, 2, left=8) == [True, True]
    assert balanced((1, 2, 4), 13, 1, 2, left=1) == [False, True, False]


def test_a_tile_with_empty_lanes_is_out_unless_memory_bounds() -> None:
    machine = facts_of(policy_of("znver4", 2))
    assert machine is not None
    tall = Product("float32 weights", 1, 1000, 40, 512)
    cuts = [cut(tall, kernel, 16) for kernel in ("fma:8x3", "fma:5x4")]
    assert fast(cuts, (40 / 48, 40 / 64), machine) == [True, False]
    flat = Product("float32 weights", 1, 1, 40, 512)
    cuts = [cut(flat, kernel, 16) for kernel in ("fma:1x3", "fma:1x4")]
    assert fast(cuts, (40 / 48, 40 / 64), machine) == [True, True]


def test_rows_are_cut_into_equal_blocks() -> None:
    product = Product("float32 weights", 1, 16, 64, 64)
    assert cut(product, "fma:14x1", 16).kernel == "fma:8x1"
    assert cut(product, "fma:14x1", 16).pieces == {"m": 2, "n": 4}


@pytest.mark.parametrize("way", [fit.fit, fit.through_forest])
def test_training_recovers_a_known_law(way) -> None:
    """Targets that follow a law of the sizes: the block of k is a 64th of k times the rows."""
    if way is fit.through_forest:
        pytest.importorskip("xgboost")
    random, made = Random(0), []
    policy = policy_of("znver4", 2)
    blank = examples.blank()
    _, begin = blank.by_name["kc"]
    at, number = fit.FIRST + begin, list(examples.DECISIONS).index("kc")
    for _ in range(80):
        product = Product("float32 weights", 1, *(2 ** random.randrange(3, 12) for _ in "mnk"))
        terms = np.array([*features(product.sizes(2)), *[0.0] * 15])
        wanted = math.log2(product.k) + math.log2(product.m) - 6
        rows = np.stack([terms] * 5)
        rows[:, at] = [wanted - 2, wanted - 1, wanted, wanted + 1, wanted + 2]
        opened = np.zeros((5, len(examples.DECISIONS)), bool)
        opened[:, number] = True
        cost = np.array([1.4, 1.2, 1.0, 1.2, 1.4])
        sketch = examples.sketch_of(product, policy)
        assert sketch is not None
        found = examples.Rows((), rows, opened, cost)
        made.append(examples.Example(product, facts_of(policy), sketch, 1.0, found))
    learned, _ = way(made).by_name["kc"]
    missed = [
        abs(float(one.rows.terms[2, :at] @ learned.weights[0]) - one.rows.terms[2, at])
        for one in made
    ]
    # Options lie 1 apart: nearer than 0.5 is the right one.
    assert np.mean(missed) < (0.1 if way is fit.fit else 0.5)
    assert way is fit.through_forest or max(missed) < 0.5


def test_a_closed_form_is_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pick asks for one price and compares no candidates."""
    inner = policy_of("znver4", 2)
    monkeypatch.setattr(inner, "compared", lambda sketch: pytest.fail("it searched"))
    policy = ClosedFormPolicy(inner)
    for m in (1, 197, 4096):
        assert policy.predict(linear(m, 192, 768)) > 0
