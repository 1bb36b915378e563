"""onnxsim in one process for several models."""

from __future__ import annotations

import os
import signal
import subprocess

import onnx
import pytest

from gtco.frontend import simplify
from gtco.frontend.simplify import one_process  # before conftest.py replaces it for quick tests


@pytest.fixture(autouse=True)
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "subprocess", subprocess)


def squares(size: int) -> onnx.ModelProto:
    text = f"g (float[2,{size}] x) => (float[{size},2] y) {{ s = Shape(x) r = Reshape(x, s) "
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> {text} y = Transpose(r) }}'
    )


def test_models_are_as_from_processes_of_their_own() -> None:
    sizes = (3, 5, 7)
    alone = simplify.simplify(squares(5), 60)
    with one_process():
        process = simplify._kept.get()
        assert process is not None and process._process is None  # not before it is asked
        made = [simplify.simplify(squares(size), 60) for size in sizes]
        first = process._process
        assert first is not None
        again = simplify.simplify(squares(5), 60)
        assert process._process is first
    assert first.poll() is not None
    assert simplify._kept.get() is None
    for one, note in made:
        assert not note and [node.op_type for node in one.graph.node] == ["Transpose"]
    assert made[1] == again == alone


def test_failures_are_those_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that crashes or hangs onnxsim stays as it is, and the next one is simplified."""
    hurt = simplify._SERVER.replace(
        "            try:",
        "            try:\n                exec(sys.argv[-1], {'n': len(given)})",
    )
    fault = "import os, time\nif n > 1000: time.sleep(99)\nif n > 500: os.abort()\n"
    fault += "if n > 300: raise SystemError('broken')"
    monkeypatch.setattr(simplify, "_SERVER", hurt)
    monkeypatch.setattr(simplify, "SKIPPED", [*simplify.SKIPPED, fault])

    def long(size: int) -> onnx.ModelProto:
        model = squares(3)
        model.doc_string = "x" * size
        return model

    with one_process():
        for size, timeout, said in (
            (320, 60.0, "onnxsim failed (SystemError: broken)"),
            (600, 60.0, f"onnxsim failed (exit status {-signal.SIGABRT})"),
            (1100, 0.7, "onnxsim did not finish in 0.7 s"),
        ):
            model, note = simplify.simplify(long(size), timeout)
            assert model == long(size) and note.startswith(said)
        model, note = simplify.simplify(squares(3), 60)
        assert not note and len(model.graph.node) == 1


def test_a_process_that_was_killed_is_started_again() -> None:
    with one_process():
        simplify.simplify(squares(3), 60)
        process = simplify._kept.get()
        assert process is not None and process._process is not None
        os.killpg(process._process.pid, signal.SIGKILL)
        model, note = simplify.simplify(squares(3), 60)
        assert note.startswith("onnxsim failed (exit status -9)") and model == squares(3)
        model, note = simplify.simplify(squares(3), 60)
        assert not note and len(model.graph.node) == 1


def test_an_input_keeps_its_shape() -> None:
    """onnxsim removes a Reshape of an input to its own shape, and gives the input the result's."""
    given = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]>
        g (float[2,4] x) => (float[2,4] y) <int64[1] m = {-1}> {
            s = Shape<start=1, end=2>(x) t = Concat<axis=0>(m, s)
            v = Reshape(x, t) y = Relu(v) }""")
    with one_process():
        model, note = simplify.simplify(given, 60)
    assert not note and [node.op_type for node in model.graph.node] == ["Relu"]
    assert model.graph.input == given.graph.input


def test_an_input_keeps_its_name() -> None:
    """onnxsim gives an input the name of the output that is an element of a sequence of inputs."""
    given = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]>
        g (float[2,4] x, float[3] z) => (float[3] y) <int64 last = {-1}> {
            s = SequenceConstruct(x, z) y = SequenceAt(s, last) }""")
    with one_process():
        model, note = simplify.simplify(given, 60)
    assert model == given and note.startswith("onnxsim renamed an input")
