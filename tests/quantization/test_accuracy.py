"""Models that are trained on real images keep their accuracy in int8."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import gtco
from gtco.machine.target import detect
from gtco.tensor.intrinsics.table import kinds
from tests.kernels import assert_close
from tests.quantization.digits import accuracy, cnn, digits, vit

POINTS = 0.005  # of accuracy that int8 may lose
WEIGHT_POINTS = 0.002  # that int8 weights alone may lose
FOUR_BIT_POINTS = 0.01  # that int4 weights alone may lose


@pytest.mark.parametrize(("trained", "least"), [(vit, 0.95), (cnn, 0.97)])
def test_int8_keeps_the_accuracy(trained: Callable[[], torch.nn.Module], least: float) -> None:
    """Quantized from PyTorch by a DataLoader with labels. gtco and ONNX Runtime then give the same
    classes of the same file.
    """
    model = trained()
    given, held_out = digits()
    with torch.no_grad():
        wanted = accuracy(model(held_out.images).numpy())
    assert wanted >= least
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(given.images[:128], given.labels[:128]), batch_size=16
    )
    q = gtco.quantize(model, loader, held_out.images[:1])
    onnx.checker.check_model(q.model, full_check=True)
    report = q.report
    assert (report.samples, report.held_out) == (96, 32)
    assert report.share > 0.5 and report.error < 0.1
    assert {layer.float_because for layer in report.layers} <= {
        "",
        "reads the input",
        "makes the output",
        "depthwise",
    }
    (output,) = report.outputs
    assert output.top1 is not None and output.top1 > 0.9 and output.rows == 32

    compiled = gtco.compile_model(q, tune="off", strict=True)
    images = held_out.images.numpy()
    scores = np.concatenate([compiled(image[None]) for image in images])
    got = accuracy(scores)
    assert got >= wanted - POINTS
    tiles = {str(s["schedule"].get("tile", "")).rpartition(":")[0] for s in compiled.stages}
    rows = {kind.name for kind in kinds(detect(), "int8")}
    assert not rows or rows & tiles

    session = onnxruntime.InferenceSession(
        q.model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    others = np.concatenate([session.run(None, {name: image[None]})[0] for image in images])
    # one step of difference goes through the layers behind it
    assert (others.argmax(axis=1) == scores.argmax(axis=1)).mean() > 0.99
    assert abs(accuracy(others) - got) <= POINTS
    difference = np.linalg.norm(others - scores) / np.linalg.norm(others)
    assert difference < 0.02


@pytest.mark.parametrize(
    ("trained", "least", "bits", "lost"),
    [
        (vit, 0.95, 8, WEIGHT_POINTS),
        (cnn, 0.97, 8, WEIGHT_POINTS),
        (vit, 0.95, 4, FOUR_BIT_POINTS),
    ],
)
def test_weights_alone_keep_the_accuracy(
    trained: Callable[[], torch.nn.Module], least: float, bits: int, lost: float
) -> None:
    model = trained()
    _, held_out = digits()
    with torch.no_grad():
        wanted = accuracy(model(held_out.images).numpy())
    assert wanted >= least
    q = gtco.quantize_weights(model, held_out.images[:1], bits=bits)
    assert len(q.quantized) >= 3
    compiled = gtco.compile_model(q, tune="off", strict=True)
    scores = np.concatenate([compiled(image[None]) for image in held_out.images.numpy()])
    print(f"accuracy {accuracy(scores)} of {wanted}")
    assert accuracy(scores) >= wanted - lost
    assert any(t.startswith(f"int{bits}[") for stage in compiled.stages for t in stage["inputs"])
    plain = onnxruntime.SessionOptions()  # else it rounds activations to 8 bits
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        q.model.SerializeToString(), plain, providers=["CPUExecutionProvider"]
    )
    few = held_out.images[:8].numpy()
    others = [session.run(None, {session.get_inputs()[0].name: image[None]})[0] for image in few]
    assert_close(scores[: len(few)], np.concatenate(others), 1e-4)


def test_compile_model_quantizes() -> None:
    """precision="int8" gives the library of the quantized file."""
    given, held_out = digits()
    image = held_out.images[:1]
    compiled = gtco.compile_model(
        cnn(),
        image,
        precision="int8",
        data=given.images[:48].numpy(),
        observer="minmax",
        exclude=["head"],
        tune="off",
    )
    found = compiled.report.quantization
    assert found is not None and found.observer == "minmax"
    kept = {layer.label: layer.float_because for layer in found.layers}
    assert kept["head"] == "excluded" and kept["down"] == ""
    with torch.no_grad():
        wanted = cnn()(image).numpy()
    got = compiled(image.numpy())
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 0.2
    assert not np.array_equal(got, wanted)
    assert compiled.report.phases[0][0] == "read"
