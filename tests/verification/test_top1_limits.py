"""The comparison of first classes at its limits: how many images it takes, and what the tolerance
may change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from gtco.runtime.plan import TensorSpec
from gtco.verification.report import Top1
from gtco.verification.top1 import same_class_first

TOLERANCE = 0.01
ROW = 6


@dataclass(frozen=True)
class Fixed:
    """A model of batches whose images all have the same scores."""

    batch: int
    scores: np.ndarray

    @property
    def inputs(self):
        return [TensorSpec("x", "float32", (self.batch, 3))]

    @property
    def outputs(self):
        return [TensorSpec("y", "float32", (self.batch, ROW))]

    def run(self, inputs):
        assert inputs["x"].shape == (self.batch, 3)
        return {"y": np.tile(self.scores, (self.batch, 1))}


def compared(batch, actual, expected):
    def reference(_):
        return [np.tile(expected, (batch, 1))]

    return same_class_first(Fixed(batch, actual), reference, 0, None, {}, TOLERANCE)


def scores(first, second):
    return np.float32([first, second, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("batch", "images"), [(1, 32), (5, 35), (31, 62), (32, 32), (33, 33), (100, 100)]
)
def test_whole_batches_of_32_images_or_more_are_compared(batch, images):
    one, other = scores(1, 0), scores(0, 1)
    assert compared(batch, one, one) == Top1(images, images, 0)
    assert compared(batch, other, one) == Top1(images, 0, images)


@pytest.mark.parametrize(
    ("second", "wrong"),
    [
        (0.995, 0),  # either may be off by 0.01 of its size
        (0.985, 0),  # both of them have to be
        (0.975, 32),  # not even both can make that up
    ],
)
def test_two_scores_may_be_off_by_the_tolerance_each(second, wrong):
    assert compared(1, scores(0.9, 1), scores(1, second)) == Top1(32, 0, wrong)
