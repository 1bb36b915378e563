"""Runs of the library with switches: observing the float model, and the outputs of any choice of
ranges and of quantized products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from gtco.quantization.data import Run
from gtco.quantization.insertion import Switched
from gtco.quantization.observers import Histogram, Range
from gtco.support.errors import InputError, ModelError

Array = NDArray[Any]
Runner = Callable[[Mapping[str, Array]], Mapping[str, Array]]  # a compiled model
Say = Callable[[str], None]  # takes news of the work under way


@dataclass(frozen=True)
class Observed:
    """What one pass over the samples saw of each tensor: its histogram, and its largest magnitudes
    by channel, the last axis.
    """

    histograms: Mapping[str, Histogram]
    largest: Mapping[str, Array]


@dataclass(frozen=True)
class Switchboard:
    """A compiled model with switches. ``outputs``: those of the model itself."""

    switched: Switched
    run: Runner
    outputs: tuple[str, ...]

    def observe(self, samples: Sequence[Run], say: Say) -> Observed:
        """One pass of the float model over the samples. Raises :class:`ModelError` if it makes NaN
        or infinity.
        """
        histograms = {name: Histogram() for name in self.switched.tensors}
        largest: dict[str, Array] = {}
        nothing = self.switched.settings({}, ())
        for number, sample in enumerate(samples):
            say(f"{number + 1}/{len(samples)} samples")
            made = self.run({**sample, **nothing})
            for name, output in self.switched.observed.items():
                values = numpy.asarray(made[output])
                try:
                    histograms[name].add(values)
                except InputError:
                    raise ModelError(
                        f"the float model makes NaN or infinity in '{name}' of sample {number}: "
                        "it cannot be quantized by such data"
                    ) from None
                found = numpy.abs(values.reshape(-1, values.shape[-1])).max(axis=0, initial=0)
                known = largest.get(name)
                largest[name] = found if known is None else numpy.maximum(known, found)
        return Observed(histograms, largest)

    def results(
        self, samples: Sequence[Run], ranges: Mapping[str, Range], quantized: Sequence[str]
    ) -> Iterator[dict[str, Array]]:
        """The model's outputs for each sample, with the products of these outputs quantized."""
        for made in self._runs(samples, ranges, quantized):
            yield {name: numpy.array(made[name]) for name in self.outputs}

    def read(
        self, samples: Sequence[Run], ranges: Mapping[str, Range], quantized: Sequence[str]
    ) -> Iterator[dict[str, Array]]:
        """The tensors that products read, before they are rounded themselves; otherwise as
        :meth:`results`.
        """
        for made in self._runs(samples, ranges, quantized):
            yield {name: numpy.array(made[o]) for name, o in self.switched.observed.items()}

    def _runs(
        self, samples: Sequence[Run], ranges: Mapping[str, Range], quantized: Sequence[str]
    ) -> Iterator[Mapping[str, Array]]:
        settings = self.switched.settings(ranges, set(quantized))
        return (self.run({**sample, **settings}) for sample in samples)
