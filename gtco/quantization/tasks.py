"""Outputs that are maps of classes or boxes of objects: recognised by their shapes, and what those
of two models have in common.

Where a shape may also mean something else, nothing is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

Array = NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]

_COLOURS = (1, 3, 4)  # channels of an image
_STRIDES = (1, 2, 4)  # pixels of the image for one of a map of classes


@dataclass(frozen=True)
class ClassMaps:
    """The class of each pixel, which is the channel with the largest value, in two models.

    - ``mean_iou``: pixels with this class in both, over pixels with it in one at least, of all
      samples; the mean over the classes that either has
    - ``classes``: how many these are
    - ``same``: the share of pixels of the same class
    """

    mean_iou: float
    classes: int
    same: float

    def to_json(self) -> dict[str, Any]:
        return {"mean_iou": self.mean_iou, "classes": self.classes, "pixel_agreement": self.same}


@dataclass(frozen=True)
class Boxes:
    """The boxes of the queries that the float model finds something by, in two models.

    - ``queries``: how many these are, over all samples; the figures are None if none is
    - ``shift``: the mean difference of a coordinate, where 1 is the image's side
    - ``mean_iou``: of both boxes of a query
    - ``same_class``: the share of queries whose largest score is of the same class
    - ``corners``: True if a box is two corners, False if it is a centre and a size
    """

    queries: int
    shift: float | None
    mean_iou: float | None
    same_class: float | None
    corners: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "queries": self.queries,
            "mean_shift": self.shift,
            "mean_iou": self.mean_iou,
            "class_agreement": self.same_class,
            "format": "corners" if self.corners else "centre and size",
        }


def class_maps(outputs: Shapes, inputs: Shapes) -> tuple[str, ...]:
    """The outputs [N, classes, H, W] that are scores of each pixel's classes, of models with one
    image [N, 1, 3 or 4, H, W] and perhaps other inputs. ``outputs``: those of floats.

    H and W are those of the image, or half or a quarter of them: features and latent images are
    smaller, enlarged images larger. Images as outputs have one channel or as many as the input, and
    pairs of coordinates two. Other outputs [N, C, H, W] have the same shape, or these are features
    of several scales. No other output has an axis of C behind N: those would be masks of queries.
    """
    images = [shape for shape in inputs.values() if len(shape) == 4]
    maps = {name: shape for name, shape in outputs.items() if len(shape) == 4}
    if len(images) != 1 or images[0][1] not in _COLOURS or len(set(maps.values())) != 1:
        return ()
    batch, colours, height, width = images[0]
    count, classes, *size = next(iter(maps.values()))
    strides = [s for s in _STRIDES if size == [-(-height // s), -(-width // s)]]
    others = [shape for shape in outputs.values() if len(shape) == 3]
    if (
        count != batch
        or classes <= 2
        or classes == colours
        or min(size) <= 1
        or not strides
        or any(shape[1] == classes for shape in others)
    ):
        return ()
    return tuple(maps)


def detections(outputs: Shapes) -> tuple[str, str] | None:
    """The outputs [N, queries, classes] of scores and [N, queries, 4] of boxes, if there is one of
    each and no further output of three axes. ``outputs``: those of floats. Whether they are boxes
    is decided by their values too, see :class:`BoxSums`.
    """
    found = {name: shape for name, shape in outputs.items() if len(shape) == 3}
    boxes = [name for name, shape in found.items() if shape[2] == 4]
    scores = [name for name, shape in found.items() if shape[2] > 1 and shape[2] != 4]
    if len(found) != 2 or len(boxes) != 1 or len(scores) != 1:
        return None
    same = found[boxes[0]][:2] == found[scores[0]][:2] and found[boxes[0]][1] > 1
    return (scores[0], boxes[0]) if same else None


class MapSums:
    """The sums over all samples of one output [N, classes, H, W]."""

    def __init__(self) -> None:
        self.wanted: Array | None = None

    def add(self, wanted: Array, got: Array) -> None:
        classes = wanted.shape[1]
        one, other = wanted.argmax(axis=1).ravel(), got.argmax(axis=1).ravel()
        counts = (
            numpy.bincount(one, minlength=classes),
            numpy.bincount(other, minlength=classes),
            numpy.bincount(one[one == other], minlength=classes),
        )
        if self.wanted is None:
            self.wanted, self.got, self.both = counts
        else:
            self.wanted, self.got, self.both = (
                a + b for a, b in zip((self.wanted, self.got, self.both), counts, strict=True)
            )

    def verdict(self) -> ClassMaps | None:
        if self.wanted is None:
            return None
        union = self.wanted + self.got - self.both
        seen = union > 0
        mean = float((self.both[seen] / union[seen]).mean())
        return ClassMaps(mean, int(seen.sum()), float(self.both.sum() / self.wanted.sum()))


class BoxSums:
    """The sums over all samples of scores [N, queries, classes] and boxes [N, queries, 4].

    The last class is that of queries that find nothing, as in DETR; in models without such a class
    it counts as one of them. Boxes are in 0 to 1, or there is no verdict. If in every box of the
    float model the third number is at least the first, and the fourth at least the second, these
    are corners; otherwise a centre and a size.
    """

    def __init__(self) -> None:
        self.queries = self.same = 0
        self.shift = 0.0
        self.overlap = {True: 0.0, False: 0.0}  # sums if boxes are corners, and if they are not
        self.are_boxes = self.corners = True

    def add(self, wanted: tuple[Array, Array], got: tuple[Array, Array]) -> None:
        """Each: scores and boxes."""
        (scores, boxes), (other_scores, others) = wanted, got
        first = scores.argmax(axis=-1)
        found = first != scores.shape[-1] - 1
        self.are_boxes &= bool(((boxes >= 0) & (boxes <= 1)).all())
        self.corners &= bool((boxes[..., 2:] >= boxes[..., :2]).all())
        self.queries += int(found.sum())
        self.same += int((first == other_scores.argmax(axis=-1))[found].sum())
        one, other = (b[found].astype(numpy.float64) for b in (boxes, others))
        self.shift += float(numpy.abs(one - other).sum()) / 4
        self.overlap[True] += float(_iou(one, other).sum())
        self.overlap[False] += float(_iou(_cornered(one), _cornered(other)).sum())

    def verdict(self) -> Boxes | None:
        if not self.are_boxes:
            return None
        n = self.queries
        if not n:
            return Boxes(0, None, None, None, self.corners)
        overlap = self.overlap[self.corners]
        return Boxes(n, self.shift / n, overlap / n, self.same / n, self.corners)


class TaskSums:
    """The sums of all outputs of a model that are recognised, over all samples."""

    def __init__(self, outputs: Shapes, inputs: Shapes) -> None:
        self._maps = {name: MapSums() for name in class_maps(outputs, inputs)}
        self._pair = detections(outputs)
        self._boxes = BoxSums()

    def add(self, wanted: Mapping[str, Array], got: Mapping[str, Array]) -> None:
        """A sample: the outputs by name."""
        for name, sums in self._maps.items():
            sums.add(wanted[name], got[name])
        if self._pair:
            scores, boxes = self._pair
            self._boxes.add((wanted[scores], wanted[boxes]), (got[scores], got[boxes]))

    def maps(self, name: str) -> ClassMaps | None:
        """The verdict on the output as a map of classes; None for an output of another kind."""
        return self._maps[name].verdict() if name in self._maps else None

    def boxes(self, name: str) -> Boxes | None:
        """The verdict on the output as boxes; None if it has none."""
        return self._boxes.verdict() if self._pair and name == self._pair[1] else None


def _cornered(boxes: Array) -> Array:
    """Centres and sizes [n, 4] as corners."""
    half = boxes[:, 2:] / 2
    return numpy.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _iou(one: Array, other: Array) -> Array:
    """Of boxes as corners, [n, 4] each. Two empty boxes: 1 if they are equal, otherwise 0."""
    low, high = numpy.maximum(one[:, :2], other[:, :2]), numpy.minimum(one[:, 2:], other[:, 2:])
    both = numpy.maximum(high - low, 0).prod(axis=1)
    areas = [numpy.maximum(b[:, 2:] - b[:, :2], 0).prod(axis=1) for b in (one, other)]
    union = areas[0] + areas[1] - both
    equal = (one == other).all(axis=1).astype(numpy.float64)
    return numpy.where(union > 0, both / numpy.where(union > 0, union, 1), equal)
