"""What a library says about itself, and how fast its stages are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.support.errors import PACKAGES, ArtifactError, GtcoError
from gtco.support.options import PRECISIONS
from gtco.support.sizes import evenly_spread

if TYPE_CHECKING:
    from gtco.runtime.module import Model
    from gtco.search.calibration.peak import Peak

MOST_ROWS = 16  # variants of a library that are measured and shown without --all
REPEAT = 20  # a stage's measured time is the median of so many calls


@dataclass(frozen=True)
class Inspection:
    """A model's stages: the artifact's dictionaries, with ``measured_seconds`` and
    ``share_of_peak`` if they are known.

    ``peak`` is that of the library's precision. Products of integers have one of their own,
    ``int8_peak``, which is read only if there are such products.
    """

    stages: tuple[Mapping[str, Any], ...]
    threads: int
    peak: Peak | None
    peak_reason: str | None
    details: Mapping[str, Any]
    int8_peak: Peak | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.details,
            "threads": self.threads,
            "peak_flops_per_second": self.peak.flops if self.peak else None,
            "peak_readings": list(self.peak.readings) if self.peak else [],
            "int8_peak_operations_per_second": self.int8_peak.flops if self.int8_peak else None,
            "peak_reason": self.peak_reason,
            "stages": [dict(s) for s in self.stages],
        }


def inspect(
    library: Path,
    threads: int,
    profile: bool,
    metadata: Mapping[str, Any],
    variant: Mapping[str, Any],
    peak_of: Callable[[int, str], tuple[Peak | None, str | None]],
) -> Inspection:
    """What the library's ``metadata`` says about one ``variant`` of it, without running any code.
    With ``profile``, opens the library and measures the variant's stages (median of calls on random
    inputs) and the machine's peak. A library for GPUs that cannot be opened here is only read, and
    so is one for another kind of CPU; the reason replaces the peak. ``peak_of``:
    :func:`measured_peak`, which may keep peaks.
    """
    from gtco.runtime.elf import read_contents
    from gtco.runtime.module import load
    from gtco.runtime.tensors import random_inputs

    opened: Model | None = None
    reason = "not measured (--no-profile)"
    if profile:
        try:
            opened = load(library, threads=threads, dims=variant.get("sizes", {}))
        except ArtifactError as error:
            if "images" in metadata:
                reason = f"not measured: {error}"  # no GPU here runs the model
            elif (isa := read_contents(library).isa).here:
                raise
            else:
                reason = f"not measured: a library for {isa.name}, which this machine is not"
    if opened is None:
        return Inspection(
            tuple(variant["steps"]),
            threads or metadata.get("threads", 0),
            None,
            reason,
            _details(metadata, variant),
        )
    with opened as model:
        stages: list[dict[str, Any]] = [dict(stage) for stage in model.stages]
        inputs = random_inputs(model.inputs).values()
        seconds = model.profile(*inputs, repeat=REPEAT)
        integers = [stage.get("multiplies") == "int8" for stage in stages]
        precision = model.metadata.get("precision", "fp32")
        peak, unknown = (
            peak_of(model.threads, PRECISIONS[precision])
            if model.device is None
            else (None, "not measured on a GPU")
        )
        int8_peak = peak_of(model.threads, "int8")[0] if any(integers) and peak else None
        for stage, measured, whole in zip(stages, seconds, integers, strict=True):
            most = int8_peak if whole else peak
            reached = stage["flops"] / measured if measured > 0 else None
            stage["measured_seconds"] = float(measured)
            stage["share_of_peak"] = reached / most.flops if reached and most else None
        details = _details(metadata, variant)
        return Inspection(tuple(stages), model.threads, peak, unknown, details, int8_peak)


def _details(metadata: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in metadata.items() if k not in ("steps", "variants")}
    if loops := metadata.get("loops"):  # many variants have many kernels, each variant a few
        kernels = dict.fromkeys(step["kernel"] for step in variant["steps"])
        own["loops"] = {name: loops[name] for name in loops if name in kernels}
    found = {"inputs": variant["inputs"], "outputs": variant["outputs"], "metadata": own}
    if sizes := variant.get("sizes"):
        found |= {"sizes": sizes, "arena_bytes": variant["arena_bytes"]}
    return found


def measured_peak(threads: int, operand: str) -> tuple[Peak | None, str | None]:
    """The machine's peak of products of this dtype on this many threads, or the reason why it is
    not known.
    """
    try:
        from gtco.search.calibration.peak import machine_peak

        return machine_peak(threads, operand), None
    except GtcoError as error:
        return None, f"not measured: {error}"
    except ModuleNotFoundError as error:
        package = PACKAGES.get(str(error.name), error.name)
        return None, f"not measured: that takes {package}, which is not installed"


def looked_at(sizes: Sequence[Mapping[str, int]], every: bool) -> Collection[int]:
    """The numbers of the variants that are measured and shown."""
    return evenly_spread(sizes, len(sizes) if every else MOST_ROWS)
