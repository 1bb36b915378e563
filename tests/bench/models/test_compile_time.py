"""``python -m bench compile_time``: gtco's rows on a small model, and a system that fails."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx
import onnx.parser

from bench.models.compile_time import first_output, measure, table

MODEL = """<ir_version: 10, opset_import: ["": 21]>
small (float[4,8] x) => (float[4,8] y) { y = Relu(x) }"""


def test_rows_of_a_small_model(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "small.onnx")
    options = argparse.Namespace(
        folder=tmp_path, threads=1, peers="onnxruntime", efforts="off", json=None
    )
    ours, peer = measure(str(tmp_path / "small.onnx"), options)
    assert (ours.system, peer.system) == ("gtco", "onnxruntime")
    assert not ours.error and not peer.error
    assert ours.start is not None and 0 < ours.start < ours.seconds
    assert sum(seconds for _, seconds in ours.phases) < ours.seconds
    assert peer.seconds > 0 and peer.start is None
    assert table([ours, peer]).row_count == 2


def test_a_system_that_fails_says_why(tmp_path: Path) -> None:
    failed = first_output({"system": "onnxruntime", "threads": 1, "onnx": str(tmp_path / "none")})
    assert failed.error and not failed.seconds
