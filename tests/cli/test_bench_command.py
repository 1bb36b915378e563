"""gtco bench: which peers it takes, and what it says of peers that cannot run."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import sys

import pytest
from onnx import TensorProto, helper

from gtco import cli
from gtco.runtime.writing.linking import write_artifact
from tests.bench.harness.onnx_files import one, save_graph
from tests.runtime.test_models import kernels, small_artifact


def test_bench_without_the_harness_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gtco.bench.harness", None)  # as if it were missing
    assert cli.main(["bench", "m.onnx"]) == 1
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


def test_bench_refuses_unknown_peers_and_missing_files(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").touch()
    assert cli.main(["bench", "m.onnx", "--peers", "onnxruntime,tensorrt"]) == 1
    assert "unknown peer tensorrt" in capsys.readouterr().err
    assert cli.main(["bench", "absent.onnx", "--rounds", "1"]) == 1
    assert "no such file: absent.onnx" in capsys.readouterr().err
    assert cli.main(["bench", "vit-ti-16", "m.onnx", "--peers", "onnxruntime,torch"]) == 1
    said = capsys.readouterr()
    assert "torch, torch:channels-last cannot run m.onnx: an .onnx file has no" in said.err
    assert not said.out  # before anything is compiled or timed


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Models are not run: every system takes 10 ms, and those of ``broken`` fail. ``asked`` has
    what was asked for.
    """
    from gtco.bench.harness import suite
    from gtco.bench.harness.build import Build
    from gtco.bench.harness.rounds import Comparison, Measurement
    from gtco.bench.harness.workload import Workload

    def run(source, peers, *more):
        run.asked.append((source, tuple(peers)))
        run.precision = more[-1]
        measured = [
            Measurement(name, error="crashed")
            if name in run.broken
            else Measurement(name, rounds=((0.01,),))
            for name in ("gtco", *peers)
        ]
        work = Workload("m", tmp_path / source, None, tmp_path, Build("m.so", 1.0, 1), None)
        return suite.Result(work, Comparison(tuple(measured)))

    run.asked, run.broken = [], ()
    monkeypatch.setattr(suite, "run_model", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").touch()
    return run


@pytest.mark.parametrize("broken", [(), ("onnxruntime:optimizer",), ("openvino",)])
def test_bench_fails_where_a_peer_cannot_run(broken, timed, capsys):
    """By default the peers that read a file are taken; one setting of a peer may fail."""
    timed.broken = broken
    assert cli.main(["bench", "m.onnx"]) == (1 if broken == ("openvino",) else 0)
    said = capsys.readouterr()
    assert "openvino" in said.out and "torch" not in said.out.split("system", 1)[1]
    reason = "these peers were not compared: openvino with m (crashed)"
    assert (reason in said.err) == (broken == ("openvino",))


@pytest.mark.parametrize("absent", [("openvino",), ("onnxruntime", "openvino")])
def test_peers_that_are_not_installed_are_left_out_by_default_and_named(
    absent, timed, monkeypatch, capsys
):
    from gtco.cli.commands import bench_command

    monkeypatch.setattr(bench_command, "find_spec", lambda name: None if name in absent else name)
    assert cli.main(["bench", "m.onnx"]) == 0
    said = capsys.readouterr().out
    assert f"not timed: {', '.join(absent)} (pip install {' '.join(absent)})" in said
    left = () if len(absent) == 2 else ("onnxruntime", "onnxruntime:optimizer")
    assert timed.asked == [("m.onnx", left)]
    # a peer that is asked for by name must be there
    assert cli.main(["bench", "m.onnx", "--peers", "openvino"]) == 1
    assert "not installed: openvino. Install" in capsys.readouterr().err


@pytest.fixture(scope="module")
def library(kernels, tmp_path_factory):
    """A library of gtco's with inputs x and mask, one in bf16, one that says it is for a GPU; an
    .onnx file with these inputs, and one with other inputs.
    """
    folder = tmp_path_factory.mktemp("bench")
    write_artifact(small_artifact(kernels), folder / "small.so")
    for name, metadata in (("half", {}), ("gpu", {"images": {"sm_90a": 1}})):
        metadata["precision"] = "fp16" if metadata else "bf16"
        write_artifact(small_artifact(kernels, metadata=metadata), folder / f"{name}.so")
    save_graph(
        folder / "same.onnx",
        [helper.make_node("Add", ["x", "mask"], ["y"])],
        [("x", TensorProto.FLOAT, (2,)), ("mask", TensorProto.FLOAT, (2,))],
        [("y", (2,))],
    )
    one(folder / "other.onnx", "MatMul", [(4, 3), (3, 5)], (4, 5))
    return folder / "small.so"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("{other} --library {absent}", "absent.so"),
        ("{other} --library {other}", "other.onnx"),
        ("{other} --library {small}", "is of another model: its inputs are x, mask, and those of"),
        ("{small} --library {small}", "is a library itself: leave out --library"),
        ("{small} --peers onnxruntime", "is a library, which gtco alone runs"),
        ("{absent}", "absent.so"),
        ("vit-ti-16 --library {absent}", "absent.so"),
        ("{gpu}", "gpu.so was compiled for a GPU: add --target cuda"),
        ("{same} --library {gpu}", "gpu.so was compiled for a GPU: add --target cuda"),
        ("{small} --target cuda", "small.so was compiled for a CPU: leave out --target"),
        ("{half} --precision fp32", "computes in bf16, and --precision is fp32: leave it out"),
        ("{same} --library {half} --precision fp32", "half.so computes in bf16, and --precision"),
        ("{same} --library {small} --precision bf16", "small.so computes in fp32, and --precision"),
    ],
)
def test_a_library_that_cannot_be_timed_is_said_at_once(argv, said, library, monkeypatch, capsys):
    from gtco.bench.harness import suite

    monkeypatch.setattr(suite, "header", lambda *_: pytest.fail("it began"))
    places = {n: library.parent / f"{n}.so" for n in ("small", "half", "gpu", "absent")}
    places |= {name: library.parent / f"{name}.onnx" for name in ("same", "other")}
    given = argv.format(**places).split()
    assert cli.main(["bench", *given]) == 1
    err = capsys.readouterr().err
    assert said in err and "internal failure" not in err


def test_peers_compute_in_the_precision_of_the_library(library, timed):
    for name, precision in (("half", "bf16"), ("small", "fp32")):
        given = [str(library.parent / "same.onnx"), "--library", str(library.parent / f"{name}.so")]
        assert cli.main(["bench", *given, "--peers", "openvino"]) == 0
        assert timed.precision == precision


def test_a_library_is_timed_without_its_model(library, capsys):
    assert cli.main(["bench", str(library), "--rounds", "1", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("gtco 0"))
    assert float(row.split()[2]) > 0 and "failed" not in out
