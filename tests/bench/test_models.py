"""The inputs and outputs of the harness: FLOPs, inputs, builds, tables, and the list of
benchmarks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from bench import __main__ as entry
from bench.harness import ahead, machine, peers, suite
from bench.harness.build import Build, MemoryWatch, build
from bench.harness.peers import OPENERS, SETTINGS
from bench.harness.rounds import Comparison, Measurement
from bench.harness.workload import (
    TORCH_NEEDS_SOURCE,
    Workload,
    candidates,
    check_peers,
    make_inputs,
    prepare,
)
from bench.models import readme
from bench.models.end_to_end import summary
from bench.models.names import FIVE, MODELS, SUITES, WIDER
from gtco.support.errors import ModelError, OptionError, ShapeError


def save_graph(path, nodes, inputs, outputs, weights=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs],
        [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s).ravel()) for n, s in weights],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def one(path, op, shapes, out, **attributes):
    names = [f"i{n}" for n in range(len(shapes))]
    return save_graph(
        path,
        [helper.make_node(op, names, ["y"], **attributes)],
        [(n, TensorProto.FLOAT, s) for n, s in zip(names, shapes, strict=True)],
        [("y", out)],
    )


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


@pytest.fixture
def workload(tmp_path):
    built = Build(
        "m.so", 3.0, 900_000_000, weights_bytes=23_000_000, stages=7, notes=("fell back",)
    )
    return Workload("m", tmp_path / "m.onnx", None, tmp_path / "m.npz", built, 2e9)


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


def result(workload, ours=0.010, ort=0.012, **changes):
    measurements = (
        Measurement("gtco", "0.1", ((ours,) * 3,), difference=2e-6, **changes),
        Measurement("onnxruntime", "1.31", ((ort,) * 3,), difference=0.0),
        Measurement("torch", error="no source"),
    )
    return suite.Result(workload, Comparison(measurements, (4e11,)))


def printed(show, *arguments):
    console = Console(record=True, width=200, file=open("/dev/null", "w"))
    show(*arguments, console)
    return console.export_text()


def test_the_table_shows_time_rate_share_and_ratio(workload, capsys):
    suite.show(result(workload))
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "onnxruntime 1.31" in line)
    assert "12.00" in row and "1.20" in row and "166.7" in row and "41.7%" in row
    assert "torch failed: no source" in text and "note: fell back" in text and "7 stages" in text


def test_a_system_that_float64_sides_with_is_shown_and_sound(workload, capsys):
    judged = result(workload, judged="float64 agrees with it")
    suite.show(judged)
    assert "gtco differs and is right: float64 agrees with it" in capsys.readouterr().out
    assert suite.sound([judged])


def test_json_holds_machine_versions_and_raw_rounds(workload, tmp_path):
    file = tmp_path / "r.json"
    suite.write_json(file, [result(workload)], 2, 5)
    data = json.loads(file.read_text())
    assert (
        data["machine"]["threads"] == 2
        and data["machine"]["cpu"]
        and data["machine"]["versions"]["numpy"]
    )
    ours, ort, torch = data["models"][0]["systems"]
    assert ours["rounds_s"] == [[0.01, 0.01, 0.01]] and ort["ratio_to_gtco"] == pytest.approx(1.2)
    assert ours["share_of_peak"] == pytest.approx(0.5) and torch["error"] == "no source"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    with pytest.raises(OptionError, match="does not exist"):
        suite.write_json(tmp_path / "no" / "r.json", [], 2, 5)


def test_a_failing_or_wrong_gtco_is_not_sound(workload):
    assert suite.sound([result(workload)])
    assert not suite.sound([result(workload, disagrees="off by 1")])
    assert not suite.sound([result(workload, error="crashed")])


def test_peers_that_were_not_compared_are_named_with_their_reasons(workload):
    assert suite.failed_peers(result(workload), ["onnxruntime"]) == []
    failed = suite.failed_peers(result(workload), ["onnxruntime", "torch"])
    assert failed == [f"torch with {workload.name} (no source)"]


def test_a_peer_counts_in_its_best_setting(workload):
    measurements = (
        Measurement("gtco", "0.1", ((0.010,),)),
        Measurement("torch", "2", ((0.030,),)),
        Measurement("torch:channels-last", "2", ((0.020,),)),
        Measurement("torch-compile", error="no compiler"),
    )
    row = suite.Result(workload, Comparison(measurements)).to_json()
    ratio, system = ahead.best(row, ["torch"])
    assert system == "torch:channels-last" and ratio == pytest.approx(2.0)
    assert ahead.best(row, ["torch-compile"]) is None and ahead.best(row, ["openvino"]) is None


def test_the_mean_is_withheld_when_a_model_is_missing(workload):
    five = [result(replace(workload, name=name)) for name in FIVE]
    text = printed(lambda c: summary(five, ("onnxruntime", "onnxruntime:optimizer"), c))
    assert "geometric mean of onnxruntime / gtco: 1.200 over vit-ti-16" in text
    assert "least ahead" in text and "1.20 (onnxruntime)" in text
    text = printed(lambda c: summary(five[1:], ("onnxruntime",), c))
    assert "geometric mean of onnxruntime / gtco: not known without vit-ti-16" in text


def test_a_peer_stands_for_its_settings_and_one_of_them_for_itself():
    assert check_peers("torch,openvino") == ("torch", "torch:channels-last", "openvino")
    assert check_peers("torch:channels-last") == ("torch:channels-last",)
    assert check_peers("onnxruntime,onnxruntime:optimizer") == (
        "onnxruntime",
        "onnxruntime:optimizer",
    )
    systems = {system for settings in SETTINGS.values() for system in settings}
    assert systems == set(OPENERS) - {"gtco", "peak"}


def test_the_readme_is_written_from_one_run(workload, tmp_path):
    five = [
        result(replace(workload, name=name), ort=0.011 + n / 1e3) for n, name in enumerate(FIVE)
    ]
    run, target = tmp_path / "run.json", tmp_path / "README.md"
    suite.write_json(run, five, 2, 7)
    target.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    assert entry.main(["readme", str(run), str(target)]) == 0
    text = target.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == "| model | gtco ms | % of peak | ONNX Runtime | compile s | compile peak GB |"
    assert rows[1] == "| vit-ti-16 | 10.00 | 50 | 1.10 | 3.0 | 0.90 |" and len(rows) == 6
    assert "Tuned" not in text
    assert max(map(len, text.splitlines())) <= 118
    text = " ".join(text.split())
    assert "Geometric mean over vit-ti-16" in text and "1.29 over ONNX Runtime" in text
    assert "Least ahead of the best peer: vit-ti-16 1.10 (ONNX Runtime), vit-s-16 1.20" in text
    target.write_text("no marks")
    assert entry.main(["readme", str(run), str(target)]) == 1
    assert target.read_text() == "no marks"


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


def test_the_models_of_the_list_exist():
    pytest.importorskip("torch")
    from models import MODELS as KNOWN

    assert set(MODELS) <= set(KNOWN) and len(MODELS) == 8


def test_benchmarks_are_listed_and_exist(capsys, root):
    assert entry.main([]) == 2 and entry.main(["nonsense"]) == 2
    capsys.readouterr()
    assert entry.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (folder, what) in entry.BENCHMARKS.items():
        assert name in out and what in out
        assert (root / "bench" / folder / f"{name}.py").is_file()
        assert callable(importlib.import_module(f"bench.{folder}.{name}").main)


@pytest.mark.parametrize(("name", "extra"), [("end_to_end", "bench"), ("language_model", "train")])
def test_a_missing_package_is_named(name, extra, monkeypatch, capsys):
    def missing(module, package=None):
        raise ModuleNotFoundError("No module named 'rich.console'", name="rich.console")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert entry.main([name]) == 1
    said = capsys.readouterr().err
    assert f"bench {name} needs rich, which is not installed" in said and f"[{extra}]" in said


def test_training_a_language_model_needs_no_package_that_the_extra_lacks(root):
    """rich, psutil and safetensors are of the extra ``bench``."""
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('rich', 'psutil', 'safetensors', 'nncf', 'openvino')))\n"
        "import bench.language.language_model"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_end_to_end_refuses_unknown_peers(capsys):
    assert entry.main(["end_to_end", "--peers", "nobody"]) == 1
    assert "unknown peer nobody" in capsys.readouterr().err


def test_the_machine_is_described():
    about = machine.describe(3)
    assert about["threads"] == 3 and about["cores"] >= 1 and about["memory_bytes"] > 1e8
    assert machine.installed("no-such-package-of-anyone") is None
    assert time.strptime(about["date"][:19], "%Y-%m-%dT%H:%M:%S")


@pytest.mark.parametrize(
    ("name", "millions", "tokens"),  # of the published models
    [
        ("vit-ti-16-batch16", 5.7, (16, 224)),
        ("vit-s-16-512", 22.4, (1, 512)),
        ("beit-b-16", 86.5, (1, 224)),
        ("swinv2-t", 28.3, (1, 256)),
        ("mobilevit-s", 5.6, (1, 256)),
    ],
)
def test_models_of_the_wide_suite_have_their_published_sizes(name, millions, tokens):
    import torch

    from bench.models.wide import MEMBERS

    assert set(WIDER) == set(MEMBERS)
    assert SUITES["wide"] == (*MODELS, *WIDER) and len(set(SUITES["wide"])) == 13
    with torch.device("meta"):
        module = MEMBERS[name].build()
    count = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    assert abs(count - millions) < 0.02 * millions
    [(batch, channels, *size)] = MEMBERS[name].shapes
    assert (batch, channels, size) == (tokens[0], 3, [tokens[1]] * 2)
