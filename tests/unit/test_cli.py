"""The command line: usage, exit codes, and that each command hands on what the user said."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from gtco import cli
from gtco.errors import InputError, ModelError
from gtco.runtime import library
from gtco.tuning.view import StageView, View
from gtco.tuning.whole import Verdict
from gtco.verification import Difference, VerificationReport
from gtco.verification.report import Top1


@dataclass(frozen=True)
class Spec:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    phases: tuple = (("import", 0.5), ("build", 2.0))
    stages: tuple = ({"name": "s0"}, {"name": "s1"})
    peak_memory_bytes: int = 2_000_000_000
    weights_bytes: int = 23_000_000
    launches: str = "graph"
    predicted_seconds: float = 0.012
    notes: tuple = ("stage s1 fell back [slow]",)
    tuning: tuple = ()
    tuned: View | None = None
    fusion: str = ""
    settled: Verdict | None = None
    verification: VerificationReport | None = None


class Model:
    """What gtco.runtime.module.load gives, computing y = 2 x."""

    inputs: ClassVar = [Spec("x", "float32", (2, 3)), Spec("ids", "int64", (2,))]
    outputs: ClassVar = [Spec("y", "float32", (2, 3))]
    stages: ClassVar = [
        {
            "name": f"s{n}",
            "operators": ["matmul", "add"],
            "inputs": ["float32[2x3]", "int8[3x3]"],
            "output": "float32[2x3]",
            "bytes": 96,
            "schedule": {"tile_m": 2, "tile_n": [1, 3]},
            "flops": flops,
            "predicted_seconds": 1e-6,
        }
        for n, flops in enumerate((4000, 4000))
    ]
    device = None
    metadata: ClassVar = {
        "name": "fake",
        "threads": 0,
        "inputs": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in inputs],
        "outputs": [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in outputs],
        "steps": stages,
    }

    def __init__(self, threads=0):
        self.threads = threads or 2
        self.seen: list = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def run(self, inputs):
        self.seen.append(inputs)
        return {"y": 2 * inputs["x"]}

    def profile(self, *inputs, repeat):
        assert len(inputs) == 2 and repeat > 1
        return [2e-6, 2e-6]


@pytest.fixture
def compiler(monkeypatch):
    """A gtco.compiler that records its calls; ``fail`` is raised when it is set."""
    module = types.ModuleType("gtco.compiler")
    module.calls, module.fail, module.report = [], None, Report()

    def compile_to_file(model, output, **options):
        module.calls.append((model, output, options))
        options["progress"]("import", None, "reading")
        options["progress"]("import", 0.5, "74 [bold] operators")
        if module.fail:
            raise module.fail
        return module.report

    module.compile_to_file = compile_to_file
    module.compile_to_files = lambda models, **options: [
        compile_to_file(model, output, **options) for model, output, _ in models
    ]
    monkeypatch.setitem(sys.modules, "gtco.compiler", module)
    return module


@pytest.fixture
def model(monkeypatch):
    """gtco.runtime.module.load and read_metadata replaced by the fake model's."""
    module, fake = types.ModuleType("gtco.runtime.module"), Model()
    module.load = lambda path, threads=0, device=0: fake
    monkeypatch.setitem(sys.modules, "gtco.runtime.module", module)
    monkeypatch.setattr(library, "read_metadata", lambda path: fake.metadata)
    return fake


@pytest.fixture
def peak(monkeypatch):
    module = types.ModuleType("gtco.search.profile")
    module.measure_peak = lambda threads, operand: 4e9
    monkeypatch.setitem(sys.modules, "gtco.search.profile", module)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["compile"],
        ["compile", "m.onnx", "--threads", "-1"],
        ["compile", "m.onnx", "--threads", "1025"],
        ["compile", "m.onnx", "--threads", "²"],
        ["run", "m.so", "--threads", str(2**32 + 1)],
        ["bench", "m", "--threads", "5000"],
        ["bench", "m", "--json", "/no such folder/a.json"],  # said before the measuring
        ["bench", "m", "--json", "/"],
        ["compile", "m.onnx", "--shape", "batch"],
        ["compile", "m.onnx", "--shape", "batch=0"],
        ["compile", "m.onnx", "--shape", "b=1", "--shape", "b=2"],
        ["compile", "m.onnx", "--workers", "0"],
        ["run"],
        ["run", "m.so", "--input", "x.npy"],
        ["run", "m.so", "--repeat", "0"],
        ["run", "m.so", "--input", "x=a.npy", "--input", "x=b.npy"],
        ["bench"],
        ["bench", "m", "--rounds", "x"],
    ],
)
def test_wrong_usage_exits_with_2(argv, compiler, model, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err
    assert not compiler.calls


def test_python_m_gtco_is_the_command(root):
    done = subprocess.run(
        [sys.executable, "-m", "gtco", "--version"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("gtco ")


def test_version_and_help_exit_with_0(capsys):
    for argv, text in (
        [["--version"], "gtco 0."],
        [["--help"], "compile"],
        [["compile", "--help"], "--verify"],
    ):
        with pytest.raises(SystemExit) as exit:
            cli.main(argv)
        assert exit.value.code == 0 and text in capsys.readouterr().out


def test_compile_hands_on_every_option(compiler, capsys):
    argv = (
        "compile m.onnx -o out/v.so --target znver4 --precision bf16 --threads 3 --verify --dump d "
        "--shape batch=2 --shape h=224 --no-simplify --simplify-timeout 9 --workers 2 --strict"
    ).split()
    assert cli.main(argv) == 0
    model, output, options = compiler.calls[0]
    assert (model, output) == (Path("m.onnx"), Path("out/v.so"))
    options.pop("progress")
    assert options == {
        "target": "znver4",
        "precision": "bf16",
        "launches": "graph",
        "ptx": True,
        "untrusted": False,
        "threads": 3,
        "verify": True,
        "dump": Path("d"),
        "shapes": {"batch": 2, "h": 224},
        "simplify": False,
        "simplify_timeout": 9,
        "workers": 2,
        "strict": True,
        "tune": "off",
        "records": None,
    }
    out, err = capsys.readouterr()
    assert "2.00 GB" in out and "12.000 ms" in out and "2.5 s" in out
    assert "note: stage s1 fell back [slow]" in out
    assert "import" in err and "0.50 s" in err and "74 [bold] operators" in err


def test_compile_defaults(compiler):
    assert cli.main(["compile", "a/vit.onnx"]) == 0
    _, output, options = compiler.calls[0]
    assert output == Path("a/vit.so")
    options.pop("progress")
    assert options == {
        "target": "native",
        "precision": "fp32",
        "launches": "graph",
        "ptx": True,
        "untrusted": False,
        "threads": 0,
        "verify": False,
        "dump": None,
        "shapes": None,
        "simplify": True,
        "simplify_timeout": 120,
        "workers": None,
        "strict": False,
        "tune": "quick",
        "records": None,
    }
    assert cli.main(["compile", "m.onnx", "-o", "m.dll"]) == 1


@pytest.mark.parametrize(
    ("flags", "tune"),
    [
        ("", "quick"),
        ("--target native", "quick"),
        ("--target znver4", "off"),  # another machine cannot be measured
        ("--tune off", "off"),
        ("--tune full", "full"),
        ("--target znver4 --tune quick", "quick"),  # which the compiler refuses
    ],
)
def test_what_is_measured_by_default(compiler, flags, tune):
    assert cli.main(["compile", "m.onnx", *flags.split()]) == 0
    assert compiler.calls[0][2]["tune"] == tune


def test_compile_shows_what_measuring_took_and_gained(compiler, capsys):
    stages = (
        StageView("matmul+add", 12, 3e-4, 2e-4, 0.91, 16, "open"),
        StageView("softmax", 12, 1e-5, 1e-5, None, 0, "waiting"),
    )
    view = View("", stages, ((4e-3, 2.6e-3),), elapsed=9.5, remaining=0.0, changed=1, hour=1e-4)
    settled = Verdict(frozenset({"some", "other"}), True, 4.2e-3, 2.7e-3)
    compiler.report = Report(tuned=view, fusion="3 partitions measured", settled=settled)
    assert cli.main(["compile", "m.onnx"]) == 0
    out = capsys.readouterr().out
    assert "partition" in out and "3 partitions measured" in out and "in the model" in out
    assert "4.20 -> 2.70 ms; 2 picks and the partition went back to what was there" in out
    assert "9.5 s of it: 16 candidates of 1 stages measured, 1 picks changed" in out
    assert "gained: 4.00 -> 2.60 ms (1.538 times) by 16 candidates in 10 s" in out
    assert "92% matmul+add (91% of the peak); 5% softmax" in out
    assert "1 of 2 stages were not measured" in out
    assert "another hour would be expected to give 0.10 ms" in out


def test_compile_shows_the_verification(compiler, capsys):
    found = (
        Difference("large", "logits", 2e-4, 3e-6),
        Difference("spike", "logits", 0.5, 0.2, unstable=True),
    )
    report = VerificationReport("ONNX Runtime", 1e-3, found)
    compiler.report = Report(verification=report)
    assert cli.main(["compile", "m.onnx", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "agrees with ONNX Runtime" in out and "2.00e-04" in out and "3.00e-06" in out
    (unstable,) = (line for line in out.splitlines() if "spike" in line)
    assert "5.00e-01" in unstable and "unstable" in unstable and "wrong" not in out
    report = VerificationReport("ONNX Runtime", 0.06, found, Top1(32, 31, 0))
    compiler.report = Report(verification=report)
    assert cli.main(["compile", "m.onnx", "--verify", "--precision", "bf16"]) == 0
    assert "the same class first on 31 of 32 images" in capsys.readouterr().out


def test_an_unknown_precision_is_wrong_usage(capsys):
    for command in ("compile m.onnx", "inspect m.onnx", "bench m.onnx"):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command.split(), "--precision", "fp8"])
        assert exit.value.code == 2 and "fp32" in capsys.readouterr().err


def test_an_error_is_a_message_and_exit_1_and_debug_shows_the_traceback(compiler, capsys):
    compiler.fail = ModelError("m.onnx is not an ONNX file")
    assert cli.main(["compile", "m.onnx"]) == 1
    err = capsys.readouterr().err
    assert "error: m.onnx is not an ONNX file" in err and "Traceback" not in err
    for argv in (["--debug", "compile", "m.onnx"], ["compile", "m.onnx", "--debug"]):
        with pytest.raises(ModelError):
            cli.main(argv)


def test_ctrl_c_exits_with_130(compiler, capsys):
    compiler.fail = KeyboardInterrupt()
    assert cli.main(["compile", "m.onnx"]) == 130
    assert "interrupted" in capsys.readouterr().err


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


@pytest.mark.parametrize("command", ["compile", "tune", "candidates", "measure"])
def test_an_empty_name_is_named(command, capsys):
    assert cli.main([command, ""]) == 1
    said = capsys.readouterr().err
    assert "is no file's name" in said and "internal failure" not in said


def explained(parser):
    """Every parser below, with what it takes that has no help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, found in action.choices.items():
                for path, option in explained(found):
                    yield f"{name} {path}".strip(), option
        elif action.help is None and action.option_strings:
            yield "", action.option_strings[-1]


def test_every_option_is_explained():
    assert list(explained(cli.parser())) == []


def test_inspect_compiles_an_onnx_file_first(model, peak, compiler, capsys):
    assert cli.main(["inspect", "m.onnx", "--json", "--shape", "b=1"]) == 0
    json.loads(capsys.readouterr().out)
    source, output, options = compiler.calls[0]
    assert source == Path("m.onnx") and options["shapes"] == {"b": 1}
    assert not output.parent.exists()  # a temporary folder


def test_run_reports_errors_of_the_model(model, capsys, monkeypatch):
    def refuse(inputs):
        raise InputError("input 'x' has dtype float64, expected float32")

    monkeypatch.setattr(model, "run", refuse)
    assert cli.main(["run", "m.so"]) == 1
    assert "dtype float64" in capsys.readouterr().err


def test_bench_without_the_harness_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bench", None)  # what importing a missing package does
    assert cli.main(["bench", "m.onnx"]) == 1
    assert "gtco[bench]" in capsys.readouterr().err


def test_bench_refuses_unknown_peers_and_missing_files(capsys):
    assert cli.main(["bench", "m.onnx", "--peers", "onnxruntime,tensorrt"]) == 1
    assert "unknown peer tensorrt" in capsys.readouterr().err
    assert cli.main(["bench", "absent.onnx", "--rounds", "1"]) == 1
    assert "no such file: absent.onnx" in capsys.readouterr().err
    assert cli.main(["bench", "vit-ti-16", "m.onnx", "--peers", "onnxruntime,torch"]) == 1
    said = capsys.readouterr()
    assert "torch, torch:channels-last cannot run m.onnx: an .onnx file has no" in said.err
    assert not said.out  # before anything is compiled or timed


@pytest.mark.parametrize("broken", [(), ("onnxruntime:optimizer",), ("openvino",)])
def test_bench_fails_where_a_peer_cannot_run(broken, tmp_path, monkeypatch, capsys):
    """By default the peers that read a file are taken; one of a peer's settings may fail."""
    from bench import suite
    from bench.build import Build
    from bench.harness import Comparison, Measurement
    from bench.workload import Workload

    def run(source, peers, *_):
        measured = [
            Measurement(name, error="is not installed")
            if name in broken
            else Measurement(name, rounds=((0.01,),))
            for name in ("gtco", *peers)
        ]
        work = Workload("m", tmp_path / source, None, tmp_path, Build("m.so", 1.0, 1), None)
        return suite.Result(work, Comparison(tuple(measured)))

    monkeypatch.setattr(suite, "run_model", run)
    assert cli.main(["bench", "m.onnx"]) == (1 if broken == ("openvino",) else 0)
    said = capsys.readouterr()
    assert "openvino" in said.out and "torch" not in said.out.split("system", 1)[1]
    reason = "these peers were not compared: openvino with m (is not installed)"
    assert (reason in said.err) == (broken == ("openvino",))


def test_a_closed_pipe_is_no_error(tmp_path):
    command = f"{sys.executable} -m gtco.cli --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
