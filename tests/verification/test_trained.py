"""Verification of trained models: probabilities of 1e-8 and saturated scores are not failures, but
broken models are still caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gtco
from gtco.verification import verify
from tests.verification.changed import Changed, compiled_here
from tests.verification.trained import BYTES, PADDING, example, exported, trained

NAMES = ("vit", "map", "text")
_built: dict[tuple[str, str], gtco.Model] = {}


def compiled(name: str, precision: str = "fp32") -> gtco.Model:
    """Compiled once."""
    if (name, precision) not in _built:
        _built[name, precision] = compiled_here(exported(name), tune="off", precision=precision)
    return _built[name, precision]


def test_the_models_are_sure() -> None:
    import torch

    for name in NAMES:
        y = trained(name)(example(name))
        assert y.min() < 1e-6 and y.max() > 0.9, name
    text = trained("text")
    assert torch.isfinite(text(torch.full((1, 40), PADDING))).all()  # nothing but padding


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_right_models_pass(name: str, precision: str) -> None:
    report = verify(compiled(name, precision), exported(name))
    assert report.passed and report.unjudged is None
    if name == "text":
        assert [d.case for d in report.differences] == ["random", "runs", "narrow"]
    if name == "map" and precision == "fp32":
        assert any(d.judged for d in report.differences)


def test_a_right_model_passes_against_pytorch() -> None:
    report = verify(compiled("vit"), trained("vit"), example_inputs=(example("vit"),))
    assert report.passed and report.differences[0].case == "example"


def lane(number: int, of: int, factor: float) -> Callable[[np.ndarray], None]:
    def change(value: np.ndarray) -> None:
        value[..., number::of] *= np.float32(factor)

    return change


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [lane(0, 4, 0.0), lane(3, 4, 0.0), lane(1, 2, 1.5)])
def test_a_broken_lane_is_caught(
    name: str, precision: str, change: Callable[[np.ndarray], None]
) -> None:
    report = verify(Changed(compiled(name, precision), change), exported(name), check=False)
    assert report.failures


def test_an_error_of_a_twentieth_of_tiny_probabilities_is_caught() -> None:
    """Rows without strokes are 1e-9 throughout, and their errors are relative to that; ONNX
    Runtime's logistic could not show them. Images like those of the training have such rows, so
    some are given as examples.
    """
    given = (example("map"),)

    def tails(value: np.ndarray) -> None:
        value[value < 1e-6] *= np.float32(1.05)

    assert verify(compiled("map"), trained("map"), example_inputs=given).passed
    changed = Changed(compiled("map"), tails)
    assert verify(changed, trained("map"), example_inputs=given, check=False).failures


def edited(
    name: str, find: Callable[[np.ndarray], bool], change: Callable[[np.ndarray], None]
) -> Any:
    """The model with a change to the first constant that fits: a compiled model must not be like
    it.
    """
    model = onnx.ModelProto()
    model.CopyFrom(exported(name))
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).copy()
        if find(array):
            change(array)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            return model
    raise AssertionError("no such constant")


def test_a_swapped_head_is_caught() -> None:
    def swap(qkv: np.ndarray) -> None:
        """Exchanges the values of the first two heads of four, which are 8 wide."""
        first = 64 if qkv.shape[-1] == 96 else None
        axis = qkv.reshape(32, 96) if first is not None else qkv.T
        axis[:, 64:80] = np.concatenate([axis[:, 72:80], axis[:, 64:72]], axis=1)

    other = edited("vit", lambda a: a.shape in ((32, 96), (96, 32)), swap)
    for precision in ("fp32", "bf16"):
        report = verify(compiled("vit", precision), other, check=False)
        assert "random" in {d.case for d in report.failures}


def test_a_dropped_mask_is_caught() -> None:
    """Attention sees the padding; the mean still leaves it out."""

    def is_lowest(array: np.ndarray) -> bool:
        return array.size == 1 and float(array.reshape(())) == -1e9

    model = onnx.ModelProto()
    model.CopyFrom(exported("text"))
    nodes = [n for n in model.graph.node if n.op_type == "Constant"]
    (low,) = (n for n in nodes if is_lowest(numpy_helper.to_array(n.attribute[0].t)))
    low.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(0, np.float32)))
    assert verify(compiled("text"), model, check=False).failures


def test_a_wrong_row_of_the_table_is_caught() -> None:
    def second_half(table: np.ndarray) -> None:
        table[200:] *= -1

    other = edited("text", lambda a: a.shape == (BYTES, 32), second_half)
    assert verify(compiled("text"), other, check=False).failures
