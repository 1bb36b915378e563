"""Quantized operators through the compiler, many in one library, against ONNX Runtime; and the
integer products that they become.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gtco
from gtco import cli
from tests.frontend.quantized.draws import DRAWS
from tests.frontend.quantized.nodes import OPSET, Case, Drawing, compare, model_of, wanted
from tests.kernels import fresh_seed


def drawn(names: list[str], count: int, seed: int) -> list[tuple[Case, np.ndarray]]:
    """Cases that ONNX Runtime has kernels for, with its results."""
    found = []
    for name in names:
        for number in range(count):
            case = DRAWS[name](Drawing(np.random.default_rng([seed, number, len(found)])))
            try:
                want = wanted(case)
            except Exception as error:
                assert "NOT_IMPLEMENTED" in str(error)
                continue
            if case.opset == OPSET:
                found.append((case, want))
    return found


@pytest.mark.parametrize("target", ["native", "x86-64-v3"])
def test_many_operators_in_one_library(target: str) -> None:
    """Once with instructions for products of bytes, if the machine has them, and once without."""
    seed = fresh_seed()
    cases = drawn(list(DRAWS), 3, seed)
    assert len(cases) > len(DRAWS)
    prefixes = [f"n{place}_" for place in range(len(cases))]
    model = model_of([case for case, _ in cases], prefixes)
    compiled = gtco.compile_model(model, target=target, tune="off", strict=True)
    feeds = {
        prefix + name: value
        for prefix, (case, _) in zip(prefixes, cases, strict=True)
        for name, value in case.inputs.items()
    }
    results = compiled(*feeds.values())
    apart, total = 0, 0
    for (case, want), got in zip(cases, results, strict=True):
        differ, size = compare(case, got, want, f"{case.op}, seed {seed}")
        apart, total = apart + differ, total + size
    assert apart <= 1e-3 * total + 2


@pytest.mark.parametrize("target", ["cascadelake", "sapphirerapids", "skylake-avx512"])
@pytest.mark.parametrize("name", ["qlinear_matmul", "qlinear_conv"])
def test_what_inspect_shows_of_products(
    name: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products of bytes on targets with VNNI. Nothing is run, so the machine may be any."""
    case = taken(name)
    library = tmp_path / "model.so"
    gtco.compile_to_file(model_of([case]), library, target=target, tune="off", strict=True)
    assert cli.main(["inspect", str(library), "--no-profile"]) == 0
    shown = capsys.readouterr().out
    assert ("vnni" in shown) == (target != "skylake-avx512"), shown


def taken(name: str) -> Case:
    """A case with weights of int8, in one group if it is a convolution."""
    for seed in range(1000):
        case = DRAWS[name](Drawing(np.random.default_rng(seed)))
        weights = case.constants.get("b", case.constants.get("w"))
        if weights is None or weights.dtype != np.int8 or case.attrs.get("group", 1) != 1:
            continue
        if min(weights.shape[:2]) > 3:
            zero = "bz" if "b" in case.constants else "wz"
            case.constants[zero] = np.zeros_like(case.constants[zero])
            return case
    pytest.fail("none is drawn")
