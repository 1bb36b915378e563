"""The plan of a compiled model: its tensors, its steps in order, and where every buffer lies.

A step is one kernel call. Its buffers are inputs and outputs of the model, offsets in the arena
(scratch memory that tensors of disjoint lifetimes share) or offsets in the packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from gtco.support.sizes import Range, sizes_text

ALIGNMENT = 64  # bytes, of every buffer that a kernel sees; GTCO_ALIGNMENT in csrc/plan.h

# numpy's name -> (enumerator in csrc/gtco_api.h, its value, bytes)
DTYPES: dict[str, tuple[str, int, int]] = {
    "float32": ("GTCO_FLOAT32", 0, 4),
    "float64": ("GTCO_FLOAT64", 1, 8),
    "float16": ("GTCO_FLOAT16", 2, 2),
    "bfloat16": ("GTCO_BFLOAT16", 3, 2),
    "int64": ("GTCO_INT64", 4, 8),
    "int32": ("GTCO_INT32", 5, 4),
    "int16": ("GTCO_INT16", 6, 2),
    "int8": ("GTCO_INT8", 7, 1),
    "uint64": ("GTCO_UINT64", 8, 8),
    "uint32": ("GTCO_UINT32", 9, 4),
    "uint16": ("GTCO_UINT16", 10, 2),
    "uint8": ("GTCO_UINT8", 11, 1),
    "bool": ("GTCO_BOOL", 12, 1),
}


@dataclass(frozen=True)
class BufferRef:
    """Where a kernel's argument is. ``index`` is the number of the input or output, or a byte
    offset (a multiple of 64). ``offset``: bytes from the beginning of that input or output.
    """

    kind: Literal["input", "output", "arena", "weight"]
    index: int
    offset: int = 0


@dataclass(frozen=True)
class Step:
    """One kernel call: ``kernel(*buffers, workspace, begin, end)`` for ranges that together cover
    [0, ``tasks``).

    ``workspace`` is the number of bytes of scratch that each thread needs. ``info`` (JSON) is shown
    by ``gtco inspect``.
    """

    kernel: str
    buffers: tuple[BufferRef, ...]
    tasks: int = 1
    workspace: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the model: its name, numpy's name of its dtype, and its shape. A size
    is an integer or the name of a symbolic size.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor; -1 if a size is symbolic."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return prod(sizes) * DTYPES[self.dtype][2] if len(sizes) == len(self.shape) else -1

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Variant:
    """The model at one choice of its inputs' sizes. All variants of a library share its weights,
    its kernels and one arena.

    ``sizes``: the sizes by the dimension's name; empty if the model has one shape. Every size in
    ``inputs`` and ``outputs`` is a number. ``batch``: if the samples run in parts; ``steps`` are
    those of one part.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: Sequence[Any]
    arena_bytes: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch: Batch | None = None

    @property
    def calls(self) -> Sequence[Any]:
        """The steps of all parts."""
        if self.batch is None:
            return self.steps
        return self.batch.unrolled(self.steps, self.inputs, self.outputs)

    def __str__(self) -> str:
        return sizes_text(self.sizes)


@dataclass(frozen=True)
class Batch:
    """How a model of one shape runs its samples in parts, one after the other: all steps on the
    first ``part`` of its ``samples``, then on the next, until all are done. The last part begins
    earlier than the one before it ends, if the samples are not a multiple.

    ``axes``: where each input and output has the samples, by its name: 0, or another axis behind
    some of size 1; None where it is the same for all samples.
    """

    samples: int
    part: int
    axes: Mapping[str, int | None]

    @property
    def firsts(self) -> list[int]:
        """The sample that each part begins at."""
        return [min(n, self.samples - self.part) for n in range(0, self.samples, self.part)]

    def whole(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The model's tensors, from those of a part."""
        found = []
        for spec in specs:
            shape = list(spec.shape)
            if (axis := self.axes[spec.name]) is not None:
                shape[axis] = int(shape[axis]) // self.part * self.samples
            found.append(replace(spec, shape=tuple(shape)))
        return tuple(found)

    def aligned(self, specs: Sequence[TensorSpec]) -> bool:
        """True if every part of these whole tensors begins at a multiple of ALIGNMENT bytes."""
        split = [spec for spec in specs if self.axes[spec.name] is not None]
        return all(self._offset(spec, n) % ALIGNMENT == 0 for spec in split for n in self.firsts)

    def unrolled(
        self, steps: Sequence[Step], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> list[Step]:
        """The steps of all parts, from those of the first. ``inputs`` and ``outputs`` are whole."""
        tensors = {"input": inputs, "output": outputs}

        def at(ref: BufferRef, first: int) -> BufferRef:
            if ref.kind not in tensors:
                return ref
            spec = tensors[ref.kind][ref.index]
            split = self.axes[spec.name] is not None
            return replace(ref, offset=self._offset(spec, first)) if split else ref

        return [
            replace(step, buffers=tuple(at(ref, first) for ref in step.buffers))
            for first in self.firsts
            for step in steps
        ]

    def _offset(self, spec: TensorSpec, first: int) -> int:
        return spec.nbytes // self.samples * first


@dataclass(frozen=True)
class Cover:
    """Of a model that computes each sample by itself: the range of a dimension whose sizes all run,
    as parts that are variants. Samples are along the outermost axis of a tensor that has them.

    - ``sizes``, ``nanoseconds``: samples of each variant, and its predicted time. Variants with the
      same other sizes are neighbours, with ascending samples
    - ``axes``: where each input and output has the samples, by its name; None where it is the same
      for all samples
    """

    symbol: str
    sizes_of: Range
    sizes: tuple[int, ...]
    nanoseconds: tuple[int, ...]
    axes: Mapping[str, int | None]

    def to_json(self) -> dict[str, Any]:
        """What a library's metadata say of it."""
        return {
            "symbol": self.symbol,
            "low": self.sizes_of.low,
            "high": self.sizes_of.high,
            "step": self.sizes_of.step,
            "sizes": list(self.sizes),
            "nanoseconds": list(self.nanoseconds),
            "axes": dict(self.axes),
        }


def round_up(nbytes: int) -> int:
    """The least multiple of the alignment that is not less."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
