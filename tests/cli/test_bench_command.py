"""gtco bench: which peers it takes, and what it says of those that cannot run."""

from __future__ import annotations

import sys

import pytest

from gtco import cli


def test_bench_without_the_harness_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bench.harness", None)  # as if the package were missing
    assert cli.main(["bench", "m.onnx"]) == 1
    assert "pip install -e '.[bench]'" in capsys.readouterr().err


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
    from bench.harness import suite
    from bench.harness.build import Build
    from bench.harness.rounds import Comparison, Measurement
    from bench.harness.workload import Workload

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
