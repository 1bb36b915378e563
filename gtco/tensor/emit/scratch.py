"""A thread's scratch in named pieces, each with a shape and a dtype; the offsets are computed from
these.

Pieces follow each other in the order given, each on a cache line of its own. A piece has one dtype
for all reads and writes: LLVM counts positions in elements, and takes two accesses with different
constant positions for different memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gtco.tensor.emit.emitter import Array, KernelArguments
from gtco.tensor.stage import ITEM_BYTES

ALIGN = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Piece:
    """``shape`` elements of ``dtype``, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Scratch:
    """The pieces of one kernel. Two of the same name are an error of the sketch."""

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        names = [piece.name for piece in self.pieces]
        assert len(set(names)) == len(names), f"two pieces of one name among {names}"

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """The start of each piece, in bytes."""
        found, end = {}, 0
        for piece in self.pieces:
            found[piece.name] = -(-end // ALIGN) * ALIGN
            end = found[piece.name] + piece.nbytes
        return found

    @cached_property
    def nbytes(self) -> int:
        """The bytes that a thread needs for all of them."""
        last = self.pieces[-1] if self.pieces else None
        return self.offsets[last.name] + last.nbytes if last else 0

    def arrays(self, args: KernelArguments) -> dict[str, Array]:
        """The pieces of a kernel that is being emitted, by name. It is called once, outside of all
        loops.
        """
        buffers = {d: args.scratch_buffer(d) for d in dict.fromkeys(p.dtype for p in self.pieces)}
        return {
            p.name: Array(
                buffers[p.dtype], p.shape, p.dtype, self.offsets[p.name] // ITEM_BYTES[p.dtype]
            )
            for p in self.pieces
        }
