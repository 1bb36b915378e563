"""gtco run, inspect and the harness's gtco worker on a real library that is built by hand, without
the compiler.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.harness.rounds import Contender, compare
from gtco import cli
from gtco.runtime.writing.linking import write_artifact
from gtco.search.calibration.peak import Peak
from tests.runtime.test_models import check, example_inputs, kernels, small_artifact


@pytest.fixture(scope="module")
def library(kernels, tmp_path_factory):
    """The small model with the description that the compiler gives each stage."""
    artifact = small_artifact(kernels)
    steps = tuple(
        replace(
            step,
            info={
                "name": f"stage {n}",
                "operators": ["multiply"],
                "inputs": ["float32[4x8]"],
                "output": "float32[4]",
                "flops": 1000,
                "bytes": 4096,
                "schedule": {"tile": n},
                "predicted_seconds": 1e-6,
            },
        )
        for n, step in enumerate(artifact.steps)
    )
    return write_artifact(
        replace(artifact, steps=steps), tmp_path_factory.mktemp("cli") / "small.so"
    )


@pytest.fixture
def files(tmp_path):
    inputs = dict(zip(("x", "mask"), example_inputs(3), strict=True))
    for name, value in inputs.items():
        np.save(tmp_path / f"{name}.npy", value)
    return inputs


def test_run_gives_the_models_outputs(library, files, tmp_path, capsys):
    argv = [
        "run",
        str(library),
        "--output",
        str(tmp_path / "out"),
        "--repeat",
        "3",
        "--threads",
        "1",
    ]
    for name in files:
        argv += ["--input", f"{name}={tmp_path / name}.npy"]
    assert cli.main(argv) == 0
    outputs = [np.load(tmp_path / "out" / f"{name}.npy") for name in ("y", "total")]
    check(outputs, *files.values())
    assert "3 calls: median" in capsys.readouterr().out


def test_a_wrong_shape_and_a_stranger_are_errors_with_exit_1(library, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((1, 1), np.float32))
    assert cli.main(["run", str(library), "--input", f"x={tmp_path / 'x.npy'}"]) == 1
    assert "shape (1, 1)" in capsys.readouterr().err
    (tmp_path / "stranger.so").write_bytes(b"not a library")
    for command in ("run", "inspect"):
        assert cli.main([command, str(tmp_path / "stranger.so")]) == 1
        assert "error: " in capsys.readouterr().err
        assert cli.main([command, str(tmp_path / "absent.so")]) == 1
        assert "absent.so" in capsys.readouterr().err


def test_inspect_measures_every_stage(library, monkeypatch, capsys):
    monkeypatch.setattr(
        "gtco.cli.commands.inspect_command.measured_peak",
        lambda threads, precision: (Peak(threads, (5e8, 1e9), 0.0), None),
    )
    assert cli.main(["inspect", str(library), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [i["name"] for i in data["inputs"]] == ["x", "mask"] and data["threads"] >= 1
    assert data["stages"] and all(s["measured_seconds"] > 0 for s in data["stages"])
    assert all(
        s["share_of_peak"] == pytest.approx(1000 / s["measured_seconds"] / 1e9)
        for s in data["stages"]
    )
    assert cli.main(["inspect", str(library)]) == 0
    assert "multiply" in (out := capsys.readouterr().out) and "tile=1" in out and "%" in out


def test_the_harness_times_a_real_library(library, files, tmp_path):
    np.savez(tmp_path / "inputs.npz", **files)
    job = {
        "system": "gtco",
        "library": str(library),
        "inputs": str(tmp_path / "inputs.npz"),
        "threads": 1,
    }
    result = compare([Contender("gtco", job)], 2, warm=0.05, budget=0.01)
    assert result["gtco"].error is None and result["gtco"].disagrees is None
    first, second = result["gtco"].rounds
    assert 3 <= len(first) == len(second) <= 50 and min(*first, *second) > 0
