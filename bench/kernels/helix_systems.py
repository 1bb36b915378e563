"""The workers of ``bench helix``: one product of float32 in gtco's library of any size, in oneDNN
through torch, and in ONNX Runtime (:mod:`bench.harness.worker`).

Weights are packed beforehand everywhere. Calls take turns on ``copies`` of the weights, which come
from memory if they are large, as they do inside a model. What a call from Python costs is part of
every system's time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..harness.worker import Job, System, serve

CHECKED = 4  # rows whose values are compared with float64
TOLERANCE = 4e-6  # of the sum of the products' magnitudes: 2^-18


def operands(job: Job) -> tuple[np.ndarray, list[np.ndarray]]:
    """A[m, k] and the copies of B[k, n], the same in every process."""
    m, n, k = job["sizes"]
    random = np.random.default_rng(0)
    a = random.random((m, k), np.float32) - np.float32(0.5)
    b = random.random((k, n), np.float32) - np.float32(0.5)
    return a, [b.copy() for _ in range(int(job["copies"]))]


def checked(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Raises ValueError if rows of C are not those of A x B."""
    rows = np.unique(np.linspace(0, len(a) - 1, CHECKED).astype(int))
    exact = a[rows].astype(np.float64) @ b
    room = TOLERANCE * (np.abs(a[rows]) @ np.abs(b))
    if (np.abs(c[rows] - exact) > room).any():
        raise ValueError("the product is wrong")


def turns(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


_opened: dict[tuple[str, int], Any] = {}  # gtco's library, which is opened once for all sizes


def open_gtco(job: Job) -> System:
    from gtco.runtime.products import Products

    place = str(job["library"]), int(job["threads"])
    if place not in _opened:
        _opened[place] = Products(*place)
    library = _opened[place]
    a, weights = operands(job)
    packed = [library.pack(b) for b in weights]
    c = np.empty((a.shape[0], packed[0].n), np.float32)
    library(a, packed[0], c)
    checked(a, weights[0], c)
    calls = [library.runner(a, one, c) for one in packed]
    return System("", turns(calls), lambda: [c])


def open_onednn(job: Job) -> System:
    import torch

    torch.set_num_threads(int(job["threads"]))
    a, weights = operands(job)
    x = torch.from_numpy(a)
    pack = torch.ops.mkldnn._reorder_linear_weight.default
    packed = [pack(torch.from_numpy(b.T.copy()), a.shape[0]) for b in weights]
    multiply = torch.ops.mkldnn._linear_pointwise.default
    checked(a, weights[0], multiply(x, packed[0], None, "none", [], "").numpy())
    calls = [lambda w=w: multiply(x, w, None, "none", [], "") for w in packed]
    return System(torch.__version__, turns(calls), lambda: [calls[0]().numpy()])


def open_onnxruntime(job: Job) -> System:
    import onnx
    import onnxruntime as ort
    from onnx import helper, numpy_helper

    from ..harness.peers import onnxruntime_session

    a, weights = operands(job)
    n, k = weights[0].shape[::-1]
    calls = []
    for b in weights:
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["a", "b"], ["c"])],
            "product",
            [helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, ["m", k])],
            [helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, ["m", n])],
            [numpy_helper.from_array(b, "b")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 9
        session = onnxruntime_session(model.SerializeToString(), int(job["threads"]))
        binding = session.io_binding()
        c = np.empty((a.shape[0], n), np.float32)
        binding.bind_cpu_input("a", a)
        binding.bind_output("c", "cpu", 0, np.float32, list(c.shape), c.ctypes.data)
        run = session.run_with_iobinding
        calls.append(lambda run=run, binding=binding, held=(c, a): run(binding))
        calls[0]()
        if len(calls) == 1:
            checked(a, b, c)
    return System(ort.__version__, turns(calls), list)


OPENERS = {"gtco": open_gtco, "onednn": open_onednn, "onnxruntime": open_onnxruntime}

if __name__ == "__main__":
    serve(OPENERS)
