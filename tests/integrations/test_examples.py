"""The Python of docs/onnxruntime.md, docs/deploying.md and docs/torch-compile.md runs, and gives
what is right.
"""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest

import gtco
from tests.driver.test_compiler import expected, mlp

SIZE = (2, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model.onnx, and model.so compiled from it."""
    place = tmp_path_factory.mktemp("examples")
    onnx.save(mlp(), place / "model.onnx")
    gtco.compile_to_file(place / "model.onnx", place / "model.so", threads=1)
    return place


def examples(root, page):
    return re.findall(r"```python\n(.*?)```", (root / "docs" / page).read_text(), re.DOTALL)


def check_answers(folder, answers, inputs):
    model = onnx.load(folder / "model.onnx")
    for answer, value in zip(answers, inputs, strict=True):
        x = np.full(SIZE, value, np.float32)
        np.testing.assert_allclose(answer, expected(model, x), rtol=1e-4, atol=1e-6)


def test_onnxruntimes_page(root, folder, monkeypatch):
    monkeypatch.chdir(folder)
    script, pool, loop = examples(root, "onnxruntime.md")
    found: dict = {}
    exec(script, found)
    check_answers(folder, [found["logits"]], [0])
    found = {}
    exec(pool, found)
    check_answers(folder, found["answers"], range(8))
    found = {}
    exec(loop, found)
    check_answers(folder, found["answers"], range(4))


def test_deployings_page(root, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (script,) = examples(root, "deploying.md")
    script, last = script.replace("8000", "0").rsplit("server.serve_forever()", 1)
    assert not last.strip()
    found: dict = {}
    exec(script, found)
    server, free = found["server"], found["free"]
    server.RequestHandlerClass.log_message = lambda *_: None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/"

    def ask(value):
        body = np.full(SIZE, value, np.float32).tobytes()
        with urllib.request.urlopen(urllib.request.Request(address, body), timeout=60) as reply:
            return np.frombuffer(reply.read(), np.float32).reshape(SIZE[0], -1)

    def refused(body):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(address, body), timeout=60)
        caught.value.close()
        return caught.value.code

    try:
        with ThreadPoolExecutor(4) as pool:
            check_answers(folder, list(pool.map(ask, range(8))), range(8))
        assert refused(b"") == 400
        taken = [free.get(timeout=60) for _ in range(found["WORKERS"])]
        assert refused(np.zeros(SIZE, np.float32).tobytes()) == 503
        for model in taken:
            free.put(model)
        check_answers(folder, [ask(3)], [3])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_torch_compiles_page(root, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    from gtco.integrations.torch_compile import backend

    monkeypatch.chdir(tmp_path)
    found: dict = {"backend": backend}
    first, second = examples(root, "torch-compile.md")
    # by its name it is found where gtco was installed with this version's entry point
    exec(first.replace('backend="gtco"', "backend=backend"), found)
    assert found["y"].shape == (4, 64)
    exec(second, found)
    assert "torch.Size([4, 64])" in capsys.readouterr().out
    torch.compiler.reset()
