"""``python -m bench convolutions`` and ``gemm``: a kernel that is fast and wrong is no record."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import single
from bench.kernels import convolutions, gemm
from bench.kernels.convolutions import Conv, Product, gtco_run


@pytest.mark.parametrize("module", [convolutions, gemm])
@pytest.mark.parametrize("off", [0.0, 0.3])
def test_outputs_are_compared(
    module: Any,
    off: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*given: Any) -> Any:
        stages, output = gtco_run(*given)
        output.flat[0] += off * abs(output).max()
        return stages, output

    cases = {
        convolutions: {"conv": Conv((6, 8), 4, 16, 3), "row": Product(2, 1, 8, 16)},
        gemm: {"dense": gemm.Dense(4, 8, 16)},
    }
    monkeypatch.setattr(single, "SECONDS", 0.0)
    monkeypatch.setattr(module, "CASES", cases[module])
    monkeypatch.setattr(module, "gtco_run", run)
    monkeypatch.setattr(module, "machine_peak", lambda *_: SimpleNamespace(flops=1e11))
    file = tmp_path / "found.json"
    status = module.main(["--precision", "fp32", "--threads", "1", "--json", str(file)])
    assert status == (1 if off else 0)
    assert capsys.readouterr().out.count("DIFFERS") == (len(cases[module]) if off else 0)
    assert json.loads(file.read_text())["cases"].keys() == cases[module].keys()
