"""The nine models of the paper's Table I at their full widths and depths, from the source to a
library that agrees with its reference on every case of ``verify``: ``make check-paper-models``.

Images are smaller than in the table: larger ones use the same kernels with more tasks. Models of up
to 400 MB of weights go through ONNX, and the larger ones go in as modules.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import gtco
from models import MODELS, create, example_inputs, export_onnx

SIZES = {
    "detr-resnet50-e3": (256, 333),
    "detr-resnet50-e6": (224, 320),
    "detr-resnet50-e12": (320, 224),
    "setr-naive-base": (192, 192),
    "setr-naive": (128, 128),
    "setr-pup": (128, 128),
    "vit-base-16": (224, 224),
    "vit-large-16": (160, 160),
    "vit-huge-14": (112, 112),
}
THROUGH_ONNX = 100  # models of at most this many million parameters


def test_they_are_the_nine_of_the_table() -> None:
    table = {name for name, spec in MODELS.items() if spec.params_millions is not None}
    assert table == set(SIZES)


@pytest.mark.scheduled
@pytest.mark.parametrize("name", SIZES)
def test_paper_model(name: str, tmp_path: Path) -> None:
    size = SIZES[name]
    model, inputs = create(name, image_size=size), example_inputs(name, image_size=size)
    library = tmp_path / "model.so"
    if (MODELS[name].params_millions or 0) < THROUGH_ONNX:
        path = export_onnx(model, inputs, tmp_path / "model.onnx")
        del model
        report = gtco.compile_to_file(path, library, verify=True)
    else:
        report = gtco.compile_to_file(model, library, inputs, verify=True)
    found = report.verification
    print(f"\n{name}: {found}, compiled in {report.seconds:.0f} s")
    assert found.passed and {"random", "large", "spike"} <= {d.case for d in found.differences}
    random = [d for d in found.differences if d.case == "random"]
    assert max(d.relative for d in random) < 1e-4, random
    assert not any(d.unstable for d in found.differences)
    fallbacks = [s["operators"] for s in report.stages if s["schedule"]["sketch"] == "fallback"]
    assert not fallbacks and not report.notes, (fallbacks, report.notes)
