"""How far the outputs of a quantized model are from those of the float model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any

import numpy
from numpy.typing import NDArray

from gtco.quantization.tasks import Boxes, ClassMaps, Shapes, TaskSums
from gtco.support.errors import ModelError

Array = NDArray[Any]


@dataclass(frozen=True)
class OutputVerdict:
    """One output over all samples.

    - ``error``: the root mean square of the difference over that of the float output; of an output
      of integers or booleans the share of elements that differ
    - ``cosine``: of the angle between both; None for integers
    - ``top1``: the share of rows whose largest element is the same one, if the output looks like
      the scores of classes ([samples, classes] of floats); otherwise None. ``rows``: how many
    - ``maps``: of an output of each pixel's classes (:func:`gtco.quantization.tasks.class_maps`);
      ``boxes``: of one of boxes (:func:`gtco.quantization.tasks.detections`); otherwise None
    """

    name: str
    error: float
    cosine: float | None
    top1: float | None
    rows: int
    maps: ClassMaps | None = None
    boxes: Boxes | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "relative_error": self.error,
            "cosine": self.cosine,
            "top1_agreement": self.top1,
            "rows": self.rows,
            "class_maps": self.maps.to_json() if self.maps else None,
            "boxes": self.boxes.to_json() if self.boxes else None,
        }


class _Sums:
    """The sums over all samples from which the verdict on one output is computed."""

    def __init__(self) -> None:
        self.difference = self.wanted = self.got = self.both = 0.0
        self.rows = self.agreed = self.differ = self.count = 0
        self.scores = True

    def add(self, wanted: Array, got: Array, name: str) -> None:
        self.count += wanted.size
        if wanted.dtype.kind != "f":
            self.differ += int((wanted != got).sum())
            self.scores = False
            return
        a, b = wanted.astype(numpy.float64), got.astype(numpy.float64)
        if not bool(numpy.isfinite(a).all()):
            raise ModelError(
                f"the float model's output '{name}' has NaN or infinity: no error can be measured"
            )
        self.wanted += float((a * a).sum())
        self.got += float((b * b).sum())
        self.both += float((a * b).sum())
        self.difference += float(((a - b) ** 2).sum())
        if a.ndim == 2 and a.shape[1] > 1:
            self.rows += len(a)
            self.agreed += int((a.argmax(axis=1) == b.argmax(axis=1)).sum())
        else:
            self.scores = False

    def verdict(self, name: str, floats: bool) -> OutputVerdict:
        if not floats:
            return OutputVerdict(name, self.differ / max(1, self.count), None, None, 0)
        if not isfinite(self.difference):  # the quantized model makes NaN or infinity
            return OutputVerdict(name, inf, 0.0, None, 0)
        if not self.wanted:
            error = 0.0 if not self.difference else float("inf")
        else:
            error = sqrt(self.difference / self.wanted)
        length = sqrt(self.wanted * self.got)
        cosine = self.both / length if length else float(self.wanted == self.got)
        top1 = self.agreed / self.rows if self.scores and self.rows else None
        return OutputVerdict(name, error, cosine, top1, self.rows if top1 is not None else 0)


def compare(
    wanted: Iterable[Mapping[str, Array]],
    got: Iterable[Mapping[str, Array]],
    inputs: Shapes | None = None,
) -> list[OutputVerdict]:
    """The verdict on each output, in order, of one sample after the other. With the shapes of the
    model's inputs also that on maps of classes and on boxes. Raises :class:`ModelError` if a float
    output is not finite.
    """
    sums: dict[str, _Sums] = {}
    floats: dict[str, bool] = {}
    tasks: TaskSums | None = None
    for one, other in zip(wanted, got, strict=True):
        for name, value in one.items():
            floats[name] = value.dtype.kind == "f"
            sums.setdefault(name, _Sums()).add(value, other[name], name)
        if inputs is not None:
            if tasks is None:
                tasks = TaskSums({n: v.shape for n, v in one.items() if floats[n]}, inputs)
            tasks.add(one, other)
    found = [s.verdict(name, floats[name]) for name, s in sums.items()]
    if tasks is None:
        return found
    return [replace(v, maps=tasks.maps(v.name), boxes=tasks.boxes(v.name)) for v in found]


def worst(found: Sequence[OutputVerdict]) -> float:
    """The error of the output that lost most."""
    return max(one.error for one in found)
