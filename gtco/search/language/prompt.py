"""The first part of a tensor sentence: what there is to compute, and on which machine (TLM, Section
4.2: input subgraph and hardware specifications).

A prompt has at most :data:`LONGEST` words. It follows from the stage's canonical program and from
the machine alone: names, and the order in which a model has its stages, do not count. Rates of a
machine are words in classes of half an octave, so that two machines that are nearly alike have the
same prompt. What is measured of a machine comes in through the ``target`` of its table of rates
(bandwidths, frequency) and through ``rates``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2, prod

from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine, Target
from gtco.search.calibration.rates import RateTable
from gtco.search.language.words import BEGIN, CUT, Vocabulary
from gtco.tensor.operators import is_anchor, pattern
from gtco.tensor.stage import Operator, Stage, TensorType

LONGEST = 84  # words of a prompt
MOST_OPERATORS = 20  # a longer program is cut in its middle
CLASSES = 32  # classes of half an octave each
# Attributes that decide which loops there are; each with the number of values that are said.
ATTRIBUTES = {"strides": 2, "groups": 1, "axis": 1, "axes": 3, "kernel": 2, "k": 1}


def in_class(field: str, value: float, least: float) -> str:
    """The word of a quantity: its half octave above ``least``, from 0 to ``CLASSES - 1``."""
    octave = log2(value / least) if value > 0 else 0.0
    return f"{field}={min(max(round(2 * octave), 0), CLASSES - 1)}"


def machine_words(machine: Machine, rates: RateTable | None = None) -> list[str]:
    """The machine in words. ``rates`` is its table, by the formula if it is not given."""
    if isinstance(machine, GpuTarget):
        return list(_gpu(machine))
    return list(_cpu(machine, rates or RateTable(machine)))


def _cpu(machine: Target, rates: RateTable) -> Iterator[str]:
    yield "m.cpu"
    yield f"m.lanes={machine.lanes}"
    yield f"m.registers={machine.registers}"
    yield f"m.cores={min(machine.cores, 1 << 10)}"
    for level in machine.memory:
        if level.name != "DRAM":
            yield in_class(f"m.{level.name}", level.capacity, 8 << 10)
    for level in machine.memory:
        yield in_class(f"m.{level.name}.speed", level.bandwidth, 1e9)
    fma = rates.rate("fma")
    yield in_class("m.fma", fma, 2.5e8)
    for work in ("exp", "pack", "store"):
        yield in_class(f"m.{work}", rates.rate(work), 2.5e8)
    yield in_class("m.launch", rates.launch, 1e-7)
    if "avx512bf16" in machine.features:
        yield in_class("m.bf16", rates.rate("bf16:12x2"), 2.5e8)
    if "amx-bf16" in machine.features:
        yield "m.tiles"


def _gpu(machine: GpuTarget) -> Iterator[str]:
    yield "m.gpu"
    yield f"m.generation={machine.generation}"
    yield in_class("m.sms", machine.sms, 8)
    yield in_class("m.shared", machine.shared, 16 << 10)
    yield in_class("m.threads", machine.threads_sm, 512)
    yield in_class("m.L2", machine.l2, 1 << 20)
    yield in_class("m.L2.speed", machine.l2_bandwidth, 1e11)
    yield in_class("m.DRAM.speed", machine.bandwidth, 1e11)
    for unit in ("fma", "mma:float16", "wgmma:float16"):
        if rate := machine.rate(unit):
            yield in_class(f"m.{unit}", rate, 1e12)


def stage_words(stage: Stage) -> Iterator[str | int]:
    """The stage in words and numbers: its operators in order, the types of its main operator (the
    contraction, reduction or opaque one, else the last) and of its output, and how much work it is.
    """
    kinds = [f"o.{op.kind}" for op in stage.operators]
    if len(kinds) > MOST_OPERATORS:
        half = MOST_OPERATORS // 2
        kinds = [*kinds[:half], CUT, *kinds[-half:]]
    yield from kinds
    main = main_operator(stage)
    yield "a.of"
    yield f"o.{main.kind}"
    for name, most in ATTRIBUTES.items():
        value = main.get(name)
        if value is not None:
            yield f"a.{name}"
            values = value if isinstance(value, tuple) else (value,)
            yield from (v for v in values[:most] if isinstance(v, int))
    for n, tensor in enumerate(main.inputs[:2]):
        yield from _type(stage.types[tensor], "a.by" if n else "a.in")
        if tensor in stage.constants:
            yield "a.constant"
    if main is not stage.output:
        yield from _type(main.type, "a.makes")
    yield from _type(stage.output.type, "a.out")
    yield from _amounts(stage, main)


def main_operator(stage: Stage) -> Operator:
    """The operator that decides the loops: the last anchor, else the last opaque one, else the last
    operator.
    """
    anchors = [op for op in stage.operators if is_anchor(op.kind)]
    opaque = [op for op in stage.operators if pattern(op.kind) == "opaque"]
    return (anchors or opaque or list(stage.operators))[-1]


def _type(type_: TensorType, mark: str) -> Iterator[str | int]:
    yield mark
    if type_.dtype != "float32":
        yield f"t.{type_.dtype}"
    yield from (d if isinstance(d, int) else "a.open" for d in type_.shape[-6:])


def _amounts(stage: Stage, main: Operator) -> Iterator[str | int]:
    """The rows, columns and depth of a product, and bytes and operations in classes."""
    if not all(t.static for t in stage.types.values()):
        return
    if main.kind in ("matmul", "conv2d", "attention"):
        depth = _depth(stage, main)
        channels = main.type.sizes[-1]
        if main.kind == "conv2d" and main.get("layout") == "NCHW":
            channels = main.type.sizes[1]
        yield "a.product"
        yield from (main.type.size // max(channels, 1), channels, depth)
        yield in_class("w.products", float(main.type.size) * depth, 1e3)
    yield in_class("w.read", stage.input_bytes, 64)
    yield in_class("w.written", stage.output.type.nbytes, 64)


def _depth(stage: Stage, main: Operator) -> int:
    """The number of products in a sum."""
    second = stage.types[main.inputs[1]].sizes
    if main.kind == "conv2d":
        return prod(second[1:])
    return second[-1] + second[-2] if main.kind == "attention" else second[-2]


def prompt(vocabulary: Vocabulary, stage: Stage, machine: list[str]) -> list[int]:
    """The prompt in numbers: the machine's words, then the stage's, cut at :data:`LONGEST`."""
    numbers = [vocabulary.number(word) for word in (BEGIN, *machine)]
    for word in stage_words(stage.canonical):
        spelled = vocabulary.spell(word) if isinstance(word, int) else (vocabulary.number(word),)
        numbers += spelled
    return numbers[:LONGEST]
