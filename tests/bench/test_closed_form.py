"""``python -m bench closed_form``: products by name, what is learned from, and the table."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.closed_form import (
    candidates,
    closed_form,
    correction,
    evaluate,
    examples,
    measuring,
    shapes,
    speed,
    train,
)
from bench.harness.readings import append
from bench.harness.readings import load as load_readings
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.coefficients import SHIPPED, load
from gtco.search.closed_form.policy import facts_of
from gtco.search.closed_form.products import Product
from gtco.support.errors import OptionError


def policy() -> AnalyticPolicy:
    return AnalyticPolicy(replace(target("znver4"), cores=2))


def test_products_have_names() -> None:
    product = Product("bfloat16 weights", 1, 7, 8, 9)
    assert shapes.name_of(product) == "bfloat16 weights 1x7x8x9"
    assert shapes.named("bfloat16 weights 1x7x8x9") == product
    for wrong in ("7x8x9", "float32 weights 7x8x9", "float64 1x7x8x9", "float32 1x0x8x9"):
        with pytest.raises(OptionError, match="is not a product"):
            shapes.named(wrong)


def test_what_judges_is_not_learned_from() -> None:
    judged = {(p.m, p.n, p.k) for p in shapes.deepbench()}
    assert len(judged) == 166
    for kind in shapes.KINDS:
        drawn = shapes.training(kind, 300)
        assert drawn == shapes.training(kind, 300) and len(drawn) == 300
        assert not judged & {(p.m, p.n, p.k) for p in drawn}
    held = shapes.held_out(shapes.KINDS[0], 2, 8e9, 1e9)
    assert len(held) > 30 and all(shapes.flops(p) <= 8e9 for p in held)


def test_candidates_have_roles_and_differ() -> None:
    product = Product("float32 weights", 1, 33, 70, 64)
    forms = {"closed form": load(SHIPPED)[0].classes}
    ((same, found),) = candidates.to_judge([product], policy(), forms, lambda p: 9)
    assert same == product and [role for role, _ in found[:2]] == ["analytic", "closed form"]
    configs = [pick.config for _, pick in found]
    assert len(set(configs[2:])) == len(configs) - 2 <= 7
    assert not set(configs[2:]) & set(configs[:2])
    ((_, learned),) = candidates.to_learn_from([product], policy(), lambda p: 6)
    assert 4 <= len({pick.config for _, pick in learned}) == len(learned) <= 6
    assert learned[0][1].config == configs[0]


def test_a_correction_learns_what_the_price_misses() -> None:
    """Every measured config that packs A takes 1.5 times its price."""
    pytest.importorskip("xgboost")
    small = [p for p in shapes.training("float32 weights", 200) if shapes.flops(p) < 1e7][:12]
    found = list(examples.examples(small, policy()))
    packed = examples.blank().by_name["a"][1] + len(examples.feature_names()) + 1
    measured = [
        correction.Measured(r.terms, r.cost, r.cost * (1 + 0.5 * r.terms[:, packed]))
        for r in (one.rows for one in found)
    ]
    learned = correction.Correction(measured)
    # Each product's ratios are relative to its median.
    for one in found:
        factor = learned.factor(one.rows.terms)
        both = [factor[one.rows.terms[:, packed] == place] for place in (0, 1)]
        if all(map(len, both)):
            assert 1.2 < np.median(both[1]) / np.median(both[0]) < 1.8
    assert learned.importance()[0][0].startswith("a ")
    corrected = correction.corrected(found, learned)
    assert all(one.rows.cost.min() == 1 for one in corrected)
    none = correction.Correction(measured[:0])
    assert not none.importance() and (none.factor(found[0].rows.terms) == 1).all()


def test_the_table_has_every_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "r.gz", tmp_path / "rows.json"
    config = {"sketch": "gemm"}
    append(file, {"about": "a machine", "table": {}})
    for name, roles in (("2x512x512", ["analytic", "closed form", "candidate"]), ("90x8x8", None)):
        line = {
            "stage": f"float32 weights 1x{name}",
            "standing": 2e-4,
            "ratios": [[config, 1.0], [config, 0.8], [config, 0.5]],
            "onednn": [3e-4, 5e-4],
        }
        append(file, {**line, "roles": roles} if roles else line)
    assert evaluate.evaluate([file], out, print) == 0
    said = capsys.readouterr().out
    assert "float32 weights: 1 products" in said and "closed form / best 0.625" in said
    assert "analytic / best 0.500" in said and "oneDNN / closed form 2.50 (1 of 1 ahead)" in said
    (row,) = json.loads(out.read_text())
    assert row["best"] == pytest.approx(1e-4) and row["onednn"] == pytest.approx(4e-4)
    empty = tmp_path / "empty.gz"
    append(empty, {"about": "a machine", "table": {}})
    with pytest.raises(OptionError, match="build --judge"):
        evaluate.evaluate([empty], None, print)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c_predicts_what_python_does(tmp_path: Path, dtype: str) -> None:
    here, kind = policy(), f"{dtype} weights"
    forms = load(SHIPPED)[0].classes
    inside, machine = speed.Predictor(tmp_path, here, forms, dtype), facts_of(here)
    assert machine is not None
    random, apart = Random(dtype), []
    for _ in range(150):
        sizes = [random.choice((1, 2, 3, 13, 97, 197)) for _ in "mnk"]
        drawn = [round(2 ** random.uniform(0, 12)) for _ in "mnk"]
        product = Product(kind, 1, *random.choice((sizes, drawn)))
        sketch = examples.sketch_of(product, here)
        assert sketch is not None
        config = forms[product.operator_class].choose(product, sketch, machine)
        if inside.config(product) != config:
            apart.append((product, config, inside.config(product)))
    # two options may lie equally far to the last bit
    assert len(apart) <= 2, apart[0]


def test_what_is_built_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SECONDS", 0.0)
    monkeypatch.setattr(measuring, "QUIET", inf)  # other tests may run beside this one
    folder, file = str(tmp_path / "built"), tmp_path / "r.gz"
    build = ["build", folder, "--count", "1", "--flops", "3e6", "--candidates", "8"]
    for _ in range(2):
        assert closed_form.main([*build, "--threads", "2"]) == 0
        assert closed_form.main(["time", folder, "--out", str(file), "--threads", "2"]) == 0
    ((name, seconds),) = load_readings(file).seconds.items()
    assert len(seconds) == 8 and min(seconds.values()) > 0
    product = shapes.named(name)
    read = train.measured_of([file], closed_form.policy_here(2))
    (one,) = read[product.kind]  # the rules exclude some of what this machine's prices propose
    assert len(one.seconds) >= 3 and {*one.seconds} <= {*seconds.values()}
