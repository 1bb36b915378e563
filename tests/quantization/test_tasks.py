"""The verdict on maps of classes and on boxes: what is recognised, and figures that are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gtco.cli.commands.quantize_command import outputs_table
from gtco.quantization.tasks import class_maps, detections
from gtco.quantization.verdict import OutputVerdict, compare
from tests.quantization.models import Evaluated, images, quantized

IMAGE = {"image": (2, 3, 64, 96)}
Shapes = Mapping[str, tuple[int, ...]]


@pytest.mark.parametrize(
    "outputs",
    [
        {"logits": (2, 150, 16, 24)},
        {"logits": (2, 21, 64, 96)},
        {"out": (2, 21, 32, 48), "aux": (2, 21, 32, 48)},
        {"logits": (2, 19, 16, 24), "scores": (2, 5), "tokens": (2, 64, 32)},
    ],
)
def test_maps_of_classes(outputs: Shapes) -> None:
    assert set(class_maps(outputs, IMAGE)) == {n for n, s in outputs.items() if len(s) == 4}
    more = {**IMAGE, "prompt": (2, 7)}
    assert class_maps(outputs, more) == class_maps(outputs, IMAGE)


@pytest.mark.parametrize(
    "outputs",
    [
        {"logits": (2, 10)},
        {"tokens": (2, 197, 192)},
        {"depth": (2, 1, 64, 96)},
        {"flow": (2, 2, 16, 24)},  # or two classes
        {"cleaned": (2, 3, 64, 96)},
        {"enlarged": (2, 3, 256, 384)},
        {"enlarged": (2, 48, 128, 192)},
        {"latent": (2, 8, 8, 12)},
        {"feature": (2, 512, 2, 3)},
        {"p2": (2, 64, 16, 24), "p3": (2, 64, 8, 12)},
        {"masks": (2, 100, 16, 24), "logits": (2, 100, 81)},  # of queries
        {"logits": (1, 21, 16, 24)},
        {"logits": (2, 21, 24, 16)},
    ],
)
def test_what_may_be_something_else_is_no_map(outputs: Shapes) -> None:
    assert class_maps(outputs, IMAGE) == ()


@pytest.mark.parametrize(
    "inputs",
    [
        {"features": (2, 256, 64, 96)},
        {"left": (2, 3, 64, 96), "right": (2, 3, 64, 96)},
        {"image": (2, 64, 96, 3)},
        {"points": (2, 3)},
    ],
)
def test_a_map_of_classes_is_of_one_image(inputs: Shapes) -> None:
    assert class_maps({"logits": (2, 21, 64, 96)}, inputs) == ()


def test_boxes_and_their_scores() -> None:
    shapes = {"logits": (1, 100, 92), "boxes": (1, 100, 4), "count": (1, 5)}
    assert detections(shapes) == ("logits", "boxes")
    for other in (
        {"boxes": (1, 100, 4)},
        {"logits": (1, 100, 4), "boxes": (1, 100, 4)},
        {"logits": (1, 100, 92), "boxes": (1, 50, 4)},
        {"logits": (1, 100, 1), "boxes": (1, 100, 4)},
        {"logits": (1, 1, 92), "boxes": (1, 1, 4)},
        {"logits": (1, 100, 92), "boxes": (1, 100, 4), "tokens": (1, 100, 256)},
        {"logits": (1, 100, 92), "boxes": (1, 100, 4), "earlier": (1, 100, 4)},
    ):
        assert detections(other) is None


def one_hot(classes: np.ndarray, count: int) -> np.ndarray:
    """Classes [N, H, W] as scores [N, count, H, W]."""
    return np.moveaxis(np.eye(count, dtype=np.float32)[classes], -1, 1)


def test_iou_of_maps_by_hand() -> None:
    """Two samples; classes 0 and 3 in the float model, 1 appears only in the other."""
    one = np.array([[[0, 0, 3, 3], [0, 0, 3, 3]]])
    two = np.array([[[0, 0, 3, 3], [1, 0, 0, 3]]])
    wanted = [{"logits": one_hot(a, 5)} for a in (one, one)]
    got = [{"logits": one_hot(a, 5)} for a in (two, one)]
    (found,) = compare(wanted, got, {"image": (1, 3, 8, 16)})
    assert found.maps is not None and found.boxes is None and found.top1 is None
    # 0: 7 of 9 pixels, 3: 7 of 8, 1: 0 of 1
    assert found.maps.mean_iou == pytest.approx((7 / 9 + 7 / 8 + 0) / 3)
    assert (found.maps.classes, found.maps.same) == (3, 14 / 16)
    (plain,) = compare(wanted, got)
    assert plain.maps is None and plain.error == found.error
    (itself,) = compare(wanted, wanted, {"image": (1, 3, 8, 16)})
    assert itself.maps is not None and itself.maps.mean_iou == itself.maps.same == 1


SCORES = np.array([[[9, 0, 0], [0, 9, 0], [0, 0, 9], [5, 0, 0]]], np.float32)  # one finds nothing
CENTRES = np.array(
    [[[0.5, 0.5, 0.2, 0.4], [0.3, 0.3, 0.2, 0.2], [0.9, 0.9, 0.1, 0.1], [0.5, 0.5, 0.0, 0.0]]],
    np.float32,
)


def detected(scores: np.ndarray, boxes: np.ndarray) -> OutputVerdict:
    """The verdict on boxes and scores beside those of the module."""
    wanted, got = {"s": SCORES, "b": CENTRES}, {"s": scores, "b": boxes}
    first, second = compare([wanted], [got], {"image": (1, 3, 8, 8)})
    assert first.boxes is None and first.maps is None and second.maps is None
    return second


def test_shift_and_iou_of_boxes_by_hand() -> None:
    itself = detected(SCORES, CENTRES).boxes
    assert itself is not None and not itself.corners
    assert (itself.queries, itself.shift, itself.mean_iou, itself.same_class) == (3, 0, 1, 1)
    moved, scores = CENTRES.copy(), SCORES.copy()
    moved[0, 0, 0] += 0.1  # by half of its width: a third is in both
    moved[0, 2] = 0.5  # of the query that finds nothing
    moved[0, 3, 2:] = 0.2  # beside an empty box
    scores[0, 1] = [9, 0, 0]
    found = detected(scores, moved).boxes
    assert found is not None
    assert found.shift == pytest.approx((0.1 + 0 + 0.4) / 3 / 4)
    assert found.mean_iou == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert found.queries == 3 and found.same_class == pytest.approx(2 / 3)


def test_corners_are_told_from_centres() -> None:
    corners = np.array([[[0.1, 0.1, 0.3, 0.3], [0.2, 0.2, 0.2, 0.4]]], np.float32)
    scores = np.array([[[9, 0, 0], [0, 9, 0]]], np.float32)
    moved = corners.copy()
    moved[0, 0, 2] = 0.5  # twice as wide
    first = {"s": scores, "b": corners}
    _, found = compare([first], [{"s": scores, "b": moved}], {})
    assert found.boxes is not None and found.boxes.corners
    assert found.boxes.mean_iou == pytest.approx((0.5 + 1) / 2)


def test_boxes_that_are_none_or_of_nothing() -> None:
    scores = np.zeros((1, 2, 3), np.float32)
    far = np.full((1, 2, 4), 1.5, np.float32)
    _, found = compare([{"s": scores, "b": far}], [{"s": scores, "b": far}], {})
    assert found.boxes is None
    scores[..., 2] = 1  # no query finds anything
    near = np.full((1, 2, 4), 0.5, np.float32)
    _, found = compare([{"s": scores, "b": near}], [{"s": scores, "b": near}], {})
    assert found.boxes is not None and found.boxes.queries == 0 and found.boxes.shift is None
    assert outputs_table([found]).rows[0][-3:] == ("-", "-", "-")


# Ends with products that stay in float; those between are quantized.
SEGMENTER = """<ir_version: 9, opset_import: ["" : 17]>
segmenter (float[1,3,8,8] image) => (float[1,6,4,4] logits) {
    a = Conv <strides = [2, 2], kernel_shape = [2, 2]> (image, w3)
    b = Relu(a)
    c = Conv <kernel_shape = [1, 1]> (b, w)
    d = Relu(c)
    logits = Conv <kernel_shape = [1, 1]> (d, w6)
}"""
DETECTOR = """<ir_version: 9, opset_import: ["" : 17]>
detector (float[1,3,8,8] image) => (float[1,16,5] logits, float[1,16,4] boxes)
<int64[3] tokens = {1, 16, 12}> {
    p = Reshape(image, tokens)
    a = MatMul(p, wa)
    b = Relu(a)
    c = MatMul(b, wb)
    d = Relu(c)
    logits = MatMul(d, wc)
    e = MatMul(d, wd)
    boxes = Sigmoid(e)
}"""
WEIGHTS = {
    "w3": (16, 3, 2, 2),
    "w": (16, 16, 1, 1),
    "w6": (6, 16, 1, 1),
    "wa": (12, 24),
    "wb": (24, 24),
    "wc": (24, 5),
    "wd": (24, 4),
}


def drawn(text: str) -> onnx.ModelProto:
    """The model with drawn weights."""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(2)
    used = {name for node in model.graph.node for name in node.input}
    for name, shape in WEIGHTS.items():
        if name in used:
            value = rng.standard_normal(shape) / np.sqrt(np.prod(shape) / max(shape[0], shape[-1]))
            model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model


def both(model: onnx.ModelProto, other: onnx.ModelProto, data: np.ndarray, name: str) -> np.ndarray:
    """An output of both models, by ONNX Runtime: [2, samples, ...]."""
    found = [[Evaluated(m).run({"image": x[None]})[name][0] for x in data] for m in (model, other)]
    return np.array(found)


def test_a_segmenter_has_the_iou_of_its_file(tmp_path: Path) -> None:
    model, data = drawn(SEGMENTER), images(40)
    q = quantized(model, data, observer="minmax")
    (output,) = q.report.outputs
    one, other = both(model, q.model, data[3::4], "logits").argmax(axis=2)
    union = [((one == c) | (other == c)).sum() for c in range(6)]
    iou = [((one == c) & (other == c)).sum() / u for c, u in enumerate(union) if u]
    assert output.maps is not None and output.boxes is None
    # a pixel where two classes are near may differ between two evaluations
    assert output.maps.mean_iou == pytest.approx(np.mean(iou), abs=0.02)
    assert 0.5 < output.maps.mean_iou < 1 and output.maps.classes == len(iou)
    saved = json.loads(q.report.save(tmp_path / "r.json").read_text())["outputs"][0]
    assert saved["class_maps"] == output.maps.to_json() and saved["boxes"] is None
    (row,) = outputs_table(q.report.outputs).rows
    assert row[-1] == f"{100 * output.maps.mean_iou:.1f} % of {len(iou)} classes"


def test_a_detector_has_the_shift_of_its_file(tmp_path: Path) -> None:
    model, data = drawn(DETECTOR), images(40)
    q = quantized(model, data, observer="minmax")
    first, second = q.report.outputs
    boxes = both(model, q.model, data[3::4], "boxes")
    scores = both(model, q.model, data[3::4], "logits")
    found = scores[0].argmax(axis=-1) != 4
    assert first.boxes is None and second.boxes is not None and not second.boxes.corners
    assert second.boxes.queries == found.sum() > 10
    shift = np.abs(boxes[0] - boxes[1])[found].mean()
    assert second.boxes.shift == pytest.approx(shift, rel=0.05) and 0 < shift < 0.02
    assert second.boxes.mean_iou is not None and 0.9 < second.boxes.mean_iou < 1
    saved = json.loads(q.report.save(tmp_path / "r.json").read_text())["outputs"][1]
    assert saved["boxes"]["format"] == "centre and size" and saved["class_maps"] is None
    headings = [column.heading for column in outputs_table(q.report.outputs).columns]
    assert headings[-3:] == ["box shift", "box IoU", "same class"] and "mean IoU" not in headings
