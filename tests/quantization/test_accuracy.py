"""Models that are trained on real images keep their accuracy in int8."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import gtco
from gtco.frontend.weights import whole
from gtco.machine.target import detect
from gtco.quantization.reading import read_model
from gtco.tensor.intrinsics.table import kinds
from tests.by_constants import by_constants
from tests.few_nodes import by_onnxruntime
from tests.kernels import assert_close
from tests.quantization.digits import Digits, cnn, digits, right, swin, vit
from tests.quantization.models import quantized

LEAST = 0.97  # of the test images right in float32
POINTS = 0.005  # of accuracy that int8 may lose
WEIGHT_POINTS = 0.002  # that int8 weights alone may lose
FOUR_BIT_POINTS = 0.01  # that int4 weights alone may lose
MODELS = [(vit, 8), (swin, 16), (cnn, 8)]  # with the sides of their images
# Those of one model are found by gtco's library with switches. ONNX Runtime does the same sooner.
QUANTIZE = {vit: gtco.quantize, swin: quantized, cnn: quantized}

Train = Callable[[], torch.nn.Module]


@cache
def exported(trained: Train, side: int) -> tuple[onnx.ModelProto, int]:
    """The trained model, and how many test images it has right."""
    _, held_out = digits(side)
    model = trained()
    with torch.no_grad():
        found = right(model(held_out.images).numpy())
    assert found >= LEAST * len(held_out.images)
    read = read_model(model, held_out.images[:1])
    return whole(read.skeleton, read.weights), found


def scores_of(run: Callable[[np.ndarray], np.ndarray], images: Digits) -> np.ndarray:
    """[N, 10] of a model for one image."""
    return np.concatenate([run(image[None]) for image in images.images.numpy()])


@pytest.mark.parametrize(("trained", "side"), MODELS)
def test_int8_keeps_the_accuracy(trained: Train, side: int) -> None:
    """gtco and ONNX Runtime then give the same classes of the same file."""
    given, held_out = digits(side)
    model, wanted = exported(trained, side)
    may_lose = POINTS * len(held_out.images)
    q = QUANTIZE[trained](model, given.images[:128].numpy())
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

    with by_constants():  # else all products may be faster in float32
        compiled = gtco.compile_model(q, tune="off", strict=True)
    scores = scores_of(compiled, held_out)
    assert wanted - right(scores) <= may_lose
    tiles = {str(s["schedule"].get("tile", "")).rpartition(":")[0] for s in compiled.stages}
    rows = {kind.name for kind in kinds(detect(), "int8")}
    assert not rows or rows & tiles

    session = onnxruntime.InferenceSession(
        q.model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    others = scores_of(lambda image: session.run(None, {name: image})[0], held_out)
    # one step of difference goes through the layers behind it
    assert (others.argmax(axis=1) == scores.argmax(axis=1)).mean() > 0.99
    assert abs(right(others) - right(scores)) <= may_lose
    difference = np.linalg.norm(others - scores) / np.linalg.norm(others)
    assert difference < 0.02


@pytest.mark.parametrize(
    ("trained", "side", "bits", "lost"),
    [*((*model, 8, WEIGHT_POINTS) for model in MODELS), (*MODELS[0], 4, FOUR_BIT_POINTS)],
)
def test_weights_alone_keep_the_accuracy(trained: Train, side: int, bits: int, lost: float) -> None:
    _, held_out = digits(side)
    model, wanted = exported(trained, side)
    q = gtco.quantize_weights(model, bits=bits)
    assert len(q.quantized) == len(q.products) >= 3  # depthwise convolutions too
    with by_constants():  # else all products may be faster in float32
        compiled = gtco.compile_model(q, tune="off", strict=True)
    scores = scores_of(compiled, held_out)
    assert wanted - right(scores) <= lost * len(held_out.images)
    assert any(t.startswith(f"int{bits}[") for stage in compiled.stages for t in stage["inputs"])
    few, name = held_out.images[:8].numpy(), q.model.graph.input[0].name
    others = [by_onnxruntime(q.model, {name: image[None]})[0] for image in few]
    assert_close(scores[: len(few)], np.concatenate(others), 1e-4)


def test_compile_model_quantizes() -> None:
    """precision="int8" gives the library of the quantized file: of a PyTorch module, by a
    DataLoader with labels.
    """
    given, _ = digits()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(192, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()]
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(32, 10)).eval()
    image = given.images[:1]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(given.images[:48], given.labels[:48]), batch_size=16
    )
    compiled = gtco.compile_model(
        model,
        image,
        precision="int8",
        data=loader,
        observer="minmax",
        exclude=["1"],
        tune="off",
    )
    found = compiled.report.quantization
    assert found is not None and found.observer == "minmax"
    assert (found.samples, found.held_out) == (36, 12)
    kept = {layer.label: layer.float_because for layer in found.layers}
    assert kept == {"1": "excluded", "3": "", "5": "makes the output"}
    with torch.no_grad():
        wanted = model(image).numpy()
    got = compiled(image.numpy())
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 0.2
    assert not np.array_equal(got, wanted)
    assert compiled.report.phases[0][0] == "read"
