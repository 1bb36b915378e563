"""The systems beside gtco: who can run, in which settings and precision."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bench.harness import peers, suite
from bench.harness.build import Build
from bench.harness.peers import OPENERS, SETTINGS
from bench.harness.workload import (
    TORCH_NEEDS_SOURCE,
    candidates,
    check_peers,
    prepare,
)
from bench.models import readme
from gtco.support.errors import OptionError
from tests.bench.harness.onnx_files import one, save_graph
from tests.bench.models.test_tables import result


def test_candidates_leave_out_what_cannot_run_and_say_why(workload):
    chosen, skipped = candidates(workload, ("onnxruntime", "torch"), 2)
    assert [c.name for c in chosen] == ["gtco", "onnxruntime"]
    assert skipped == {"torch": TORCH_NEEDS_SOURCE}
    assert {c.job["threads"] for c in chosen} == {2}
    named = replace(
        workload, model="vit-ti-16", build=replace(workload.build, error="BuildError: no gcc")
    )
    chosen, skipped = candidates(named, ("onnxruntime", "torch"), 2)
    assert [c.name for c in chosen] == ["onnxruntime", "torch"] and skipped == {
        "gtco": "BuildError: no gcc"
    }
    with pytest.raises(OptionError, match="tensorrt"):
        check_peers("torch,tensorrt")


def test_the_precision_goes_to_every_system(workload, monkeypatch, capsys):
    half = replace(workload, precision="bf16")
    chosen, _ = candidates(half, ("onnxruntime", "openvino"), 2)
    assert {c.job["precision"] for c in chosen} == {"bf16"}
    assert peers.openvino_settings(2, "bf16")["INFERENCE_PRECISION_HINT"] == "bf16"
    assert peers.openvino_settings(2)["INFERENCE_PRECISION_HINT"] == "f32"
    asked = []
    monkeypatch.setattr(
        "bench.harness.workload.build", lambda *given, **more: asked.append(given) or workload.build
    )
    path = one(workload.onnx, "Relu", [(100,)], (100,))
    for precision in ("fp32", "bf16"):
        prepare(str(path), workload.inputs.parent, 1, precision=precision)
    names = [library.name for _, library, *_ in asked]  # neither replaces the other
    assert names == ["m.so", "m.bf16.so"] and [a[-1] for a in asked] == ["fp32", "bf16"]
    assert result(half).to_json()["precision"] == "bf16"
    suite.show(result(half))
    assert "bf16" in capsys.readouterr().out
    with pytest.raises(ValueError, match="fp32 alone"):
        readme.section({"models": [result(half).to_json()]})


@pytest.mark.parametrize("outside", [False, True])
def test_a_file_whose_name_is_not_utf8_is_timed_beside_peers(tmp_path, monkeypatch, outside):
    """The weights may be in a file beside it, in a folder that no peer can open either."""
    folder = tmp_path / os.fsdecode(b"mod\xe8les")
    folder.mkdir()
    inputs, weights = [("x", TensorProto.FLOAT, (2, 400))], [("w", (400, 3))]
    given = save_graph(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        inputs,
        [("y", (2, 3))],
        weights,
    )
    model = onnx.load(given)
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.full((400, 3), 2, np.float32), "w")
    )
    if outside:
        onnx.save(model, given, save_as_external_data=True, location="w.data", size_threshold=0)
        (tmp_path / "w.data").rename(folder / "w.data")
    else:
        onnx.save(model, given)
    name = folder / os.fsdecode(b"mod\xe8le.onnx")
    given.rename(name)
    monkeypatch.setattr("bench.harness.workload.build", lambda *given, **more: Build("m.so", 1, 1))
    made = prepare(str(name), tmp_path / "made", 1)
    job = {"onnx": str(made.onnx), "inputs": str(made.inputs), "threads": 1}
    for opened in (peers.open_onnxruntime, peers.open_openvino):
        (y,) = opened(job).outputs()
        with np.load(made.inputs) as file:
            np.testing.assert_allclose(y[:, 0], 2 * file["x"].sum(1), rtol=1e-3, atol=1e-3)


def test_onnxruntime_says_that_it_is_fp32(tmp_path):
    path = one(tmp_path / "m.onnx", "Relu", [(100,)], (100,))
    np.savez(tmp_path / "x.npz", i0=np.ones(100, np.float32))
    job = {"onnx": str(path), "inputs": str(tmp_path / "x.npz"), "threads": 1}
    named = [peers.open_onnxruntime({**job, "precision": p}).version for p in ("fp32", "bf16")]
    assert named[1] == f"{named[0]} (fp32)"


@pytest.mark.parametrize("system", [s for p in ("onnxruntime", "openvino") for s in SETTINGS[p]])
def test_every_setting_of_an_onnx_peer_computes_the_model(system, tmp_path):
    path = one(tmp_path / "m.onnx", "MatMul", [(4, 3), (3, 5)], (4, 5))
    rng = np.random.default_rng(0)
    feed = {"i0": rng.random((4, 3), np.float32), "i1": rng.random((3, 5), np.float32)}
    np.savez(tmp_path / "in.npz", **feed)
    job = {"onnx": str(path), "inputs": str(tmp_path / "in.npz"), "threads": 1}
    (found,) = OPENERS[system](job).outputs()
    np.testing.assert_allclose(found, feed["i0"] @ feed["i1"], rtol=1e-5)


def test_onnx_peers_are_timed_at_their_best(tmp_path, monkeypatch):
    """They use all optimisations and the number of threads that was asked for. The setting with the
    optimizer runs the file that the optimizer wrote.
    """
    import onnxruntime as ort

    path = save_graph(
        tmp_path / "gelu.onnx",
        [
            helper.make_node("Div", ["x", "root"], ["a"]),
            helper.make_node("Erf", ["a"], ["b"]),
            helper.make_node("Add", ["b", "one"], ["c"]),
            helper.make_node("Mul", ["x", "c"], ["d"]),
            helper.make_node("Mul", ["d", "half"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, (2, 8))],
        [("y", (2, 8))],
    )
    model = onnx.load(path)
    for name, value in (("root", 2**0.5), ("one", 1.0), ("half", 0.5)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, (), [value]))
    onnx.save(model, path)
    options = peers.onnxruntime_session(str(path), 3).get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert peers.openvino_settings(3)["INFERENCE_NUM_THREADS"] == 3
    assert peers.openvino_settings(3)["PERFORMANCE_HINT"] == "LATENCY"
    opened = []
    monkeypatch.setattr(
        peers, "_open_onnxruntime", lambda _, file: opened.append(onnx.load(file).graph)
    )
    peers.open_onnxruntime_optimizer({"onnx": str(path)})
    assert [node.op_type for node in opened[0].node] == ["Gelu"]


@pytest.mark.parametrize(
    ("system", "last", "compiled"),
    [
        ("torch", False, []),
        ("torch:channels-last", True, []),
        ("torch-compile", False, [(None, False)]),
        ("torch-compile:max-autotune", False, [("max-autotune-no-cudagraphs", True)]),
    ],
)
def test_every_setting_of_torch_is_what_its_name_says(
    system, last, compiled, tmp_path, monkeypatch
):
    torch = pytest.importorskip("torch")
    from torch._inductor import config

    seen, asked, threads = [], [], []

    class Convolution(torch.nn.Conv2d):
        def forward(self, x):
            nhwc = [t.is_contiguous(memory_format=torch.channels_last) for t in (x, self.weight)]
            seen.append((nhwc, self.training, torch.is_inference_mode_enabled()))
            return super().forward(x)

    def compiler(module, mode=None):
        asked.append((mode, config.freezing))
        return module

    monkeypatch.setattr("bench.models.wide.create", lambda name: Convolution(3, 8, 3))
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    np.savez(tmp_path / "in.npz", x=np.ones((2, 3, 6, 5), np.float32))
    job = {"model": "small", "inputs": str(tmp_path / "in.npz"), "threads": 3}
    with config.patch(freezing=False):
        (found,) = OPENERS[system](job).outputs()
    assert found.shape == (2, 8, 4, 3)
    assert seen == [([last, last], False, True)]
    assert asked == compiled and threads == [3]
