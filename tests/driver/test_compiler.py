"""compile_model: its report, its dump, what it refuses, and what an interruption leaves behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import gtco
from gtco import verification
from gtco.cli import main
from gtco.codegen.workers import Workers
from gtco.compiler import compile_model, compile_to_file
from gtco.driver import compilation, making
from gtco.driver.linking import finishing
from gtco.machine.target import Target, target
from gtco.search.calibration import profile
from gtco.search.calibration.profile import MachineTable
from gtco.search.calibration.rates import RateTable
from gtco.support.errors import (
    BuildError,
    GtcoError,
    ModelError,
    OptionError,
    ShapeError,
    UnsupportedError,
    VerificationError,
)
from gtco.support.options import CompileOptions

RNG = np.random.default_rng(0)


def mlp(batch: int | str = 2, width: int = 24, layers: int = 1) -> onnx.ModelProto:
    """x -> (MatMul, Add, Relu) times ``layers`` -> Softmax -> y."""
    nodes, values, at = [], {}, "x"
    for n in range(layers):
        values[f"w{n}"] = RNG.standard_normal((width, width)).astype(np.float32) / 5
        values[f"b{n}"] = RNG.standard_normal(width).astype(np.float32)
        nodes.append(helper.make_node("MatMul", [at, f"w{n}"], [f"m{n}"]))
        nodes.append(helper.make_node("Add", [f"m{n}", f"b{n}"], [f"a{n}"]))
        nodes.append(helper.make_node("Relu", [f"a{n}"], [f"r{n}"]))
        at = f"r{n}"
    nodes.append(helper.make_node("Softmax", [at], ["y"], axis=-1))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (batch, width))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (batch, width))],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def expected(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    x = x.astype(np.float64)
    for n in range(len(weights) // 2):
        x = np.maximum(x @ weights[f"w{n}"] + weights[f"b{n}"], 0)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def check(compiled: Any, model: onnx.ModelProto, batch: int = 2, width: int = 24) -> None:
    x = RNG.standard_normal((batch, width)).astype(np.float32)
    np.testing.assert_allclose(compiled(x), expected(model, x), rtol=1e-4, atol=1e-6)


def test_a_compiled_model_is_a_model() -> None:
    model = mlp()
    x = RNG.standard_normal((2, 24)).astype(np.float32)
    compiled = compile_model(model, threads=1)
    assert isinstance(compiled, gtco.Model) and isinstance(compiled, gtco.CompiledModel)
    assert compiled.threads == 1 and len(compiled.report.stages) == len(compiled.stages)
    np.testing.assert_allclose(compiled.run({"x": x})["y"], expected(model, x), rtol=1e-4)
    assert len(compiled.profile(x)) == len(compiled.stages)
    assert repr(compiled) == (
        "<gtco.CompiledModel 'model' (x: float32[2, 24]) -> (y: float32[2, 24]), 1 threads>"
    )
    folder = compiled.path.parent
    with compiled:
        assert folder.exists()
    assert not folder.exists()  # closed: its files were temporary
    with pytest.raises(GtcoError, match="is closed"):
        compiled(x)


def test_report_dump_and_progress(tmp_path: Path) -> None:
    model, said = mlp(), list[tuple[str, float | None, str]]()
    compiled = compile_model(
        model, dump=str(tmp_path / "dump"), verify=True, progress=lambda *p: said.append(p)
    )
    check(compiled, model)
    report = compiled.report
    phases = ["read", "simplify", "fuse", "generate", "link", "verify"]
    told = [name for name, seconds, _ in said if seconds is not None]
    assert [name for name, _ in report.phases] == told
    assert [name for name in told if name != "calibrate"] == phases  # once for each machine
    assert report.seconds == sum(s for _, s in report.phases) and report.verification.passed
    assert len(report.stages) == len(compiled.stages) >= 2
    assert report.predicted_seconds > 0 and report.weights_bytes >= 24 * 25 * 4
    dumped = {p.name for p in (tmp_path / "dump").iterdir()}
    kernels = {f"6-gtco_{s['key']}.txt" for s in report.stages}
    texts = {"1-relax.txt", "2-lowered.txt", "3-canonical.txt", "4-layout.txt", "5-stages.txt"}
    assert dumped == texts | kernels
    assert all((tmp_path / "dump" / name).read_text().strip() for name in dumped)


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("name", ["native", "x86-64-v3"])
def test_threads_mean_one_thing(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is cut for the threads that the model is compiled for, and its price assumes that
    they share it. The rates are those of the machine; they are measured once, for any number of
    threads.
    """
    asked: list[Target] = []

    def table(machine: Target, say: object) -> MachineTable:
        asked.append(machine)
        return MachineTable(RateTable(machine))

    monkeypatch.setattr(profile, "known", lambda machine: False)
    monkeypatch.setattr(profile, "machine_table", table)
    machine = dataclasses.replace(target("x86-64-v3"), name=name, cores=5)
    options = CompileOptions(threads=threads)
    run = compilation.Compilation(None, Path("m.so"), None, options, compilation.silent)
    policy = run.policy_for(machine, None)
    assert policy.target == dataclasses.replace(machine, cores=threads or 5)
    assert asked == [machine] * (name == "native")


@pytest.mark.parametrize("known", [False, True])
def test_measuring_the_machine_is_a_phase_of_its_own(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The phase exists only if the machine is measured now. Its progress and its failures are
    shown. Without a table, kernels are picked by the target's constants.
    """
    said: list[tuple[str, float | None, str]] = []

    def table(machine: Target, say: Callable[[str], None] = print) -> MachineTable:
        if not known:
            say("half of it")
        return MachineTable(None, "why there is none")

    monkeypatch.setattr(profile, "known", lambda machine: known)
    monkeypatch.setattr(profile, "machine_table", table)
    run = compilation.Compilation(
        None, Path("m.so"), None, CompileOptions(), lambda *news: said.append(news)
    )
    machine = target("native")
    for _ in range(2):
        assert run.policy_for(machine, None).target.memory == machine.memory
    assert run.report.notes == ["why there is none"]
    assert [name for name, _ in run.report.phases] == ([] if known else ["calibrate"])
    assert ("calibrate", None, "half of it") in said or known


def test_module_and_exported_program() -> None:
    module = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20)).eval()
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(module, (x,))
    wanted = module(x).detach()
    for compiled in (compile_model(module, (x,)), compile_model(program)):
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [3, None, {"a": 1}, np.zeros(3)])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ModelError, match=r"cannot compile a .*: give an ONNX file's path"):
        compile_model(model)


def test_every_unsupported_operator_is_named(tmp_path: Path) -> None:
    kinds = ["Det", "RandomUniformLike", "Det", "Mystery"]
    nodes = [
        helper.make_node(kind, ["x"], [f"t{n}"], name=f"node{n}", domain="my" * (kind == "Mystery"))
        for n, kind in enumerate(kinds)
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 2))],
        [
            helper.make_tensor_value_info(f"t{n}", TensorProto.FLOAT, shape)
            for n, shape in enumerate([(), (2, 2), (), (2, 2)])
        ],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    with pytest.raises(UnsupportedError) as caught:
        compile_to_file(helper.make_model(graph, opset_imports=opsets), tmp_path / "m.so")
    message = str(caught.value)
    assert "Det (2): node0, node2" in message
    assert "RandomUniformLike (1): node1" in message and "my::Mystery (1): node3" in message
    assert not list(tmp_path.iterdir())


def wrong(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with one weight's sign changed."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    value = numpy_helper.to_array(other.graph.initializer[0]).copy()
    value[0] *= -1
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(value, "w0"))
    return other


def test_what_fails_the_verification_is_not_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference is another model. The older library stays, and so does an empty folder. The
    table of errors is in the error's report and on the screen.
    """
    model = mlp()
    verify = verification.verify

    def against_another(compiled: Any, reference: Any, **options: Any) -> Any:
        return verify(compiled, wrong(model), **options)

    onnx.save(model, tmp_path / "mlp.onnx")
    out = tmp_path / "out"
    out.mkdir()
    library = out / "mlp.so"
    command = ["compile", str(tmp_path / "mlp.onnx"), "-o", str(library), "--verify"]
    command += ["--tune", "off"]
    with monkeypatch.context() as patch:
        patch.setattr(verification, "verify", against_another)
        assert main(command) == 1
        assert not list(out.iterdir())
    assert main(command) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(verification, "verify", against_another)
        assert main([*command, "--threads", "1"]) == 1
        printed = capsys.readouterr()
        assert "DIFFERS FROM ONNX Runtime" in printed.out and "max relative" in printed.out
        assert "the compiled model differs from ONNX Runtime" in printed.err
        with pytest.raises(VerificationError) as caught:
            compile_to_file(model, library, verify=True)
    assert {d.output for d in caught.value.report.failures} == {"y"}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_wrong_kernels_are_not_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every stage reads its neighbour's weights: the code is wrong, and this is found before
    anything is published.
    """
    model, library = mlp(layers=2), tmp_path / "mlp.so"
    compile_to_file(model, library, verify=True)
    before = library.read_bytes()
    build = finishing.build_artifact

    def swapped(artifact: Any, *rest: Any) -> Path:
        (place, first), *others = artifact.weights
        weights = [(place, np.flip(first).copy()), *others]
        return build(dataclasses.replace(artifact, weights=weights), *rest)

    monkeypatch.setattr(finishing, "build_artifact", swapped)
    with pytest.raises(VerificationError, match="differs from ONNX Runtime"):
        compile_to_file(model, library, verify=True)
    assert library.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.h", "mlp.so"]


def test_a_dump_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    phases: list[str] = []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "dump", "/proc/gtco"):
        with pytest.raises(OptionError, match="cannot write in the folder"):
            compile_to_file(
                mlp(), tmp_path / "m.so", dump=folder, progress=lambda name, *_: phases.append(name)
            )
    assert not phases and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_tensor_no_machine_can_hold_is_named() -> None:
    pads = np.array([0, 0, 2**36, 0])
    graph = helper.make_graph(
        [
            helper.make_node("Pad", ["x", "pads"], ["wide"]),
            helper.make_node("Relu", ["wide"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 2))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (None, None))],
        [numpy_helper.from_array(pads, "pads")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with pytest.raises(ShapeError, match=r"would take 550 GB.*Pad"):
        compile_model(model, simplify=False)


def test_symbolic_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp("batch")
    with pytest.raises(ShapeError, match=r"'batch' \(x axis 0\).*--shape batch=1"):
        compile_model(model)
    check(compile_model(model, shapes={"batch": 3}), model, 3)
    onnx.save(model, tmp_path / "mlp.onnx")
    source, library = str(tmp_path / "mlp.onnx"), str(tmp_path / "mlp.so")
    assert main(["compile", source, "-o", library]) != 0
    assert "--shape batch=1" in " ".join(capsys.readouterr().err.split())
    assert main(["compile", source, "-o", library, "--shape", "batch=5", "--tune", "off"]) == 0
    with gtco.load(library) as loaded:
        assert loaded.inputs[0].shape == (5, 24)
        check(loaded, model, 5)


def test_a_missing_c_compiler_is_said_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    phases: list[str] = []
    with pytest.raises(BuildError, match="no-such-compiler"):
        compile_to_file(mlp(), tmp_path / "m.so", progress=lambda name, *_: phases.append(name))
    assert not phases and not list(tmp_path.iterdir())


CRASHING = """
import os, signal, sys
from multiprocessing.connection import Connection
from gtco.codegen.serve import answer
connection = Connection(int(sys.argv[1]))
while True:
    try:
        job = connection.recv()
    except EOFError:
        break
    if job.config.sketch == {sketch!r}:
        os.kill(os.getpid(), signal.SIGSEGV)
    connection.send(answer(job))
"""


def crashing(folder: Path, sketch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "worker.py"
    script.write_text(CRASHING.format(sketch=sketch))
    workers = partial(Workers, command=(sys.executable, str(script)))
    monkeypatch.setattr(making, "Workers", workers)


def test_a_crash_of_the_compiler_costs_speed_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process of every GEMM dies. The fallback builds its operators, and notes say so."""
    crashing(tmp_path, "gemm", monkeypatch)
    model = mlp()
    compiled = compile_model(model)
    check(compiled, model)
    used = {s["schedule"]["sketch"] for s in compiled.stages}
    assert "fallback" in used and "gemm" not in used
    notes = "\n".join(compiled.report.notes)
    assert "SIGSEGV" in notes and "matmul" in notes


def test_where_the_fallback_dies_too_the_error_names_the_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(CRASHING.format(sketch=None).replace("if job.config.sketch == None", "if 1"))
    workers = partial(Workers, command=(sys.executable, str(script)))
    monkeypatch.setattr(making, "Workers", workers)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BuildError, match=r"operator by operator[\s\S]*softmax[\s\S]*SIGSEGV"):
        compile_to_file(mlp(), out / "m.so")
    assert not list(out.iterdir())


INTERRUPTED = """
import sys, time
from gtco.compiler import compile_model
def say(phase, seconds, detail):
    if phase == "generate" and seconds is None:
        print(phase, flush=True)
        time.sleep(60)
compile_model(sys.argv[1], progress=say)
"""


def test_ctrl_c_leaves_nothing_of_a_model_in_memory(root: Path, tmp_path: Path) -> None:
    """No temporary folder and no worker are left. test_interrupt.py tests models that are written
    to a file.
    """
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "mlp.onnx")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(root)},
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "generate"
    workers = psutil.Process(child.pid).children(recursive=True)
    assert workers
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0 and "KeyboardInterrupt" in errors
    assert not list(temporary.glob("gtco*"))
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


ENDED = """
import sys, time
from gtco.compiler import compile_model
model = compile_model(sys.argv[1], threads=1)
print(model.path, flush=True)
time.sleep(300)
"""


def test_what_a_process_left_that_was_ended_is_removed_by_the_next(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends Python without any clean-up. Files of models that are open stay."""
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    child = subprocess.Popen(
        [sys.executable, "-c", ENDED, str(tmp_path / "mlp.onnx")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(root)},
    )
    try:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        with compile_model(mlp(), threads=1):
            assert path.exists()
    finally:
        child.terminate()
        child.communicate(timeout=60)
    assert path.exists()
    with compile_model(mlp(), threads=1) as first, compile_model(mlp(), threads=1) as second:
        assert not path.exists() and first.path.exists() and second.path.exists()
    assert not list(temporary.glob("gtco*"))


def test_errors_are_gtcos(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(mlp().SerializeToString()[:200])
    for source in (broken, tmp_path / "absent.onnx", b"", b"no model"):
        with pytest.raises(GtcoError):
            compile_model(source)
