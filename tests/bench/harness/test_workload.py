"""The harness prepares what it times: models, their inputs and their builds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from bench.harness import kept, workload
from bench.harness.build import MemoryWatch, build
from bench.harness.workload import (
    make_inputs,
    prepare,
)
from gtco.support.errors import ModelError, ShapeError
from tests.bench.harness.onnx_files import save_graph


def test_inputs_follow_dtypes_shapes_and_the_seed(tmp_path):
    path = save_graph(
        tmp_path / "m.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        [
            ("x", TensorProto.FLOAT, ("b", 3)),
            ("ids", TensorProto.INT64, (4,)),
            ("w", TensorProto.FLOAT, (2,)),
        ],
        [("y", ("b", 3))],
        [("w", (2,))],
    )
    inputs = make_inputs(path, {"b": 5})
    assert list(inputs) == ["x", "ids"]  # w has a value in the file
    assert inputs["x"].shape == (5, 3) and inputs["x"].dtype == np.float32
    assert inputs["ids"].dtype == np.int64 and set(inputs["ids"]) <= {0, 1}
    np.testing.assert_array_equal(inputs["x"], make_inputs(path, {"b": 5})["x"])
    assert make_inputs(path, {"x": (5, 3)})["x"].shape == (5, 3)  # an input's whole shape
    with pytest.raises(ShapeError, match="--shape b="):
        make_inputs(path, {})


def test_preparing_a_bad_source_is_a_clear_error(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        prepare("absent.onnx", tmp_path, 1)
    with pytest.raises(ModelError, match="unknown model 'vit-giant'"):
        prepare("vit-giant", tmp_path, 1)
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x0a\x3a")
    with pytest.raises(ModelError, match="is cut short"):
        prepare(str(tmp_path / "cut.onnx"), tmp_path, 1)


def test_a_model_is_exported_again_with_other_versions(tmp_path, monkeypatch):
    """And a file that lies there without a note; without torch it is taken as it is."""
    ran = []

    def exported(module, name, path):
        ran.append(name)
        Path(path).write_bytes(b"an export")

    monkeypatch.setattr(workload, "_ran", exported)
    (tmp_path / "vit.onnx").write_bytes(b"an older one")
    versions = {"torch": None}
    monkeypatch.setattr(kept, "installed", lambda name: versions.get(name, "1"))
    assert workload.export("vit", tmp_path).read_bytes() == b"an older one"
    versions["torch"] = "2.1"
    for _ in range(2):
        assert workload.export("vit", tmp_path).read_bytes() == b"an export"
    assert ran == ["vit"]
    versions["transformers"] = "5"
    workload.export("vit", tmp_path)
    assert ran == ["vit"] * 2


def test_a_failed_build_is_a_result_with_its_reason(tmp_path):
    done = build(tmp_path / "absent.onnx", tmp_path / "m.so", 1)
    assert done.error.startswith("ModelError: cannot read") and done.seconds > 0


def test_the_reason_of_a_failed_build_is_the_error_and_no_warning_after_it(tmp_path, monkeypatch):
    """When the process ends, TVM warns of blocks that a failed import left open."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\natexit.register(print, 'Warning: blocks remain', file=sys.stderr)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = build(tmp_path / "absent.onnx", tmp_path / "m.so", 1)
    assert done.error.startswith("ModelError: cannot read")


def test_a_build_ends_with_its_harness(tmp_path, root):
    """The build, which does not end by itself, is there when the harness is killed."""
    marker = tmp_path / "marker"
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys, time\n"
        "if 'gtco.bench.harness.build' in sys.orig_argv:\n"
        "    atexit.register(time.sleep, 300)\n"
        f"    atexit.register(lambda: open({str(marker)!r}, 'w').close())\n"
    )
    script = f"from bench.harness.build import build; build('absent.onnx', {str(tmp_path)!r}, 1)"
    path = os.pathsep.join([str(tmp_path), str(root)])
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}
    ) as harness:
        try:
            while not marker.exists():
                assert harness.poll() is None
                time.sleep(0.05)
            family = psutil.Process(harness.pid).children(recursive=True)
        finally:
            harness.kill()
    left = psutil.wait_procs(family, timeout=30)[1]
    for process in left:
        process.kill()
    assert family and not left


def test_memory_of_the_whole_family_is_watched():
    """The grandchild says that it holds its 120 MB. It releases them when it is told to, after at
    least one more look.
    """
    child = "import sys; b = bytearray(120_000_000); print('held', flush=True); sys.stdin.read()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        watch = MemoryWatch(process.pid)
        peak = watch.stop()  # it looks at least once before it stops
    assert 120e6 < peak < 400e6
