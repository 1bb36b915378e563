"""gtco quantize, and gtco compile --precision int8, from files to files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import gtco
from gtco import cli
from tests.quantization.models import block, evaluate, images


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and its samples, as the current one."""
    onnx.save(block(), tmp_path / "vit.onnx")
    np.savez(tmp_path / "images.npz", image=images())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_quantized_and_compiled(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quantized file compiles, and compiling with the samples gives the same library. An output
    that a budget keeps is as near as it says.
    """
    argv = "quantize vit.onnx --data images.npz --report r.json --exclude wo --all".split()
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "vit.int8.onnx (" in out and "7 of 10 products in int8" in out
    assert "float32: excluded" in out and "float32: reads the input" in out
    for phase in ("read", "build", "observe", "ranges", "sensitivity", "verdict"):
        assert f"  {phase}" in err
    found = json.loads((here / "r.json").read_text())
    assert found["version"] == 1 and found["exclude"] == ["wo"] and found["held_out"] == 12
    assert cli.main("compile vit.int8.onnx --shape N=1 --tune off -o one.so".split()) == 0
    argv = "compile vit.onnx --shape N=1 --tune off --precision int8 --data images.npz -o two.so"
    assert cli.main([*argv.split(), "--exclude", "wo"]) == 0
    out, _ = capsys.readouterr()
    assert "two.so, quantized: 7 of 10 products in int8" in out
    # the library of the float model, and of what was quantized of it, are of one model
    assert cli.main([*argv.split(), "--observer", "minmax"]) == 0
    one, two = (gtco.load(here / name) for name in ("one.so", "two.so"))
    x = images(1, seed=9)
    wanted = evaluate(onnx.load(here / "vit.int8.onnx"), {"image": x})["logits"]
    np.testing.assert_allclose(one(x), wanted, atol=0.05 * np.abs(wanted).max())
    assert two.outputs == one.outputs
    assert not [p for p in here.iterdir() if p.name.startswith(".")]


def test_weights_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = "quantize vit.onnx --weights-only --exclude wo -o small.onnx".split()
    assert cli.main(argv) == 0
    capsys.readouterr()
    assert cli.main(argv) == 0  # over its own
    assert "the weights of 9 of 10 products in int8" in capsys.readouterr().out
    assert cli.main("compile small.onnx --shape N=1 --tune off --verify".split()) == 0
    made = gtco.load(here / "small.so")
    x = images(1, seed=9)
    wanted = evaluate(onnx.load(here / "vit.onnx"), {"image": x})["logits"]
    np.testing.assert_allclose(made(x), wanted, atol=0.02 * np.abs(wanted).max())


def test_weights_of_4_bits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = "quantize vit.onnx --weights-only --bits 4 --block-size 16 -o small.onnx".split()
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "the weights of 9 of 10 products in int4, and of 1 convolution in int8" in said
    graph = onnx.load(here / "small.onnx").graph
    sizes = {n.input[0]: {a.name: a.i for a in n.attribute} for n in graph.node if n.input}
    found = [(of["block_size"], w) for w, of in sizes.items() if "block_size" in of]
    kinds = {t.name: t.data_type for t in graph.initializer}
    assert len(found) == 7  # products share two of them
    assert all(size == 16 and kinds[w] == onnx.TensorProto.INT4 for size, w in found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("quantize none.onnx --data images.npz", "cannot read 'none.onnx'"),
        ("quantize vit.onnx --data none.npz", "cannot read samples from 'none.npz'"),
        ("quantize vit.onnx --data images.npz -o vit.onnx", "is the model itself"),
        ("quantize vit.onnx", "give --data images.npz, or --weights-only"),
        ("quantize vit.onnx --weights-only --data images.npz --all", "leave out --data, --all"),
        ("quantize vit.onnx --bits 4 --data images.npz", "--bits and --block-size are of"),
        ("quantize vit.onnx --weights-only --exclude nobody", "no product is called 'nobody'"),
        ("quantize vit.onnx --data images.npz -o vit.so", "must end in .onnx"),
        ("quantize vit.onnx --data images.npz -o none/q.onnx", "the folder 'none' does not exist"),
        ("quantize vit.onnx --data images.npz --exclude nobody", "no product is called 'nobody'"),
        ("compile vit.onnx --shape N=1 --precision int8 --tune off", "give data"),
        ("compile vit.onnx --precision int8 --data images.npz", "'N' of the model has no size"),
        ("compile vit.onnx --data images.npz --shape N=1", "are of precision int8"),
        (
            "compile vit.onnx --shape N=1 --precision int8 --data images.npz --target cuda:sm_80",
            "int8 is for CPUs",
        ),
        ("compile vit.onnx --shape N=1 --precision int8 --data images.npz -o q.dll", "end in .so"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    before = sorted(p.name for p in here.iterdir())
    assert cli.main(arguments.split()) == 1
    out, err = capsys.readouterr()
    assert said in err and err.startswith(("error:", "  read")) and not out
    assert "  build" not in err
    assert sorted(p.name for p in here.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        *("--max-drop 0", "--max-drop nan", "--max-drop inf", "--observer best"),
        *("--smooth 0", "--smooth 1", "--smooth 2", "--smooth much"),
    ],
)
def test_wrong_usage(here: Path, arguments: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["quantize", "vit.onnx", "--data", "images.npz", *arguments.split()])
