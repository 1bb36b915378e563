"""Products by Strassen's algorithm against float64: odd numbers of rows, several axes of rows,
prologues and epilogues, the layout of B.

Tolerance: 2e-6 x sqrt(k) of the largest magnitude, as for the plain product.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.harness.readings import load
from gtco.machine.target import TARGETS, detect
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.packing import signed_sum
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.strassen import cpu as strassen
from gtco.tensor.sketch.strassen.facts import OF_A, OF_B, OF_C
from gtco.tensor.space import Config, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.kernels import build_each, fresh_seed, reference, runnable, targets
from tests.sketch.test_contractions import check, op

T = TensorType
READINGS = sorted((Path(__file__).parents[2] / "bench" / "readings").glob("*.jsonl.gz"))


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are looked at too."""
    monkeypatch.setattr(strassen, "LEAST", (1, 1, 1))


def product(rows: tuple[int, ...], k: int, n: int, dressed: bool = True) -> Stage:
    """silu -> product by a constant -> + bias -> gelu -> + residual, or the product alone."""
    x, w, y = T((*rows, k)), T((k, n)), T((*rows, n))
    types = {"x": x, "w": w, "bias": T((n,)), "rest": y}
    made: list[Operator] = []
    if dressed:
        made.append(op("silu", ("x",), "s", x))
    made.append(op("matmul", ("s" if dressed else "x", "w"), "y", y))
    if dressed:
        made.append(op("add", ("y", "bias"), "b", y))
        made.append(op("gelu", ("b",), "g", y))
        made.append(op("add", ("g", "rest"), "z", y))
    used = {x for one in made for x in one.inputs}
    given = {name: type_ for name, type_ in types.items() if name in used}
    return make_stage(made, given, ["w", "bias"] if dressed else ["w"])


# rows, k, n: multiples of the 32 that two vectors have, which two halves of k and n must be
CASES = [
    ((1, 2), 32, 32),
    ((1, 3), 32, 64),
    ((1, 29), 64, 96),
    ((5, 7), 96, 160),  # each sample has a row that is alone
    ((3, 10), 32, 64),
    ((2, 3, 11), 32, 192),
    ((1, 64), 160, 32),
    ((9, 1), 64, 32),
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", CASES)
def test_against_float64(case: tuple, name: str) -> None:
    check(product(*case), name, 4, strassen.match)


@pytest.mark.parametrize("name", targets())
def test_every_config_of_a_product(name: str) -> None:
    check(product((1, 13), 32, 64, dressed=False), name, None, strassen.match)


def test_drawn_products() -> None:
    random = Random(fresh_seed())
    for _ in range(6):
        rows = random.randint(1, 5), random.randint(1, 40)
        k, n = 32 * random.randint(1, 9), 32 * random.randint(1, 9)
        check(product(rows, k, n, random.random() < 0.5), "x86-64-v3", 1, strassen.match)


def test_seven_products_are_the_product() -> None:
    """The factors alone, with whole numbers."""
    rng = np.random.default_rng(fresh_seed())
    a, b = rng.integers(-9, 9, (2, 2, 2)).astype(float)
    left = [signed_sum(row, [*a.flat]) for row in OF_A]
    right = [signed_sum(row, [*b.flat]) for row in OF_B]
    products = [x * y for x, y in zip(left, right, strict=True)]
    assert [signed_sum(row, products) for row in OF_C] == [*(a @ b).flat]


def test_the_error_beside_that_of_the_plain_product() -> None:
    """The root mean square error is at most twice that of ``gemm``, which adds in the same way."""
    machine, rng = runnable("x86-64-v3"), np.random.default_rng(fresh_seed())
    stage = product((1, 96), 512, 128, dressed=False)
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    want, errors = reference(stage, arrays), []
    for rule in (gemm.match, strassen.match):
        sketch = rule(stage, machine)
        assert sketch is not None
        ((_, kernel),) = build_each(sketch, [next(configs(sketch))], machine)
        errors.append(np.sqrt(np.mean((kernel(*arrays) - want) ** 2)))
    assert 0 < errors[1] < 2 * errors[0]


def test_b_is_stored_as_its_sums() -> None:
    """[panels, products, k / 2, columns]."""
    sketch = strassen.match(product((1, 40), 64, 96, dressed=False), TARGETS["x86-64-v3"])
    assert sketch is not None
    b = np.random.default_rng(fresh_seed()).standard_normal((64, 96)).astype(np.float32)
    quarters = [b[i : i + 32, j : j + 48] for i in (0, 32) for j in (0, 48)]
    wanted = [signed_sum(row, quarters) for row in OF_B]
    every = {c["tile"]: c for c in configs(sketch)}
    assert len(every) > 1
    for config in every.values():
        found, columns = sketch.layouts(config)["w"].apply(b), sketch.row(config).columns
        assert found.shape == (48 // columns, 7, 32, columns)
        for p, part in enumerate(wanted):
            got = found[:, p].transpose(1, 0, 2).reshape(32, 48)
            np.testing.assert_array_equal(got, part)


def few_digits(stage: Stage) -> Stage:
    types = {name: T(t.shape, "bfloat16") for name, t in stage.types.items()}
    (matmul,) = stage.operators
    other = replace(matmul, type=T(matmul.type.shape, "float32"))
    return make_stage([other], {n: types[n] for n in matmul.inputs}, stage.constants)


@pytest.mark.parametrize(
    "stage",
    [
        product((1, 40), 64 + 16, 64, dressed=False),  # halves of k that are not whole vectors
        product((1, 40), 64, 64 + 16, dressed=False),
        few_digits(product((1, 40), 64, 64, dressed=False)),
        make_stage(
            [op("matmul", ("x", "w"), "y", T((1, 40, 64)))],
            {"x": T((1, 40, 64)), "w": T((64, 64))},
            [],
        ),
        product((40,), 64, 64, dressed=False),
        make_stage(
            [op("matmul", ("x", "w"), "y", T((3, 40, 64)))],
            {"x": T((3, 40, 64)), "w": T((3, 64, 64))},
            ["w"],
        ),
    ],
    ids=["k", "n", "bfloat16", "variable", "samples", "batches"],
)
def test_products_that_are_left_to_gemm(stage: Stage) -> None:
    assert strassen.match(stage, TARGETS["x86-64-v4"]) is None


@pytest.mark.parametrize("tokens", [10, 11])
def test_samples_do_not_depend_on_each_other(tokens: int) -> None:
    """One sample is NaN, and the others are bit for bit as without it."""
    machine = runnable("x86-64-v3")
    sketch = strassen.match(product((3, tokens), 64, 64), machine)
    assert sketch is not None
    rng = np.random.default_rng(fresh_seed())
    inputs = sketch.stage.inputs
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in inputs]
    bad = [np.array(x) for x in arrays]
    bad[0][1] = np.nan
    chosen = Random(fresh_seed()).sample([*configs(sketch)], 3)
    for _, kernel in build_each(sketch, chosen, machine):
        got, wanted = kernel(*bad), kernel(*arrays)
        assert np.isnan(got[1]).all()
        for sample in (0, 2):
            assert got[sample].tobytes() == wanted[sample].tobytes()


@pytest.mark.parametrize("file", READINGS, ids=lambda file: file.name.partition(".")[0])
def test_large_products_are_picked(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """By the tables of the machines that were met: the first MLP product of DINOv2-S at 518x518,
    and not that of 64 tokens. Not on Intel servers, whose L3 gives a core a sixth of a Zen 4's:
    there the larger weights cost more than the eighth of the products (read on a Granite Rapids).
    """
    monkeypatch.undo()
    table = load(file).table
    policy = AnalyticPolicy(replace(table.target, cores=2), table)
    large, small = (product((1, m), 384, 1536, dressed=False) for m in (1370, 64))
    pick = policy.choose(large)
    assert pick is not None
    assert pick.sketch.name == ("gemm" if "rapids" in file.name else "strassen")
    assert "strassen" not in {s.name for s in space_of(small, policy.target).sketches}


def test_a_task_reads_and_writes_within_its_arrays() -> None:
    """An odd number of rows, whose last pair has one: memory behind the arrays is inaccessible."""
    machine = detect()
    sketch = strassen.match(product((3, 11), 32, 64), machine)
    assert sketch is not None
    rng = np.random.default_rng(fresh_seed())
    stage = sketch.stage
    arrays = [rng.standard_normal(tuple(i.type.shape), dtype=np.float32) for i in stage.inputs]
    chosen: list[Config] = [c for c in configs(sketch) if c["prefetch"] == "next"][:4]
    for _, kernel in build_each(sketch, chosen, machine):
        kernel(*arrays, unaligned=True)
