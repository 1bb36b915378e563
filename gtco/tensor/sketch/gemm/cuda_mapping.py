"""A contraction on a GPU under one mapping of its loops: the lambdas that read its operands and
store its sums, and the tiles that fit (the second step of GTCO's hierarchical mapping).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import Epilogue, ancestors, shape_of
from gtco.tensor.analysis.indices import flatten
from gtco.tensor.analysis.mapped import MappedProduct
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.cuda import lambdas
from gtco.tensor.cuda.arguments import Arguments
from gtco.tensor.cuda.neighbours import side_by_side, storing
from gtco.tensor.cuda.tensor_core import TensorCoreRow, oldest
from gtco.tensor.sketch.gemm import cuda_gathers
from gtco.tensor.sketch.gemm.cuda_gathers import Gather, Rows, gather, rows
from gtco.tensor.sketch.gemm.cuda_operands import CHUNK, Reading, Source
from gtco.tensor.sketch.gemm.cuda_roles import NONE, PRODUCER, ROLES, piece_registers
from gtco.tensor.sketch.gemm.cuda_tiles import Tiles, block_options, stage_options, warp_options
from gtco.tensor.sketch.shared.cuda_lanes import operations
from gtco.tensor.space import Option
from gtco.tensor.stage import ITEM_BYTES, Stage

RUNS = (4, 2)  # neighbours that a lane may store at once: 16 bytes of float32
# Registers of an element that is computed alone: its value, an address while it is loaded, and a
# part of the values that its neighbours share.
SINGLE = 3.75
GUARDED = 1.5  # and of one that may lie in padding: its position along the axes
# Registers of a chunk of a padded image: its window's row and column, which say if it is inside.
PLACE = 3.0
# Further registers of a computed run, beside its values: its row, its step of k, an address.
COMPUTED_RUN = 4.5
FURTHER = 2.5  # and of each further tensor that it is computed from: an address and a value
# Integer operations of an element that is stored alone, beside those that find its place: its row
# and column, and whether they are in the matrix.
STORING = 8
LATEST = 32  # tiles that are kept
# Pairs for A and B: registers of an element that the compiler needs, those that it can do without,
# and True if the operand is copied.
Waiting = tuple[tuple[float, float], tuple[float, float], tuple[bool, bool]]
# The tiles that fit: by the block's tile, by the warps', the numbers of stages.
Tilings = Mapping[Option, Mapping[Option, tuple[int, ...]]]


def times(*sizes: int) -> str:
    return "x".join(map(str, sizes))


@lru_cache(maxsize=1024)
def sizes(text: Option) -> tuple[int, int, int]:
    first, second, third = (int(size) for size in str(text).split("x"))
    return first, second, third


@dataclass(frozen=True)
class Mapped:
    """A stage's contraction under one mapping, on a target."""

    stage: Stage
    target: GpuTarget
    product: MappedProduct
    tail: Epilogue
    operand: str

    @property
    def name(self) -> str:
        """The loops that are m, n and k, by the initials of their words: ``(r,c)(f)(tr,tc,c)``."""

        def short(loop: str) -> str:
            return "".join(word[0] for word in loop.split() if word != "of")

        m = self.product.mapping
        groups = (m.m, m.n, self.product.inside)
        return "".join(f"({','.join(map(short, group))})" for group in groups)

    @cached_property
    def a_source(self) -> Source:
        return Source(self.stage, self.product, "a")

    @cached_property
    def b_source(self) -> Source:
        return Source(self.stage, self.product, "b")

    @cached_property
    def _readings(self) -> dict[tuple[str, str], Reading]:
        return {}

    def a(self, row: TensorCoreRow) -> Reading:
        """The way A is read for the row."""
        return self._reading(row, self.a_source)

    def b(self, row: TensorCoreRow) -> Reading:
        return self._reading(row, self.b_source)

    def _reading(self, row: TensorCoreRow, source: Source) -> Reading:
        """The way an operand is read. A lane of CUDA cores reads whole chunks of rows (or columns)
        if those lie side by side. An operand that has too few of them is turned while it is read.
        """
        known = self._readings
        if (row.unit, source.letter) not in known:
            reading = source.reading
            few = source.own[1] <= self._whole(row, source.letter) // 2
            known[row.unit, source.letter] = (
                source.computed(along_k=True) if few and not reading.along_k else reading
            )
        return known[row.unit, source.letter]

    def gathers(self, row: TensorCoreRow) -> tuple[Gather | None, Gather | None]:
        """A and B, if they are found element by element or in an image."""
        found = []
        for source in (self.a_source, self.b_source):
            key = source.letter, self._reading(row, source)
            if key not in self._gathers:
                self._gathers[key] = gather(source, key[1])
            found.append(self._gathers[key])
        return found[0], found[1]

    @cached_property
    def _gathers(self) -> dict[tuple[str, Reading], Gather | None]:
        return {}

    def swizzled(self, row: TensorCoreRow) -> bool:
        """True if both operands come to shared memory unchanged, in whole pieces along k. Then warp
        groups multiply them out of it. An operand that is computed on its way, or that lies along
        rows or columns, needs a row whose fragments pass through registers.
        """
        return all(
            x.way == "packed" or (x.way == "in_place" and x.along_k)
            for x in (self.a(row), self.b(row))
        )

    def _whole(self, row: TensorCoreRow, letter: str) -> int:
        """The number of rows or columns that a warp reads at once, if these lie side by side."""
        if row.unit != "fma":
            return 1
        return CHUNK // ITEM_BYTES[self.operand] * row.extents["ab".index(letter)]

    @cached_property
    def transposed(self) -> bool:
        """True if rows of C, not columns, lie side by side in the output. If neither always do (as
        at the end of an image), the first ones decide.
        """
        product, shape = self.product, shape_of(self.stage, self.stage.output.output)

        def flat(m: int, n: int) -> Expr:
            return Scope().index(flatten(self.tail.forward(product.c_index(0, m, n)), shape))

        first = flat(0, 0)
        rows = product.m > 1 and flat(1, 0) == first + 1
        return rows and not (product.n > 1 and flat(0, 1) == first + 1)

    @cached_property
    def stored(self) -> tuple[tuple[tuple[str, int], ...], int]:
        """The way lanes store: the names and extents of batch, of the far axis and of the
        neighbours, and how many neighbours are stored at once. The neighbours are columns, or rows
        if C is ``transposed``. As many are stored at once as the epilogue reads and writes with one
        access each.
        """
        p = self.product
        apart, near = ("m", p.m), ("n", p.n)
        if self.transposed:
            apart, near = near, apart
        params = ("b", p.batch), apart, near
        for run in RUNS:
            extents = (p.batch, apart[1], near[1] // run)
            if near[1] % run == 0 and side_by_side(self.stage, extents, self._stores(run), run):
                return params, run
        return params, 1

    def _stores(self, run: int) -> Callable[..., None]:
        """For :func:`side_by_side`: the reads and writes of a lane that stores a run."""

        def follow(probe: Probe, b: Expr, apart: Expr, near: Expr, lane: Expr) -> None:
            probe.through(self.tail, self.result(b, apart, near * run + lane))

        return follow

    def result(self, b: Expr, apart: Expr, near: Expr) -> Sequence[Expr]:
        """An index of C, from one of batch, of the far axis and of the neighbours."""
        return self.product.c_index(b, *((near, apart) if self.transposed else (apart, near)))

    @cached_property
    def placing(self) -> int:
        """Integer operations that find the place of an element that is stored alone; 0 if
        neighbours are stored at once.
        """
        params, run = self.stored
        if run > 1:
            return 0
        probe = Probe(self.stage)
        probe.through(self.tail, self.result(*probe.scope.variables([n for _, n in params])))
        return STORING + operations(flat for _, flat in probe.loads)

    @cached_property
    def stores(self) -> tuple[Rows, ...]:
        """The accesses of the epilogue, if lanes that follow each other do not go side by side."""
        (_, _, (_, near)), run = self.stored

        def follow(probe: Probe, column: int, row: int) -> None:
            probe.through(self.tail, self.result(0, min(row, far - 1), column))

        far = self.stored[0][1][1]
        if cuda_gathers.side_by_side(self.stage, follow, near, run):
            return ()
        return rows(self.stage, follow, near, run)

    def store(self, args: Arguments) -> tuple[str, str]:
        """The lambda ``store``, and the argument that tells gemm.cuh how to call it."""
        params, run = self.stored
        if run == 1:
            text = lambdas.store(
                args, self.stage, self.tail, "store", params, lambda index: self.result(*index)
            )
            return text, "gtco::one_by_one(store)"
        b, apart, (name, extent) = params
        text = storing(
            args,
            self.stage,
            self.tail,
            "store",
            (b, apart, (f"{name}{run}", extent // run)),
            lambda b, apart, near, v: self.result(b, apart, near * run + v),
            run,
            "valid",
        )
        return text, f"gtco::in_runs<{run}>(store)"

    def tilings(self, row: TensorCoreRow) -> Tilings:
        """The tree of the tiles that fit the target."""
        known = self._tilings
        if row.name not in known:
            roomy: Tilings = dict(self._tilings_of(row, crowded=False))
            known[row.name] = roomy or dict(self._tilings_of(row, crowded=True))
        return known[row.name]

    @cached_property
    def _tilings(self) -> dict[str, Tilings]:
        return {}

    def _tilings_of(
        self, row: TensorCoreRow, crowded: bool
    ) -> Iterator[tuple[str, Mapping[Option, tuple[int, ...]]]]:
        readings = (self.a(row), "a"), (self.b(row), "b")
        m, n = (1 if x.along_k else self._whole(row, letter) for x, letter in readings)
        least = m, n
        if row.unit == "wgmma" and not self.swizzled(row):
            return
        for block in block_options(self.target, self.operand, self.product.extents, row):
            fitting: dict[Option, tuple[int, ...]] = {}
            for warps in warp_options(block, row.unit, least):
                tiles = self.tiles(row, times(*block), times(*warps), 2)
                if (tiles.crowded and not crowded) or not tiles.fits(self.target):
                    continue
                if found := stage_options(tiles, self.target):
                    fitting[times(*warps)] = found
            if fitting:
                yield times(*block), fitting

    def tiles(
        self,
        row: TensorCoreRow,
        block: Option,
        warps: Option,
        stages: int,
        split: int = 1,
        producer: bool = False,
    ) -> Tiles:
        """The tiles of these choices. The latest are kept, with all that they have worked out,
        because a space is walked depth first and asks for them at every decision of a config.
        """
        known, choices = self._latest, (row.name, block, warps, stages, split, producer)
        if choices not in known:
            if len(known) == LATEST:
                known.clear()
            (m, n, k), (wm, wn, parts) = sizes(block), sizes(warps)
            held, placed, copied = self._waiting(row)
            known[choices] = Tiles(
                row,
                self.operand,
                self.product.extents,
                (m, n, k),
                (wm, wn),
                parts,
                stages,
                self.transposed,
                held[0] * m + held[1] * n,
                placed[0] * m + placed[1] * n,
                split,
                copied,
                self._pieces(row) if producer else (),
                producer,
            )
        return known[choices]

    @cached_property
    def _latest(self) -> dict[tuple[Option, ...], Tiles]:
        return {}

    def _pieces(self, row: TensorCoreRow) -> tuple[float, ...]:
        """Registers for the pieces of A and of B that a producer copies."""
        packed = [x.way == "packed" for x in (self.a(row), self.b(row))]
        return piece_registers(packed, (self.a_source.even, self.b_source.even))

    def _waiting(self, row: TensorCoreRow) -> Waiting:
        """The estimates for the row's tiles, each for A and for B: :meth:`_held`, :meth:`_placed`,
        and whether the operand is copied.
        """
        known = self._waitings
        if row.name not in known:
            sources = self.a_source, self.b_source
            copied = self.a(row).way != "computed", self.b(row).way != "computed"
            held_a, held_b = (self._held(row, source) for source in sources)
            placed_a, placed_b = (self._placed(row, source) for source in sources)
            known[row.name] = (held_a, held_b), (placed_a, placed_b), copied
        return known[row.name]

    @cached_property
    def _waitings(self) -> dict[str, Waiting]:
        return {}

    def _held(self, row: TensorCoreRow, source: Source) -> float:
        """Registers in which an element of the next slice waits, with its share of its run's
        address or of its chunk's place in a padded image. They are fitted to ptxas's figures for 54
        configs of Tensor Cores that compute runs of A and for 246 others.
        """
        reading, item = self._reading(row, source), ITEM_BYTES[self.operand]
        # the other registers of CUDA cores and warp groups are estimated high enough for places too
        fitted = row.unit == "mma"
        if reading.way == "computed":
            if reading.run == 1:
                return SINGLE
            return 1.0 + (COMPUTED_RUN / reading.run if fitted else 0.0)
        waiting = item / 4 if oldest(self.target) < 80 else 0.0
        return waiting + (PLACE * item / CHUNK if source.padded and fitted else 0.0)

    def _placed(self, row: TensorCoreRow, source: Source) -> float:
        """Further registers of a computed element: for its run's place in an image, padded or not;
        for each further tensor of the run; and for its place before padding. The compiler can
        compute these values again instead of keeping them.
        """
        reading = self._reading(row, source)
        if reading.way != "computed" or row.unit != "mma":
            return 0.0
        before = ancestors(self.stage, source.tensor)
        if reading.run == 1:
            return GUARDED if any(op.kind == "pad" for op in before) else 0.0
        read = {x for op in before for x in op.inputs} - self.stage.producers.keys()
        place = PLACE if source.image else 0.0
        return (place + FURTHER * max(len(read) - 1, 0)) / reading.run

    def chosen(self, row: TensorCoreRow, chosen: Mapping[str, Any]) -> Tiles:
        """The tiles of a config's choices."""
        stages, split = int(chosen["stages"]), int(chosen.get("split", 1))
        producer = chosen.get(ROLES, NONE) == PRODUCER
        return self.tiles(row, chosen["block"], chosen["warps"], stages, split, producer)
