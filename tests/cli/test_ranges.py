"""``--dim batch=1..8``: what compile, run, inspect, report and bench do with a range."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import gtco.compiler  # noqa: F401 (before the fixtures, so that compiles share their workers)
from gtco import cli
from tests.cli.test_several_shapes import said
from tests.end_to_end.sizes.test_variants import batched, named
from tests.golden.test_plan import TOKENS, WIDTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has ``tiny.onnx`` and ``tiny.so``, which was compiled for batches of 1 to 8."""
    folder = tmp_path_factory.mktemp("tiny")
    onnx.save(batched(), folder / "tiny.onnx")
    argv = f"compile {folder}/tiny.onnx -o {folder}/tiny.so --dim batch=1..8@8 --tune off --verify"
    assert cli.main([*argv.split(), "--threads", "2"]) == 0
    return folder


def test_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = folder / "tiny.so"
    np.save(folder / "3.npy", np.ones((3, TOKENS, WIDTH), np.float32))
    np.save(folder / "9.npy", np.ones((9, TOKENS, WIDTH), np.float32))
    assert f"tokens float32 3x{TOKENS}x" in said(f"run {library} --input x={folder}/3.npy", capsys)
    assert f"tokens float32 7x{TOKENS}x" in said(f"run {library} --dim batch=7", capsys)
    assert "runs batch of 1..8: choose its size: --dim batch=SIZE" in said(
        f"run {library}", capsys, 1
    )
    assert "is 9, and this library was compiled for batch of 1 to 8" in said(
        f"run {library} --input x={folder}/9.npy", capsys, 1
    )
    assert "was compiled for batch=1..8; compile it again with a range" in said(
        f"run {library} --dim batch=9", capsys, 1
    )
    assert "takes one size" in said(f"run {library} --dim batch=1..4", capsys, 1)
    assert "no dimension 'rows' of several sizes: it has 'batch', of 1..8" in said(
        f"run {library} --dim rows=4", capsys, 1
    )


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = folder / "tiny.so"
    text = said(f"inspect {library} --no-profile", capsys)
    assert "batch of 1 to 8 runs as the cheapest sum of these" in text
    assert f"inputs: x: float32[batch, {TOKENS}, {WIDTH}]" in text
    assert f"pooled: float32[batch, {WIDTH}]" in text
    seen = json.loads(said(f"inspect {library} --no-profile --json", capsys))
    assert seen["range"]["symbol"] == "batch" and seen["range"]["high"] == 8
    assert list(seen["variants"])[-1] == "batch=8"
    one = json.loads(said(f"inspect {library} --no-profile --json --dim batch=7", capsys))
    assert one["sizes"] == {"batch": 7} and one["inputs"][0]["shape"] == [7, TOKENS, WIDTH]
    parts = [v["sizes"]["batch"] for v in seen["variants"].values()]
    assert len(one["stages"]) >= len(seen["variants"]["batch=8"]["stages"])
    assert parts == seen["range"]["sizes"]


def test_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(f"report {folder}/tiny.so -o {folder}/tiny.html", capsys)
    assert "batch=8" in (folder / "tiny.html").read_text()


def test_bench_prepares_one_size(folder: Path, tmp_path: Path) -> None:
    from gtco.bench.harness.workload import prepare
    from gtco.support.errors import OptionError

    work = prepare(str(folder / "tiny.so"), tmp_path, 1, {"batch": 5})
    with np.load(work.inputs) as file:
        assert file["x"].shape == (5, TOKENS, WIDTH)
    with pytest.raises(OptionError, match=r"choose one with --dim batch=SIZE"):
        prepare(str(folder / "tiny.so"), tmp_path, 1, {})


def test_a_range_that_a_compile_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"compile {folder}/tiny.onnx -o {folder}/no.so --tune off"
    assert "is given one size (--shape, shapes) and a range" in said(
        f"{model} --dim batch=1..8 --shape batch=1", capsys, 1
    )


def test_bench_dynamic(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gtco.bench.models import dynamic

    argv = f"{folder}/tiny.onnx --dim batch=1..8 --at batch=3 --rounds 1 --threads 1"
    found = tmp_path / "found.json"
    assert dynamic.main([*argv.split(), "--peers", "onnxruntime", "--json", str(found)]) == 0
    assert "static / open" in " ".join(capsys.readouterr().out.split())
    (report,) = json.loads(found.read_text())["models"]
    assert [s["system"] for s in report["rows"][0]["systems"]] == ["open", "static", "onnxruntime"]
    assert all(s["rounds_s"] and not s["disagrees"] for s in report["rows"][0]["systems"])


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of batches of 1 to 3, each with 5 or 6 tokens."""
    folder = tmp_path_factory.mktemp("lists")
    onnx.save(named(batched(), x_1="tokens", tokens_1="tokens"), folder / "tiny.onnx")
    argv = f"compile {folder}/tiny.onnx -o {folder}/tiny.so --tune off --threads 1 --no-simplify"
    assert cli.main([*argv.split(), "--dim", "batch=1..3", "--dim", "tokens=5,6"]) == 0
    return folder / "tiny.so"


def test_run_of_a_range_and_a_list(lists: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens in (6, 7):
        np.save(lists.with_name(f"{tokens}.npy"), np.ones((2, tokens, WIDTH), np.float32))
    given = f"run {lists} --input x={lists.parent}"
    assert f"tokens float32 2x6x{WIDTH}" in said(f"{given}/6.npy", capsys)
    assert "'tokens' (axis 1) is 7, and this library was compiled for tokens of 5, 6" in said(
        f"{given}/7.npy", capsys, 1
    )
    assert f"3x5x{WIDTH}" in said(f"run {lists} --dim batch=3 --dim tokens=5", capsys)
    assert "choose its size: --dim batch=SIZE --dim tokens=5|6" in said(f"run {lists}", capsys, 1)
    assert f"tokens float32 2x6x{WIDTH}" in said(f"{given}/6.npy --dim tokens=6", capsys)
    assert "2 of them: choose the size of each dimension: --dim tokens=5|6" in said(
        f"run {lists} --dim batch=3", capsys, 1
    )


def test_inspect_of_a_range_and_a_list(lists: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(f"inspect {lists} --no-profile", capsys)
    assert "batch of 1 to 3 runs as the cheapest sum of these that have its tokens" in text
    assert "--dim batch=1 --dim tokens=5 shows the stages of one size" in text
    assert f"inputs: x: float32[batch, tokens, {WIDTH}]" in text
    seen = json.loads(said(f"inspect {lists} --no-profile --json", capsys))
    parts = [(one["sizes"]["tokens"], one["sizes"]["batch"]) for one in seen["variants"].values()]
    assert [batch for _, batch in parts] == seen["range"]["sizes"]
    assert sorted(parts) == parts and {tokens for tokens, _ in parts} == {5, 6}
    one = json.loads(
        said(f"inspect {lists} --no-profile --json --dim tokens=6 --dim batch=3", capsys)
    )
    assert one["inputs"][0]["shape"] == [3, 6, WIDTH]
    assert "give batch=1..3" in said(f"inspect {lists} --no-profile --dim tokens=6", capsys, 1)


def test_bench_of_a_range_and_a_list(lists: Path, tmp_path: Path) -> None:
    from gtco.bench.harness.workload import prepare
    from gtco.support.errors import OptionError

    work = prepare(str(lists), tmp_path, 1, {"batch": 2, "tokens": 6})
    with np.load(work.inputs) as file:
        assert file["x"].shape == (2, 6, WIDTH)
    with pytest.raises(OptionError, match=r"choose one with --dim batch=SIZE --dim tokens=5\|6"):
        prepare(str(lists), tmp_path, 1, {})
