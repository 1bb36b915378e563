"""DFT and STFT as products, against numpy in float64 and, where it is right, ONNX Runtime."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.few_nodes import by_onnxruntime, compare, model, normal, refused

FEW = settings(max_examples=40, deadline=None)


def as_complex(x):
    x = x.astype(np.float64)
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


def as_parts(y):
    return np.stack([y.real, y.imag], -1).astype(np.float32)


@FEW
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    axis=st.integers(0, 3),
    complex_=st.booleans(),
    inverse=st.booleans(),
    onesided=st.booleans(),
    length=st.sampled_from([None, 1, 2, 4, 7, 12]),
    opset=st.sampled_from([17, 20]),
    negative=st.booleans(),
)
def test_dft(shape, axis, complex_, inverse, onesided, length, opset, negative):
    axis %= len(shape)
    if onesided:
        complex_ = inverse
    if onesided and inverse and length is None and shape[axis] == 1:
        shape[axis] = 3
    x = normal(1, *shape, 2 if complex_ else 1)
    named = axis - len(shape) - 1 if negative else axis
    attrs = {"inverse": int(inverse), "onesided": int(onesided)}
    constants, inputs = {}, ["x"]
    if length is not None:
        constants["n"] = np.asarray(length)
    inputs.append("n" if length is not None else "")
    if opset == 17:
        attrs["axis"] = named
    else:
        constants["axis"] = np.asarray(named)
        inputs.append("axis")
    signal = as_complex(x)
    if onesided and inverse:
        wanted = np.fft.irfft(signal, length, axis)[..., None].astype(np.float32)
    elif onesided:
        wanted = as_parts(np.fft.rfft(signal, length, axis))
    else:
        wanted = as_parts((np.fft.ifft if inverse else np.fft.fft)(signal, length, axis))
    made = model(
        [helper.make_node("DFT", inputs, ["y"], **attrs)], {"x": x}, constants, opset=opset
    )
    compare(made, {"x": x}, [wanted], 2e-6)


def test_dft_by_default():
    """Before opset 20 it is along the first axis after the batch; since then along the last one."""
    x = {"x": normal(1, 2, 8, 4, 1)}
    for opset in (17, 20):
        made = model([helper.make_node("DFT", ["x"], ["y"])], x, opset=opset)
        compare(made, x, by_onnxruntime(made, x), 1e-5)


@FEW
@given(
    batch=st.integers(1, 2),
    length=st.integers(4, 20),
    size=st.integers(1, 8),
    step=st.integers(1, 5),
    complex_=st.booleans(),
    onesided=st.booleans(),
    window=st.sampled_from([None, "constant", "input"]),
    named=st.booleans(),
)
def test_stft(batch, length, size, step, complex_, onesided, window, named):
    size = min(size, length)
    onesided = onesided and not complex_
    x = normal(1, batch, length, 2 if complex_ else 1)
    arrays, constants = {"x": x}, {"step": np.asarray(step)}
    inputs = ["x", "step", "", ""]
    weights = np.ones(size)
    if window:
        weights = normal(2, size)
        (constants if window == "constant" else arrays)["window"] = weights
        inputs[2] = "window"
    if named or not window:
        constants["size"], inputs[3] = np.asarray(size), "size"
    node = helper.make_node("STFT", inputs, ["y"], onesided=int(onesided))
    frames = range(0, length - size + 1, step)
    cut = np.stack([as_complex(x)[:, i : i + size] * weights for i in frames], 1)
    wanted = as_parts(np.fft.rfft(cut) if onesided else np.fft.fft(cut))
    compare(model([node], arrays, constants), arrays, [wanted], 2e-6)


def test_transforms_that_are_not_known_are_refused():
    arrays = {"x": normal(1, 2, 8, 1), "n": np.asarray(8)}
    made = model([helper.make_node("DFT", ["x", "n"], ["y"])], arrays)
    refused(made, r"node 'y' \(DFT\): its dft_length is known only when the model runs")
    arrays = {"x": normal(1, 2, 8, 2)}
    made = model([helper.make_node("DFT", ["x"], ["y"], onesided=1)], arrays)
    refused(made, "onesided takes real values forwards")
    made = model([helper.make_node("STFT", ["x", "step"], ["y"])], arrays, {"step": np.asarray(0)})
    refused(made, "frames of 8 every 0 do not fit")
