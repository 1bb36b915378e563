"""The programs in examples/: each is built and run on a compiled model. A language whose tools are
not installed is skipped; .ci/run installs all of them.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gtco

BATCHES = (1, 2, 4)


@pytest.fixture(scope="module")
def folder(root) -> Path:
    return root / "examples"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """y = tanh(x W), for batches of 1, 2 and 4; and its header."""
    weights = np.random.default_rng(0).standard_normal((6, 7)).astype("float32")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Tanh", ["z"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 7])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path_factory.mktemp("examples") / "m.so"
    onnx.save(model, path.with_suffix(".onnx"))
    gtco.compile_model(model, dims={"batch": list(BATCHES)}, target="x86-64-v3").save(path)
    return path


def expected(library: Path, batch: int) -> list[float]:
    with gtco.load(library) as model:
        return model(np.ones((batch, 6), np.float32)).reshape(-1)[:5].tolist()


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.partition(" = ")[2].removesuffix(" ...").split()]


def built(language: str, folder: Path, library: Path, place: Path) -> list[str]:
    """The command that runs the example, after its build; skips the test without a toolchain."""
    tool = {"cpp": "g++", "rust": "cargo", "go": "go"}[language]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    source, program = place / language, place / "run"
    shutil.copytree(folder / language, source, ignore=shutil.ignore_patterns("target"))
    environment = dict(os.environ)
    if language == "cpp":
        command = ["make", "-s", f"MODEL={library}", f"OUT={program}"]
    elif language == "rust":
        command = ["cargo", "build", "-q", "--offline", "--target-dir", str(place / "target")]
        environment["RUSTFLAGS"] = "-D warnings"
        program = place / "target/debug/run"
    else:
        shutil.copy(library.with_suffix(".h"), source / "model.h")
        command = ["sh", "-c", f"go vet . && go build -o {program} ."]
        environment["GOCACHE"] = str(place / "cache")
    made = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [str(program)]


@pytest.mark.parametrize("language", ["cpp", "rust", "go"])
def test_a_program_runs_a_model_of_several_shapes(language, folder, library, tmp_path) -> None:
    command = built(language, folder, library, tmp_path)
    for batch in (4, 1):
        ran = subprocess.run(
            [*command, str(library), f"{batch}x6"], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        (line,) = [line for line in ran.stdout.splitlines() if line.startswith("y ")]
        np.testing.assert_allclose(numbers(line), expected(library, batch), rtol=1e-5)
        assert line.endswith("...")
    absent, other = tmp_path / "absent.so", tmp_path / "other.so"
    other.write_bytes(b"no library")
    for arguments, said in (
        ([], "usage"),
        ([str(absent)], "absent.so"),
        ([str(other)], "other.so"),
        ([str(library)], "several shapes"),
        ([str(library), "3x6"], "compiled for"),
        ([str(library), "6"], "axes"),
        ([str(library), "4x6", "4"], "input"),
    ):
        ran = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 1 and said in ran.stderr, (arguments, ran.stderr)


def test_examples_are_short(folder) -> None:
    sources = [
        p for p in folder.rglob("*") if p.suffix in (".c", ".cpp", ".hpp", ".rs", ".go", ".py")
    ]
    assert len(sources) >= 8
    assert not [p for p in sources if len(p.read_text().splitlines()) >= 150]


@pytest.fixture
def server(folder, library):
    """The HTTP server's address; it is told to stop at the end, and must."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(folder / "http/server.py"),
            str(library),
            "--port",
            "0",
            "--wait-ms",
            "50",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    watch = threading.Timer(60, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        yield f"http://{line.split()[-1]}/"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        watch.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def one_shape(library) -> Path:
    """The same model for a batch of 2 alone."""
    path = library.parent / "one.so"
    gtco.compile_model(library.with_suffix(".onnx"), shapes={"batch": 2}, target="x86-64-v3").save(
        path
    )
    return path


def test_a_folder_with_the_server_is_all_that_a_container_needs(
    folder, one_shape, tmp_path
) -> None:
    place = tmp_path / "rootfs"
    command = ["make", "-s", f"MODEL={one_shape}", f"OUT={place}"]
    subprocess.run(command, cwd=folder / "container", check=True)
    nbytes = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    assert nbytes - one_shape.stat().st_size < 20e6
    command, environment = ["/usr/sbin/chroot", str(place), "/server", "0"], {}
    if os.geteuid() != 0:  # only root may change the root
        command, environment = [f"{place}/server", "0"], {"LD_LIBRARY_PATH": f"{place}/lib"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on port "), line
        address = f"http://127.0.0.1:{line.split()[3].rstrip(',')}/"
        x = np.random.default_rng(2).standard_normal((2, 6)).astype("float32")
        y = np.frombuffer(post(address, x.tobytes()), np.float32).reshape(2, 7)
        with gtco.load(one_shape) as model:
            np.testing.assert_array_equal(y, model(x))
        assert urllib.request.urlopen(address, timeout=60).read() == b"ok\n"
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(address, b"1234")
        assert "POST the 48 bytes" in caught.value.read().decode()
        for rubbish in (b"GET", b"\0" * 9000, b"POST / HTTP/1.1\r\nContent-Length: 48\r\n\r\n123"):
            with (
                suppress(OSError),  # the server may close it before all is sent
                socket.create_connection(("127.0.0.1", int(address[17:-1])), timeout=60) as client,
            ):
                client.sendall(rubbish)
                client.shutdown(socket.SHUT_WR)
                client.recv(1000)
        assert len(post(address, x.tobytes())) == 56
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def post(address: str, body: bytes) -> bytes:
    return urllib.request.urlopen(urllib.request.Request(address, body), timeout=60).read()


def test_the_server_answers_each_request_with_its_own_sample(server, library) -> None:
    samples = np.random.default_rng(1).standard_normal((23, 6)).astype("float32")

    def ask(sample: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        np.save(file, sample)
        return np.load(io.BytesIO(post(server, file.getvalue())))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, samples))
    with gtco.load(library) as model:
        wanted = [model(sample[None])[0] for sample in samples]
    np.testing.assert_allclose(answers, wanted, rtol=1e-5, atol=1e-6)
    assert urllib.request.urlopen(server, timeout=60).read() == b"ok\n"


def test_the_server_refuses_what_is_no_sample_and_goes_on(server) -> None:
    def refused(body: bytes) -> str:
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, body)
        assert caught.value.code == 400
        return caught.value.read().decode()

    wrong = io.BytesIO()
    np.save(wrong, np.zeros((6,), np.float64))
    assert "a sample is float32[6], not float64[6]" in refused(wrong.getvalue())
    assert "magic string" in refused(b"no npy file") and refused(wrong.getvalue()[:40])
    archive = io.BytesIO()
    np.savez(archive, np.zeros((6,), np.float32))
    assert "magic string" in refused(archive.getvalue())
    assert urllib.request.urlopen(server, timeout=60).read() == b"ok\n"
