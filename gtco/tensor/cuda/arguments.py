"""The parameters of a CUDA kernel: pointers to a stage's inputs in order, then to its output. If
blocks work together, the pointers to the memory through which they exchange values are between
these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gtco.tensor.cuda.spelling import CTYPES
from gtco.tensor.packing import Packing
from gtco.tensor.stage import Stage, TensorType

# Other blocks write there while a kernel runs, so these pointers must not be __restrict__.
BETWEEN_BLOCKS = ("float* scratch", "uint32_t* counters")
# The kernel before may still write an activation when this one begins. Where it may, the compiler
# must not load from it early, and device.cuh makes nothing of this word.
ACTIVATION = "GTCO_RESTRICT"


@dataclass(frozen=True)
class Arguments:
    """The parameters. ``inputs`` are the tensors by name as the kernel sees them, packed constants
    in their packed shape; no kernel writes those of ``constants``. The text calls the inputs
    ``in0`` and so on, and the output ``out``. A bfloat16 is a ``bf16`` in the text, and its bits (a
    uint16) in TIR.
    """

    inputs: tuple[tuple[str, TensorType], ...]
    output: TensorType
    constants: frozenset[str]

    def pointer(self, tensor: str) -> str:
        """The name of an input in the text."""
        return f"in{[name for name, _ in self.inputs].index(tensor)}"

    @property
    def declaration(self) -> tuple[str, ...]:
        """The parameters, one text each."""
        given = (
            f"const {CTYPES[t.dtype]}* "
            f"{'__restrict__' if name in self.constants else ACTIVATION} in{n}"
            for n, (name, t) in enumerate(self.inputs)
        )
        return (*given, f"{CTYPES[self.output.dtype]}* __restrict__ out")


def arguments(stage: Stage, packings: Mapping[str, Packing] | None = None) -> Arguments:
    """The parameters of the stage's kernel. ``packings`` are those of constants, by input name."""
    packed = packings or {}
    return Arguments(
        tuple(
            (i.name, TensorType(packed[i.name].packed_shape, i.type.dtype))
            if i.name in packed
            else (i.name, i.type)
            for i in stage.inputs
        ),
        stage.output.type,
        frozenset(stage.constants),
    )
