"""The analytic policy: every stage's config from hardware limits and a recursive model, no stage
measured (Helix, Section 5).

Level 0 and the barrier come from a table (:mod:`gtco.search.calibration.rates`); the levels above
follow equations 1 to 8.
Three readings of the paper differ from its print. A parallel level's scaling (eq. 6) rounds up,
since a last partial wave takes as long as a whole one, unless its tasks are smaller. It also counts
a share of a task, by which threads end apart: of two cuts that cost the same, the one with shorter
tasks loses less where a core is slower or is taken away. Eq. 2's bandwidth belongs to the memory
level that holds the working set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from gtco.machine.target import CACHE_LINE, MemoryLevel, Target
from gtco.search.calibration.rates import RateTable
from gtco.search.pricing import CERTAIN, PricingPolicy, products
from gtco.tensor.analysis.filtering import least_products
from gtco.tensor.intrinsics.table import kinds, micro_kernels, operand_of
from gtco.tensor.space import Config, Decision, Option, Pick, Sketch
from gtco.tensor.stage import Operator, Stage, TensorType
from gtco.tensor.workload import Layer, Stream, Workload

T = TypeVar("T", float, np.ndarray)

TILES_KEPT = 6  # micro-kernels that go on to the levels above
USABLE = 0.5  # share of a cache that one working set may count on, beside what streams through
UNEVEN = 0.02  # threads end a step apart by this share of a task, since cores are never quite alike
# Another stage's micro-kernel is taken over if it has this share of the fastest one's rate.
NEARLY = 0.97
CUTS = ("parallel", "grain", "block")  # roles of decisions that follow from the sizes
# Share of the first overlapped loads of a task that it waits for: nothing computes yet. They may be
# there already, since the task before asks for what lies next.
FILL = 0.4
HIDDEN = 0.85  # share of a transfer that overlaps with computing; the rest delays it


@dataclass(frozen=True)
class Candidates:
    """The candidates of all sketches of one signature, with the parts of the price that these
    sketches share. Each array runs over the candidates.

    - ``loops``: seconds of the loops;
    - ``counts``: the amount of each kind of extra work;
    - ``shares``: seconds that each second of extra work adds.
    """

    configs: tuple[Config, ...]
    loops: np.ndarray
    counts: tuple[np.ndarray, ...]
    shares: np.ndarray


class AnalyticPolicy(PricingPolicy):
    """Picks the config of least predicted time for a stage on all ``target.cores``. Without
    ``rates`` the rates of the formula are used.
    """

    def __init__(self, target: Target, rates: RateTable | None = None) -> None:
        super().__init__(target)
        self.target: Target = target
        self.rates = rates or RateTable(target)
        self._shared: dict[object, Candidates] = {}
        self._peaks: dict[str, float] = {}

    def floor(self, op: Operator, types: Mapping[str, TensorType]) -> float:
        """Seconds that no stage with this operator is predicted to take less than: the barrier, and
        the products of a contraction on all cores by the fastest micro-kernel.
        """
        multiplied = products(op, types)
        if not multiplied:
            return self.rates.launch
        multiplied *= least_products(op, types[op.inputs[1]].shape)
        fastest = self._fastest(operand_of(*(types[x].dtype for x in op.inputs[:2])))
        return self.rates.launch + CERTAIN * multiplied / (fastest * self.target.cores)

    def peak(self, operand: str) -> float:
        """FLOP/s of products of operands of this dtype, on all cores by the fastest micro-kernel.
        """
        return 2.0 * self._fastest(operand) * self.target.cores

    @cached_property
    def _private(self) -> tuple[MemoryLevel, float]:
        """The outermost cache that each core has for itself, and the bytes of these caches on all
        cores.
        """
        own = [level for level in self.target.memory if not level.shared][-1]
        return own, float(own.capacity * self.target.cores)

    @cached_property
    def _usable(self) -> tuple[tuple[float, MemoryLevel], ...]:
        """Each level of memory with the bytes that a working set may use there."""
        return tuple((USABLE * level.capacity, level) for level in self.target.memory)

    def _fastest(self, operand: str) -> float:
        """Multiply-adds a second of one core on operands of this dtype, by the fastest micro-kernel
        of any shape.
        """
        if operand not in self._peaks:
            tiles = micro_kernels(self.target, operand)
            products = {kind.name: kind.products for kind in kinds(self.target, operand)}
            named = [tile.kernel for tile in tiles] + [name for name, _ in self.rates.measured]
            rates = [
                self.rates.rate(name) * products[kind]
                for name in named
                if (kind := name.partition(":")[0]) in products
            ]
            self._peaks[operand] = self.target.lanes * max([self.rates.rate("fma"), *rates])
        return self._peaks[operand]

    def price(self, sketch: Sketch, config: Config) -> float:
        """Predicted seconds of this very config."""
        return self.seconds(sketch.workload(config))

    def compared(self, sketch: Sketch) -> tuple[tuple[Config, ...], np.ndarray]:
        """Every candidate with its predicted seconds, without the part that is the same for all.
        The fusion search asks for hundreds of stages around one contraction, so what these share is
        computed once for each signature.
        """
        signature = getattr(sketch, "signature", None)
        shared = self._shared.get(signature)
        if signature is None or shared is None:
            shared = self._worked_out(sketch)
            if signature is not None:
                self._shared[signature] = shared
        # the units are the sketch's own, and the same for every config
        extra = sketch.workload(shared.configs[0]).extra
        pieces = [(x.kernel, n, x.units) for x, n in zip(extra, shared.counts, strict=True)]
        return shared.configs, self._whole(shared.loops, shared.shares, pieces)

    def _worked_out(self, sketch: Sketch) -> Candidates:
        found = tuple(self.candidates(sketch))
        works = [sketch.workload(config) for config in found]
        loops, shares = zip(*map(self._loops, works), strict=True)
        counts = zip(*((piece.amount for piece in work.extra) for work in works), strict=True)
        return Candidates(
            found, np.array(loops), tuple(np.array(c, float) for c in counts), np.array(shares)
        )

    def candidates(self, sketch: Sketch) -> Iterator[Config]:
        """Algorithm 2: of the micro-kernels, which are the lowest level, the best few go on, each
        with its multiples at the levels above.
        """
        yield from self._extend(sketch, {}, 16 * self.target.cores)

    def _extend(
        self,
        sketch: Sketch,
        chosen: dict[str, Option],
        tasks: int,
        like: Mapping[str, Option] = MappingProxyType({}),
    ) -> Iterator[Config]:
        """The candidates that begin with ``chosen`` and have at most ``tasks`` tasks. Those that
        are ``like`` a config decide as it does all but the cut into tasks and blocks.
        """
        decision = sketch.next_decision(chosen)
        if decision is None:
            yield Config(sketch.name, tuple(chosen.items()))
            return
        parallel = decision.role == "parallel"
        if decision.name in like and decision.role not in CUTS:
            options = self._same(decision, like[decision.name])
        else:
            options = self._worthwhile(decision, tasks)
        for option in options:
            left = tasks // int(option) if parallel else tasks
            yield from self._extend(sketch, {**chosen, decision.name: option}, left, like)

    def nearby(
        self, stage: Stage, known: Collection[Config], rivals: Collection[str]
    ) -> list[Pick]:
        """Picks of a stage by the configs of others that are the same but for their sizes, the
        least predicted time first. They are like a known config. A sketch is looked at in full, as
        :meth:`choose` does, if it is one of ``rivals`` and none of its configs is known, or if
        these cannot be had here, or where another micro-kernel promises clearly more. So is one
        that says it is to be chosen ``by_size``, beside the known ones, whose weights are there.
        """

        def of_sketch(sketch: Sketch) -> list[Pick]:
            like = [one.by_name for one in known if one.sketch == sketch.name]
            if not like and sketch.name not in rivals:
                return []
            found: dict[Config, Pick] = {}
            for one in like:
                for config in self._extend(sketch, {}, 16 * self.target.cores, one):
                    if config not in found:
                        found[config] = Pick(sketch, config, self.price(sketch, config))
            if not found or getattr(sketch, "by_size", False):
                found |= {pick.config: pick for pick in self.picks(sketch)}
            return list(found.values())

        return self._of_sketches(stage, of_sketch)

    def closest(self, stage: Stage, known: Collection[Config]) -> list[Pick]:
        """Picks of a stage by the configs of others that are the same but for their sizes, the
        least predicted time first: of each the one that is closest to it among those of this stage.
        """

        def of_sketch(sketch: Sketch) -> list[Pick]:
            like = (_closest(sketch, one.by_name) for one in known if one.sketch == sketch.name)
            different = dict.fromkeys(config for config in like if config is not None)
            return [Pick(sketch, config, self.price(sketch, config)) for config in different]

        return self._of_sketches(stage, of_sketch)

    def _same(self, decision: Decision, option: Option) -> tuple[Option, ...]:
        """The option alone, or none if the decision lacks it, or if it is a micro-kernel that
        multiplies clearly slower at these sizes than another.
        """
        if option not in decision.options:
            return ()
        if decision.role == "micro-kernel":
            rates = [self.rates.rate(kernel) * useful for kernel, useful in decision.kernels]
            if NEARLY * max(rates) > rates[decision.options.index(option)]:
                return ()
        return (option,)

    def _worthwhile(self, decision: Decision, tasks: int) -> tuple[Option, ...]:
        """The options that can be the best by this policy's own model."""
        options = decision.options
        match decision.role:
            case "micro-kernel":
                rates = [self.rates.rate(kernel) * useful for kernel, useful in decision.kernels]
                fastest = sorted(range(len(rates)), key=lambda i: -rates[i])
                return tuple(options[i] for i in fastest[:TILES_KEPT])
            case "parallel":  # more tasks than that only cost packing and hand-outs
                return tuple(o for o in options if int(o) <= tasks) or options[:1]
            case "overlap" | "order":  # the first never costs by equation 5; the usual order
                return options[:1]
        return options

    # equations 1 to 8 -----------------------------------------------------------------------------
    def seconds(self, work: Workload) -> float:
        """T_runtime (eq. 8)."""
        extra = [(piece.kernel, piece.amount, piece.units) for piece in (*work.extra, *work.fixed)]
        return self._whole(*self._loops(work), extra)

    def _whole(self, loops: T, share: T, extra: Iterable[tuple[str, T, float]]) -> T:
        """Seconds of the loops and of the extra work, for one workload or for arrays of workloads.
        """
        beside = 0.0 * share
        for kernel, count, units in extra:
            beside = beside + count * units / self.rates.rate(kernel)
        return self.rates.launch + loops + beside * share

    def _loops(self, work: Workload) -> tuple[float, float]:
        """Seconds of the loops, and seconds that each second of extra work adds. All tasks share
        the extra work, and the core with the most tasks ends last.
        """
        time = work.work / self.rates.rate(work.kernel)  # eq. 3, from the table
        for piece in work.beside:
            time += piece.amount * piece.units / self.rates.rate(piece.kernel)
        tasks, waves = 1, 1.0
        for layer in work.layers:
            if layer.parallel > 1:
                tasks *= layer.parallel
                waves *= self._waves(layer)  # eq. 6, 7
        cores = min(self.target.cores, tasks)
        # Seconds of transfers; the hidden ones go on beside computing.
        first = waiting = hidden = shown = 0.0
        for iterations, loads, stores, _, overlapped, _ in work.layers:
            load = store = latency = 0.0
            for stream in loads:
                seconds, level = self._transfer(stream, cores)
                load += seconds
                latency = max(latency, level.latency if stream.nbytes else 0.0)
            for stream in stores:
                store += self.transfer(stream, cores)
            if load:
                first += latency  # eq. 2
            time *= iterations
            waiting = iterations * (waiting + store + (0.0 if overlapped else load))
            hidden = iterations * (hidden + (load if overlapped else 0.0))
            shown += FILL * load if overlapped else 0.0
        hidden -= shown
        step = shown + max(time, hidden) + (1 - HIDDEN) * min(time, hidden)  # eq. 5
        apart = UNEVEN if tasks > 1 else 0.0
        time = (waves + apart) * (first + waiting + step)
        return time, ceil(tasks / self.target.cores) / tasks

    def _waves(self, layer: Layer) -> float:
        """The time of all tasks in that of the largest one, if each core takes the next task as
        soon as it has done one.
        """
        cores = self.target.cores
        waves = ceil(layer.parallel / cores)
        return max(1.0, min(waves, layer.parallel * layer.even / cores + 1 - 1 / cores))

    def transfer(self, stream: Stream, cores: int) -> float:
        """T_load or T_store (eq. 2) of one iteration, of one core. Level 0 is measured with its
        operands in L1, so what comes from there takes no further time.
        """
        return self._transfer(stream, cores)[0]

    def _transfer(self, stream: Stream, cores: int) -> tuple[float, MemoryLevel]:
        """:meth:`transfer` and the :meth:`source`."""
        nbytes, resident, memory, chains, dealt, handed = stream
        level = nearest = self._usable[0][1]
        if not nbytes:
            return 0.0, level
        if handed is not None and self.target.cores > 1:
            level = self.source(stream)
            readers = cores if level.name == "DRAM" else 1
            return nbytes * self._handed(stream, level, readers), level
        each = 0.0  # seconds of a byte
        if memory:
            level = self.target.levels[memory]
            if level is not nearest:
                each = (cores if memory == "DRAM" else 1) / level.bandwidth
        else:  # a cache that is too small for the working set still holds a part of it
            held = 0.0
            for usable, level in self._usable:
                whole = resident if level.shared else resident / dealt
                part = usable / whole if whole > usable else 1.0
                if part > held:
                    if level is not nearest:
                        readers = cores if level.name == "DRAM" else 1
                        each += (part - held) * readers / level.bandwidth
                    held = part
                if held == 1.0:
                    break
        if chains:
            each = max(each, level.latency / CACHE_LINE / chains)
        return nbytes * each, level

    def _handed(self, stream: Stream, level: MemoryLevel, readers: int) -> float:
        """Seconds for each byte that passes from stage to stage. Part of it comes out of the
        cores' own caches, which still hold some of a working set that lies in a level that they
        share.
        """
        (own, capacity), rate = self._private, self.rates.handover
        held = min(1.0, capacity / stream.resident) if level.shared and stream.resident else 1.0
        share = stream.handed or 0.0
        return held / rate(own, share) + (1.0 - held) * readers / rate(level, share)

    def source(self, stream: Stream) -> MemoryLevel:
        """The innermost level whose capacity holds the working set (eq. 1)."""
        if stream.memory:
            return self.target.levels[stream.memory]
        for usable, memory in self._usable:
            if (stream.resident if memory.shared else stream.resident / stream.cores) <= usable:
                return memory
        raise AssertionError("DRAM holds everything")


def _closest(sketch: Sketch, like: Mapping[str, Option]) -> Config | None:
    """The config whose decisions are those of another stage, but for cuts into tasks and blocks,
    which are the closest in proportion. None if it has no such config.
    """
    chosen: dict[str, Option] = {}
    while (decision := sketch.next_decision(chosen)) is not None:
        options, wanted = decision.options, like.get(decision.name, decision.options[0])
        if wanted not in options:
            if decision.role not in CUTS:
                return None
            wanted = min(options, key=lambda option: abs(log(int(option) / int(wanted))))
        chosen[decision.name] = wanted
    return Config(sketch.name, tuple(chosen.items()))
