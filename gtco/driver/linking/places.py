"""Where the tensors of a model lie: in the arena, or among the packed weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import numpy as np

from gtco.codegen.jobs import GpuKernel, Kernel
from gtco.driver.linking.arena import plan_arena
from gtco.graph.graph import Graph
from gtco.machine.target import Machine, Target
from gtco.runtime.plan import BufferRef, round_up
from gtco.tensor.packing import Packing
from gtco.tensor.stage import Stage

_SMALL = 1 << 16  # bytes of a constant that is compared with others


class Places(dict[str, BufferRef]):
    """Where each tensor that is not a constant lies.

    - ``arena_bytes``: the size of the arena;
    - ``between``: scratch and counters of the steps whose blocks work together;
    - ``counter_bytes``: the counters of all these steps, at the end of the arena. Each step leaves
      its counters as it found them.
    """

    arena_bytes = 0
    counter_bytes = 0
    between: Mapping[int, tuple[BufferRef, ...]]

    def place_counters(self, offset: int, nbytes: int) -> None:
        """Moves the counters to this offset, and gives them so many bytes. The variants of a
        library have them in one place behind all tensors, since no variant may write to those of
        another.
        """
        if self.counter_bytes:
            counters = BufferRef("arena", offset)
            self.between = {i: (scratch, counters) for i, (scratch, _) in self.between.items()}
            self.arena_bytes += nbytes - self.counter_bytes
            self.counter_bytes = nbytes


def share_counters(every: Sequence[Places]) -> tuple[int, int]:
    """Gives the variants' places one place for their counters, at the end of their one arena.
    Returns the bytes of that arena and of the counters.
    """
    nbytes = max(places.counter_bytes for places in every)
    offset = max(places.arena_bytes - places.counter_bytes for places in every)
    for places in every:
        places.place_counters(offset, nbytes)
    return offset + nbytes, nbytes


def placed(
    graph: Graph, stages: Sequence[Stage], kernels: Mapping[str, Kernel], target: Machine
) -> Places:
    """The places of a model's tensors in code for this machine."""
    first = {stage.output.output: i for i, stage in enumerate(stages)}
    last = dict(first)
    for i, stage in enumerate(stages):
        for given in stage.inputs:
            if given.name in last:
                last[given.name] = i
    inner = [name for name in first if name not in graph.outputs]
    together = {
        i: kernel
        for i, stage in enumerate(stages)
        if isinstance(kernel := kernels.get(stage.key), GpuKernel) and kernel.counters
    }
    offsets, total = plan_arena(
        [
            # a stage that was cut into operators makes tensors that are not in the graph
            *((stages[first[n]].output.type.nbytes, first[n], last[n]) for n in inner),
            *((kernel.scratch, i, i) for i, kernel in together.items()),
        ],
        target.cores if isinstance(target, Target) else 1,
    )
    refs = [BufferRef("arena", o) for o in offsets]
    places = Places(zip(inner, refs[: len(inner)], strict=True))
    counters = BufferRef("arena", total)
    scratch = zip(together, refs[len(inner) :], strict=True)
    places.between = {i: (ref, counters) for i, ref in scratch}
    places.counter_bytes = counter_bytes(together.values())
    places |= {name: BufferRef("input", i) for i, name in enumerate(graph.inputs)}
    places |= {name: BufferRef("output", i) for i, name in enumerate(graph.outputs)}
    places.arena_bytes = total + places.counter_bytes
    return places


def counter_bytes(kernels: Iterable[GpuKernel]) -> int:
    """Bytes for the counters of any of these kernels."""
    return round_up(4 * max((kernel.counters for kernel in kernels), default=0))


class Weights:
    """The constants in the layouts that kernels read, each pair of constant and layout once. Small
    constants of equal values share a place: a quantized model has many scales of its tensors.
    """

    def __init__(self, constants: MutableMapping[str, np.ndarray]) -> None:
        self.constants = constants
        self.equal: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self.offsets: dict[tuple[str, Packing | None], int] = {}
        self.size = 0
        self.formats: Counter[str] = Counter()  # bytes by dtype

    def place(self, name: str, packing: Packing | None) -> BufferRef:
        array = self.constants[name]
        if array.nbytes <= _SMALL:
            key = (str(array.dtype), array.shape, array.tobytes())
            name = self.equal.setdefault(key, name)
        if (name, packing) not in self.offsets:
            items = int(np.prod(packing.packed_shape)) if packing else array.size
            self.offsets[name, packing] = self.size
            self.size = round_up(self.size + items * array.itemsize)
            self.formats[str(array.dtype)] += items * array.itemsize
        return BufferRef("weight", self.offsets[name, packing])

    def numbers(self, kernel: Kernel) -> BufferRef:
        """The place of what a kernel of several sizes reads at one of them."""
        array = np.array(kernel.numbers, kernel.numbers_dtype)
        name = f"numbers {kernel.numbers_dtype} {kernel.numbers}"  # no constant has a name like it
        self.constants[name] = array
        return self.place(name, None)

    def packed(self) -> list[tuple[int, np.ndarray]]:
        """Packs all constants, and releases each one when its last layout is made."""
        left: dict[str, int] = {}
        for name, _ in self.offsets:
            left[name] = left.get(name, 0) + 1
        for name in [n for n in self.constants if n not in left]:
            del self.constants[name]
        arrays = []
        for (name, packing), offset in self.offsets.items():
            array = self.constants[name]
            arrays.append(
                (offset, packing.apply(array) if packing else np.ascontiguousarray(array))
            )
            left[name] -= 1
            if not left[name]:
                del self.constants[name]
        return arrays
