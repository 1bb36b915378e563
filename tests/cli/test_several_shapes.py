"""``--dim``: what compile, run, inspect and bench do with a library of several shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import gtco.compiler  # before the fixtures, so that compiles share their workers
from gtco import cli
from gtco.cli.arguments import one_size_each
from gtco.runtime.library import read_metadata
from gtco.support.sizes import Range, names_of
from tests.end_to_end.sizes.test_variants import batched, convolution
from tests.golden.test_plan import TOKENS, WIDTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has ``tiny.onnx`` and ``tiny.so``, which was compiled for three batches."""
    folder = tmp_path_factory.mktemp("tiny")
    onnx.save(batched(), folder / "tiny.onnx")
    argv = f"compile {folder}/tiny.onnx -o {folder}/tiny.so --dim batch=1,4,16 --tune off --verify"
    assert cli.main([*argv.split(), "--threads", "2", "--dump", str(folder / "dump")]) == 0
    return folder


def said(argv: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli.main(argv.split()) == code
    captured = capsys.readouterr()
    return " ".join((captured.err if code else captured.out).split())


def test_compile_shows_every_variant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"compile {folder}/tiny.onnx -o {folder}/again.so --dim batch=2,3 --tune off --verify"
    assert cli.main(argv.split()) == 0
    captured = capsys.readouterr()
    for batch in (2, 3):
        assert f"batch={batch}: 1 input," in captured.err  # the line of the phase
        assert f"batch={batch}: agrees with ONNX Runtime" in captured.err
        assert f"batch={batch}:" in captured.out
    assert "2 variants" in captured.err and "variants     2" in captured.out
    assert sorted(path.name for path in (folder / "dump").iterdir()) == [
        *("batch=1", "batch=16", "batch=4"),
    ]
    assert (folder / "dump/batch=4/5-stages.txt").exists()


def test_a_dimension_may_have_several_names_and_a_name_may_have_commas() -> None:
    """Each name of an input and an axis gets the size. Names of the model's file are one name."""
    assert one_size_each([("x.0,y.0", [4]), ("h", Range(3, 3))]) == {"x.0": 4, "y.0": 4, "h": 3}
    assert one_size_each([("a,b", [4])]) == {"a,b": 4}
    assert names_of("x.0,y.1") == ["x.0", "y.1"]
    assert names_of("a,b") == ["a,b"] and names_of("x.0,b") == ["x.0,b"]


def test_dim_alone_lists_the_dimensions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(convolution(), tmp_path / "c.onnx")
    text = said(f"compile {tmp_path}/c.onnx --dim", capsys)
    assert "x.2 x axis 2" in text and "x.3 x axis 3" in text and "--dim x.2=1,4,16" in text
    model = convolution()
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = 16
    onnx.save(model, tmp_path / "fixed.onnx")
    text = said(f"compile {tmp_path}/fixed.onnx --dim", capsys)
    assert "every input has a size on every axis" in text
    assert "cannot read" in said(f"compile {tmp_path}/no.onnx --dim", capsys, 1)
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("batch", "is not NAME=SIZE,SIZE"),
        ("batch=", "is not NAME=SIZE,SIZE"),
        ("=1", "is not NAME=SIZE,SIZE"),
        ("batch=0,1", "is not NAME=SIZE,SIZE"),
        ("batch=1,x", "is not NAME=SIZE,SIZE"),
        ("batch=1:64", "a range is NAME=LOW..HIGH"),
        ("batch=1...64", "a range is NAME=LOW..HIGH"),
        ("batch=1..64:", "a range is NAME=LOW..HIGH"),
        ("batch=0..64", "low is a whole number of 1 or more"),
        ("batch=8..4", "the first size is larger than the last"),
        ("batch=1..64:4", "64 is off the step of 4 from 1; the last size before it is 61"),
        ("batch=1..9999999", "a size is 1048576 at most"),
        ("batch=1..8@9", "9, behind the @, is not a size of the range"),
        ("batch=1..8@1,2,3,4,5", "4 sizes at most"),
    ],
)
def test_wrong_lists(text: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["compile", "m.onnx", "--dim", text])
    assert exit.value.code == 2
    assert what in " ".join(capsys.readouterr().err.split())


def test_lists_that_a_compile_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"compile {folder}/tiny.onnx -o {folder}/no.so --tune off"
    many = ",".join(map(str, range(1, 4098)))
    assert "at most 4096" in said(f"{model} --dim batch={many}", capsys, 1)
    assert "named 'rows'" in said(f"{model} --dim rows=1,2", capsys, 1)
    assert "and a list" in said(f"{model} --dim batch=1,2 --shape batch=1", capsys, 1)
    persistent = "--target cuda:sm_80 --launches persistent"
    assert "the steps of one shape" in said(f"{model} --dim batch=1,2 {persistent}", capsys, 1)
    with pytest.raises(SystemExit):
        cli.main([*model.split(), "--dim", "batch=1,2", "--dim", "batch=3"])
    assert "lists the dimensions" in said(f"tune {folder}/tiny.onnx --dim", capsys, 1)


def test_run_takes_the_variant_of_the_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = folder / "tiny.so"
    for batch in (4, 1, 3):
        np.save(folder / f"{batch}.npy", np.ones((batch, TOKENS, WIDTH), np.float32))
    text = said(f"run {library} --input x={folder}/4.npy", capsys)
    assert f"tokens float32 4x{TOKENS}x{WIDTH}" in text
    text = said(f"run {library} --dim batch=16 --repeat 2", capsys)
    assert f"16x{TOKENS}x{WIDTH}" in text and "2 calls: median" in text
    text = said(f"run {library}", capsys, 1)
    assert "compiled for 3 shapes" in text and "--dim batch=1|4|16" in text
    text = said(f"run {library} --input x={folder}/3.npy", capsys, 1)
    assert "'batch' (axis 0) is 3" in text and "of 1, 4, 16" in text
    text = said(f"run {library} --dim batch=4 --input x={folder}/1.npy", capsys, 1)
    assert "has shape (1, 5, 16), expected (4, 5, 16)" in text
    text = said(f"run {library} --dim batch=3", capsys, 1)
    assert "batch=3:" in text and "was compiled for batch=1,4,16" in text
    assert "takes one size" in said(f"run {library} --dim batch=1,4", capsys, 1)


def test_inspect_shows_the_variants_or_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = folder / "tiny.so"
    text = said(f"inspect {library} --no-profile", capsys)
    assert "tiny.so: 3 variants" in text and "--dim batch=1 shows the stages" in text
    assert all(f"batch={batch} 3 " in text for batch in (1, 4, 16))
    text = said(f"inspect {library} --no-profile --dim batch=16", capsys)
    assert "(batch=16): 3 stages" in text and f"16x{TOKENS}x{WIDTH}" in text
    seen = json.loads(said(f"inspect {library} --no-profile --json", capsys))
    assert list(seen["variants"]) == ["batch=1", "batch=4", "batch=16"]
    one = seen["variants"]["batch=4"]
    assert one["sizes"] == {"batch": 4} and one["inputs"][0]["shape"] == [4, TOKENS, WIDTH]
    assert len(one["stages"]) == 3 and one["metadata"]["weights_bytes"] > 0
    assert "variants" not in one["metadata"]
    alone = json.loads(said(f"inspect {library} --no-profile --json --dim batch=4", capsys))
    assert alone == one
    assert "was compiled for batch=1,4,16" in said(f"inspect {library} --dim batch=2", capsys, 1)
    assert "here give a size" in said(f"inspect {library} --dim", capsys, 1)


def test_inspect_measures_each(
    folder: Path, capsys: pytest.CaptureFixture[str], peak: None
) -> None:
    seen = json.loads(said(f"inspect {folder}/tiny.so --json", capsys))
    for one in seen["variants"].values():
        assert all(stage["measured_seconds"] > 0 for stage in one["stages"])


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's peak is not measured here."""
    from gtco.cli.commands import inspect_command

    monkeypatch.setattr(inspect_command, "measured_peak", lambda threads, precision: (None, "no"))


def test_bench_prepares_one_size(folder: Path, tmp_path: Path) -> None:
    from gtco.bench.harness.workload import prepare
    from gtco.support.errors import OptionError

    work = prepare(str(folder / "tiny.so"), tmp_path, 1, {"batch": 4})
    with np.load(work.inputs) as file:
        assert file["x"].shape == (4, TOKENS, WIDTH)
    steps = read_metadata(folder / "tiny.so")["variants"][1]["steps"]
    assert work.flops == sum(step["flops"] for step in steps)
    with pytest.raises(OptionError, match=r"several shapes: choose one with --dim batch=1\|4\|16"):
        prepare(str(folder / "tiny.so"), tmp_path, 1, {})
    work = prepare(
        str(folder / "tiny.onnx"), tmp_path, 1, {"batch": 16}, library=folder / "tiny.so"
    )
    with np.load(work.inputs) as file:
        assert file["x"].shape == (16, TOKENS, WIDTH)


def test_bench_takes_dim(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--dim`` and ``--shape`` both give sizes there, for gtco and its peers."""
    from gtco.bench.harness import suite

    asked: list[object] = []

    def run(*given: object) -> None:
        shapes = given[5]
        asked.append(shapes)
        raise gtco.GtcoError("enough")

    monkeypatch.setattr(suite, "run_model", run)
    argv = f"bench {folder}/tiny.onnx --library {folder}/tiny.so --dim batch=4 --peers onnxruntime"
    assert "enough" in said(argv, capsys, 1)
    assert asked == [{"batch": 4}]
    assert "both give 'batch' a size" in said(f"{argv} --shape batch=4", capsys, 1)
