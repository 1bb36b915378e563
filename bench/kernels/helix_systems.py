"""The workers of ``bench helix``: one product or convolution of float32 in gtco's library of any
size, in oneDNN through torch, and in ONNX Runtime (:mod:`bench.harness.worker`).

Images have their channels innermost in gtco and oneDNN, and outermost in ONNX Runtime, whose
convolutions read them so.

Weights are packed beforehand everywhere. Calls take turns on ``copies`` of the weights, which come
from memory if they are large, as they do inside a model. What a call from Python costs is part of
every system's time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gtco.runtime.convolutions import Convolution, Convolutions

from ..harness.worker import Job, System, serve

CHECKED = 4  # rows whose values are compared with float64
# Of ONNX Runtime, whose sessions have threads of their own: those of other copies of the weights
# would spin on the cores of the one that is timed.
NO_SPINNING = {"session.force_spinning_stop": "1"}
TOLERANCE = 4e-6  # of the sum of the products' magnitudes: 2^-18


def convolution_of(sizes: Sequence[int]) -> Convolution:
    """The convolution of a case's sizes (:class:`bench.kernels.helix.Case`)."""
    batch, channels, height, width, _, *window = sizes
    return Convolution(batch, height, width, channels, *window)


def problem_of(sizes: Sequence[int]) -> tuple[Any, ...]:
    """What gtco chooses a kernel for: a product's m, n and k, or a convolution and its filters."""
    return tuple(sizes) if len(sizes) == 3 else (convolution_of(sizes), sizes[4])


def operands(sizes: Sequence[int], copies: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A[m, k] and the copies of B[k, n], or images and copies of the filter with channels
    innermost; the same in every process.
    """
    if len(sizes) == 3:
        m, n, k = sizes
        shapes: tuple[tuple[int, ...], ...] = (m, k), (k, n)
    else:
        c = convolution_of(sizes)
        shapes = (
            (c.batch, c.height, c.width, c.channels),
            (c.kernel_h, c.kernel_w, c.channels, sizes[4]),
        )
    random = np.random.default_rng(0)
    a, b = (random.random(shape, np.float32) - np.float32(0.5) for shape in shapes)
    return a, [b.copy() for _ in range(copies)]


def checked(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Raises ValueError if rows of C are not those of A x B."""
    rows = np.unique(np.linspace(0, len(a) - 1, CHECKED).astype(int))
    exact = a[rows].astype(np.float64) @ b
    room = TOLERANCE * (np.abs(a[rows]) @ np.abs(b))
    if (np.abs(c[rows] - exact) > room).any():
        raise ValueError("the product is wrong")


def checked_pixels(sizes: Convolution, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """Raises ValueError if pixels of y [batch, out_h, out_w, n] are not those of the convolution.
    """
    out_h, out_w = sizes.output
    p, s = sizes.padding, sizes.stride
    padded = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0)))
    for pixel in np.unique(np.linspace(0, sizes.batch * out_h * out_w - 1, CHECKED).astype(int)):
        image, row, column = pixel // (out_h * out_w), pixel // out_w % out_h, pixel % out_w
        window = padded[image, row * s :, column * s :][: sizes.kernel_h, : sizes.kernel_w]
        checked(window.reshape(1, -1), w.reshape(window.size, -1), y[image, row, column][None])


def turns(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


_opened: dict[Any, Any] = {}  # gtco's library, which is opened once for all sizes


def open_gtco(job: Job) -> System:
    from gtco.runtime.products import Products

    place = str(job["library"]), int(job["threads"])
    if place not in _opened:
        _opened[place] = Products(*place)
    library = _opened[place]
    a, weights = operands(job["sizes"], job["copies"])
    if a.ndim == 4:
        return images_in_gtco(job, a, weights)
    packed = [library.pack(b) for b in weights]
    c = library(a, packed[0])
    checked(a, weights[0], c)
    calls = [library.runner(a, one.data, c) for one in packed]
    return System("", turns(calls), lambda: [c])


def images_in_gtco(job: Job, x: np.ndarray, weights: list[np.ndarray]) -> System:
    place = "convolutions", str(job["library"]), int(job["threads"])
    if place not in _opened:
        _opened[place] = Convolutions(*place[1:])
    library, c = _opened[place], convolution_of(job["sizes"])
    packed = [library.pack(w, c.stride) for w in weights]
    y = library(x, packed[0], padding=c.padding)
    checked_pixels(c, x, weights[0], y)
    return System("", turns([library.runner(x, one.data, y) for one in packed]), lambda: [y])


def images_in_onednn(job: Job, x: np.ndarray, weights: list[np.ndarray]) -> System:
    import torch

    c = convolution_of(job["sizes"])
    # views whose channels are innermost in memory
    images = torch.from_numpy(x).permute(0, 3, 1, 2)
    window = [c.padding] * 2, [c.stride] * 2, [1, 1], 1
    pack = torch.ops.mkldnn._reorder_convolution_weight.default
    packed = [
        pack(torch.from_numpy(w).permute(3, 2, 0, 1).contiguous(), *window, list(images.shape))
        for w in weights
    ]
    convolve = torch.ops.mkldnn._convolution_pointwise.default
    calls = [lambda w=w: convolve(images, w, None, *window, "none", [], "") for w in packed]
    checked_pixels(c, x, weights[0], calls[0]().permute(0, 2, 3, 1).numpy())
    return System(torch.__version__, turns(calls), list)


def open_onednn(job: Job) -> System:
    import torch

    torch.set_num_threads(int(job["threads"]))
    a, weights = operands(job["sizes"], job["copies"])
    if a.ndim == 4:
        return images_in_onednn(job, a, weights)
    x = torch.from_numpy(a)
    pack = torch.ops.mkldnn._reorder_linear_weight.default
    packed = [pack(torch.from_numpy(b.T.copy()), a.shape[0]) for b in weights]
    multiply = torch.ops.mkldnn._linear_pointwise.default
    checked(a, weights[0], multiply(x, packed[0], None, "none", [], "").numpy())
    calls = [lambda w=w: multiply(x, w, None, "none", [], "") for w in packed]
    return System(torch.__version__, turns(calls), lambda: [calls[0]().numpy()])


def open_onnxruntime(job: Job) -> System:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    from ..harness.peers import onnxruntime_session

    a, weights = operands(job["sizes"], job["copies"])
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    check: Callable[[np.ndarray, np.ndarray, np.ndarray], None] = checked
    if a.ndim == 4:
        c = convolution_of(job["sizes"])
        window = {"strides": [c.stride] * 2, "pads": [c.padding] * 4}
        node = helper.make_node("Conv", ["a", "b"], ["c"], **window)
        given, a = a, np.ascontiguousarray(a.transpose(0, 3, 1, 2))
        shape = [c.batch, job["sizes"][4], *c.output]

        def check_images(_: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
            checked_pixels(c, given, w.transpose(2, 3, 1, 0), y.transpose(0, 2, 3, 1))

        check = check_images
        weights = [np.ascontiguousarray(w.transpose(3, 2, 0, 1)) for w in weights]
    else:
        shape = [len(a), weights[0].shape[1]]
    calls = []
    for b in weights:
        graph = helper.make_graph(
            [node],
            "case",
            [helper.make_tensor_value_info("a", TensorProto.FLOAT, [None] * a.ndim)],
            [helper.make_tensor_value_info("c", TensorProto.FLOAT, [None] * a.ndim)],
            [numpy_helper.from_array(b, "b")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        model.ir_version = 9
        session = onnxruntime_session(
            model.SerializeToString(), int(job["threads"]), NO_SPINNING
        )
        binding = session.io_binding()
        out = np.empty(shape, np.float32)
        binding.bind_cpu_input("a", a)
        binding.bind_output("c", "cpu", 0, np.float32, shape, out.ctypes.data)
        run = session.run_with_iobinding
        calls.append(lambda run=run, binding=binding, held=(out, a): run(binding))
        calls[0]()
        if len(calls) == 1:
            check(a, b, out)
    return System(ort.__version__, turns(calls), list)


OPENERS = {"gtco": open_gtco, "onednn": open_onednn, "onnxruntime": open_onnxruntime}

if __name__ == "__main__":
    serve(OPENERS)
