"""Checks that a classifier still has the same first class. It is used for models that are compiled
in less than fp32: the errors are not bugs, but may change answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import is_float, numpy_dtype
from gtco.verification.cases import Range, Spec, usual
from gtco.verification.compare import scales
from gtco.verification.report import Top1
from gtco.verification.roles import Role

Array = NDArray[Any]

IMAGES = 32


def is_classifier(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> bool:
    """True if there is one output [N, classes], classes > 1, and an input of floats for
    N images.
    """
    if len(outputs) != 1 or len(outputs[0].shape) != 2 or outputs[0].shape[1] < 2:
        return False
    batch = outputs[0].shape[0]
    images = [s for s in inputs if s.shape[:1] == (batch,) and is_float(numpy_dtype(s.dtype))]
    return batch > 0 and bool(images) and is_float(numpy_dtype(outputs[0].dtype))


def same_class_first(
    model: Any,
    reference: Callable[[Mapping[str, Array]], Sequence[Array]],
    seed: int,
    roles: Mapping[str, Role] | None,
    ranges: Mapping[str, Range],
    tolerance: float,
) -> Top1:
    """Compares both on :data:`IMAGES` random images or a few more, in batches of the
    model's size.
    """
    rng = np.random.default_rng([seed, IMAGES])
    batch = model.outputs[0].shape[0]
    images = agreed = wrong = 0
    for _ in range(ceil(IMAGES / batch)):
        inputs = usual(model.inputs, rng, roles, ranges)
        (expected,), (actual,) = reference(inputs), model.run(inputs).values()
        same, decided = _first(np.asarray(actual), np.asarray(expected), tolerance)
        images += batch
        agreed += int(same.sum())
        wrong += int((~same & decided).sum())
    return Top1(images, agreed, wrong)


def _first(actual: Array, expected: Array, tolerance: float) -> tuple[Array, Array]:
    """For each image: whether the same class is first, and whether the tolerance could not change
    that.
    """
    wide = expected.astype(np.float64)
    one, other = wide.argmax(axis=1), actual.astype(np.float64).argmax(axis=1)
    rows = np.arange(len(wide))
    allowed = tolerance * scales(wide, tolerance, expected.dtype)
    apart = wide[rows, one] - wide[rows, other]
    return one == other, apart > allowed[rows, one] + allowed[rows, other]
