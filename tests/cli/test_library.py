"""gtco run and gtco inspect with a fake library: inputs, outputs, tables, errors."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gtco import cli
from gtco.cli.commands.run_command import save
from gtco.search.calibration.peak import Peak
from gtco.support.errors import BuildError, InputError
from tests.cli.stand_ins import compiler, model, peak


def test_run_uses_files_random_inputs_and_saves(model, tmp_path, capsys):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    argv = [
        "run",
        "m.so",
        "--input",
        f"x={tmp_path / 'x.npy'}",
        "--output",
        str(tmp_path / "out"),
        "--repeat",
        "5",
    ]
    assert cli.main(argv) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "y.npy"), 2 * x)
    assert model.seen[0]["ids"].dtype == np.int64 and model.seen[0]["ids"].max() < 4
    assert len(model.seen) == 1 + 1 + 5  # the run, one thrown away, five timed
    out = capsys.readouterr().out
    assert "2x3" in out and "5 calls: median" in out and "90th percentile" in out


def test_an_input_from_a_pipe(model, tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with io.BytesIO() as whole:
        np.save(whole, x)
        content = whole.getvalue()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    assert cli.main(["run", "m.so", "--input", f"x={pipe}"]) == 0
    writer.join()
    np.testing.assert_array_equal(model.seen[0]["x"], x)


def test_outputs_that_would_have_one_name(tmp_path):
    given = {"y/0": np.zeros(1), "y_0": np.ones(1), "y:0": np.full(1, 2.0)}
    save(given, tmp_path)
    found = {p.name: np.load(p)[0] for p in tmp_path.iterdir()}
    assert found == {"y_0.0.npy": 0.0, "y_0.npy": 1.0, "y_0.2.npy": 2.0}


def test_outputs_are_saved_all_or_none(model, tmp_path, monkeypatch, capsys):
    """On a full disk, the files of an earlier run stay as they are."""
    save({"a": np.zeros(1), "b": np.zeros(1)}, tmp_path / "out")
    write = np.save

    def full(path, value):
        if path.name == "b.npy":
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(BuildError, match="No space left"):
        save({"a": np.ones(1), "b": np.ones(1)}, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.npy", "b.npy"]
    assert np.load(tmp_path / "out" / "a.npy") == 0
    assert cli.main(["run", "m.so", "--output", str(tmp_path / "out" / "a.npy")]) == 1
    assert "a.npy is a file: give a folder" in capsys.readouterr().err and not model.seen


def test_a_report_replaces_nothing_that_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("m.onnx", "m.so"):
        Path(name).write_bytes(b"mine")
    for command in (
        "compile m.onnx -o v.so --report m.onnx",
        "report m.so -o m.so",
        "quantize m.onnx --data d.npz -o q.onnx --report m.onnx",
        "bench m.onnx --json m.onnx",
    ):
        assert cli.main(command.split()) == 1
        assert "is the model itself: give another name" in capsys.readouterr().err
    assert Path("m.onnx").read_bytes() == Path("m.so").read_bytes() == b"mine"


def test_a_library_in_the_place_of_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("m.so").write_bytes(b"mine")
    for command in ("compile m.so", "tune m.so"):
        assert cli.main(command.split()) == 1
        assert "'m.so' is named as a library: this command takes models" in capsys.readouterr().err
    assert Path("m.so").read_bytes() == b"mine"


def test_what_is_written_replaces_nothing_else_of_the_command(tmp_path, monkeypatch, capsys):
    """Nothing that is read, and nothing that is written beside it, also with --force."""
    monkeypatch.chdir(tmp_path)
    for name in ("m.onnx", "d.npz", "m.records"):
        Path(name).write_bytes(b"mine")
    compiled = "compile m.onnx -o v.so --force"
    quantized = "quantize m.onnx --data d.npz -o q.onnx --force"
    for command, said in (
        (f"{compiled} --report v.h", "'v.h' is the library or its header"),
        (f"{compiled} --report ./m.records --records m.records", "is the file of records"),
        (f"{compiled} --records v.so", "'v.so' is the file of records"),
        (f"{compiled} --precision int8 --data d.npz --report d.npz", "is the data itself"),
        ("tune m.onnx --report m.records --force", "is the file of records"),
        (f"{quantized} --report d.npz", "is the data itself"),
        (f"{quantized} --report q.onnx", "is the quantized model"),
    ):
        assert cli.main(command.split()) == 1
        assert f"{said}: give another name" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == dict.fromkeys(
        ("m.onnx", "d.npz", "m.records"), b"mine"
    )


def test_random_inputs_follow_the_seed(model):
    for seed in ("7", "7", "8"):
        assert cli.main(["run", "m.so", "--seed", seed]) == 0
    first, again, other = (seen["x"] for seen in model.seen)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00\xf6\x00" + header.ljust(245).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "x", "cannot read"),
        (b"not numpy", "x", "is not an .npy file"),
        (b"\x80\x04K\x05.", "x", "is not an .npy file"),  # a pickle
        (b"PK\x03\x04" + b"junk" * 10, "x", "cannot read"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,2"), "x", "cannot read"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), "x", "cannot read"),
        (npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},)}}"), "x", "cannot"),
        (npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**15},)}}"), "x", "cannot"),
        (None, "z", "has no input z; it has: x, ids"),
    ],
)
def test_run_with_bad_inputs_exits_with_1(model, tmp_path, capsys, content, name, message):
    file = tmp_path / "x.npy"
    if content:
        file.write_bytes(content)
    assert cli.main(["run", "m.so", "--input", f"{name}={file}"]) == 1
    said = capsys.readouterr().err
    assert message in said and "internal failure" not in said and "unsafely" not in said


def test_run_reports_errors_of_the_model(model, capsys, monkeypatch):
    def refuse(inputs):
        raise InputError("input 'x' has dtype float64, expected float32")

    monkeypatch.setattr(model, "run", refuse)
    assert cli.main(["run", "m.so"]) == 1
    assert "dtype float64" in capsys.readouterr().err


def test_inspect_groups_equal_stages_and_measures(model, peak, capsys):
    assert cli.main(["inspect", "m.so"]) == 0
    out = capsys.readouterr().out
    assert "matmul+add" in out and "2x3 int8[3x3] -> 2x3" in out and "tile_m=2 tile_n=1x3" in out
    assert "50.0%" in out  # 4000 FLOP in 2 us at a peak of 4 GFLOP/s
    assert "s1" not in out  # equal to s0, so in its row
    assert cli.main(["inspect", "m.so", "--all"]) == 0
    assert "s1" in capsys.readouterr().out


def test_inspect_json_is_json(model, peak, capsys):
    assert cli.main(["inspect", "m.so", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [s["share_of_peak"] for s in data["stages"]] == [0.5, 0.5]
    assert data["inputs"][0] == {"name": "x", "dtype": "float32", "shape": [2, 3]}
    assert cli.main(["inspect", "m.so", "--json", "--no-profile"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "measured_seconds" not in data["stages"][0] and "--no-profile" in data["peak_reason"]


def test_inspect_without_measuring_runs_nothing(model, monkeypatch, capsys):
    def refuse(path, threads=0):
        raise AssertionError("the library was loaded")

    monkeypatch.setattr(sys.modules["gtco.runtime.module"], "load", refuse)
    assert cli.main(["inspect", "m.so", "--no-profile"]) == 0
    out = capsys.readouterr().out
    assert "matmul+add" in out and "threads all that a process may use" in out


def test_inspect_refuses_what_a_compiled_library_cannot_follow(model, capsys):
    flags = ["--target", "haswell", "--no-simplify", "--tune", "quick", "--records", "r"]
    assert cli.main(["inspect", "m.so", *flags]) == 1
    said = capsys.readouterr().err
    assert "--target, --no-simplify, --tune, --records: that is of a compile" in said
    assert not getattr(model, "seen", [])


def test_products_of_integers_are_held_against_their_own_peak(model, peak, monkeypatch, capsys):
    integers = [{**stage, "multiplies": "int8"} for stage in model.stages[:1]]
    monkeypatch.setattr(model, "stages", integers + model.stages[1:])
    module = sys.modules["gtco.search.calibration.peak"]
    peaks = {"float32": 4e9, "int8": 16e9}
    monkeypatch.setattr(
        module, "machine_peak", lambda threads, operand: Peak(threads, (peaks[operand],), 0.0)
    )
    assert cli.main(["inspect", "m.so", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [s["share_of_peak"] for s in data["stages"]] == [0.125, 0.5]
    assert data["int8_peak_operations_per_second"] == 16e9
    assert cli.main(["inspect", "m.so", "--all"]) == 0
    out = capsys.readouterr().out
    assert "12.5%" in out and "50.0%" in out and "31.2%" in out  # 1.25 us of 4 us at the peaks
    assert "of int8 products 16 GFLOP/s" in out


def test_inspect_compiles_an_onnx_file_first(model, peak, compiler, capsys):
    assert cli.main(["inspect", "m.onnx", "--json", "--shape", "b=1"]) == 0
    json.loads(capsys.readouterr().out)
    source, output, options = compiler.calls[0]
    assert source == Path("m.onnx") and options["shapes"] == {"b": 1}
    assert not output.parent.exists()  # a temporary folder


def test_a_share_above_the_whole_peak_says_why(model, peak, capsys, monkeypatch):
    """A Winograd stage is above the peak because it makes fewer products than are counted. Another
    stage is above it because the peak was read at another moment.
    """
    direct, winograd = (dict(stage, flops=16000) for stage in model.stages)
    winograd["schedule"] = {"sketch": "winograd"}
    monkeypatch.setattr(type(model), "stages", [direct, winograd])
    assert cli.main(["inspect", "m.so", "--all"]) == 0
    out = capsys.readouterr().out
    assert "200.0%" in out and "peak: 4 GFLOP/s (2 windows of 0.25 s on 2 threads" in out
    assert "1 stage above 100 % of the peak because their FLOPs are those of the" in out
    assert "1 stage above 100 % of the peak: the machine was faster" in out
    
