"""Configs, instruction sets, layouts and loops in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gtco.machine.isa import ISAS, X86_64
from gtco.report.facts import Decision, StageFacts
from gtco.tensor.intrinsics.table import Kind, MicroKernel

SKETCHES = {
    "gemm": "a product (GEMM)",
    "strassen": "a large product by Strassen's algorithm",
    "convolution": "a convolution over copied rows",
    "winograd": "a 3x3 convolution by Winograd's algorithm",
    "dot": "a product of few columns",
    "attention": "fused attention",
    "depthwise": "a depthwise convolution",
    "rows": "a normalisation, softmax or reduction of rows",
    "across": "a reduction across rows",
    "moments": "half of a split normalisation",
    "merged_moments": "the other half of a split normalisation",
    "counts": "a sum or an extreme of whole numbers",
    "pool": "pooling",
    "resize": "resizing",
    "grid_sample": "sampling at points",
    "scatter": "scattering",
    "topk": "the largest elements",
    "scan": "running sums",
    "elementwise": "element-wise work and movement",
    "fallback": "a single operator as TVM compiles it: right, and slow",
}
FEWER_PRODUCTS = ("winograd", "strassen")  # sketches that multiply less than FLOPs count
# The instruction by which a kind of micro-kernel multiplies.
INSTRUCTIONS = {
    "fma": "FMA",
    "tiles": "AMX, TDPBF16PS",
    "tiles8": "AMX, TDPBUSD",
    "bf16": "AVX512-BF16, VDPBF16PS",
    "widened": "FMA, bfloat16 widened in registers",
    "half": "FMA, float16 widened by VCVTPH2PS",
    "vnni": "AVX512-VNNI, VPDPBUSD",
    "vnni256": "AVX-VNNI, VPDPBUSD",
    "bfmmla": "BF16, BFMMLA",
    "bfdot": "BF16, BFDOT",
    "fcvtl": "FMA, float16 widened by FCVTL",
    "byte": "FMA, int8 weights widened in registers",
    "nibble": "FMA, int4 weights widened in registers",
    "smmla": "I8MM, SMMLA",
    "sdot": "DotProd, SDOT",
}
_VALUES = {
    ("a", "direct"): "rows of A are read where they are",
    ("a", "packed"): "rows of A are packed into scratch before they are multiplied",
    ("b", "direct"): "columns of B are read where they are",
    ("b", "packed"): "columns of B are packed into scratch before they are multiplied",
    ("order", "panels"): "panels of columns are the outer loop of a task",
    ("order", "rows"): "blocks of rows are the outer loop of a task",
    ("prefetch", "none"): "nothing is prefetched",
    ("prefetch", "next"): "the next panel of weights is prefetched while one computes",
    ("prefetch", "both"): "the next panel of weights is prefetched, and this one 16 steps ahead",
    ("query", "registers"): "the queries stay in registers",
    ("query", "shared"): "the queries are read from shared memory in each step",
    ("warp_roles", "none"): "every warp copies and multiplies",
    ("warp_roles", "producer"): "one group of warps copies what the others multiply",
}
_TEXTS = {
    "row": "the instruction of the Tensor Cores that multiplies",
    "mapping": "which loops of the product become its rows, columns and depth",
    "block": "rows, columns and depth that a block of threads multiplies",
    "warps": "rows and columns of a warp's tile, and the warps that share it",
}
_NUMBERS = {
    "chunks_m": "rows are cut into {} for tasks",
    "chunks_n": "columns are cut into {} for tasks",
    "kc": "steps of k at once, the block of B that stays in a cache: {}",
    "mc": "blocks of rows at once: {}",
    "m": "output tiles of {0} x {0}",
    "rows": "rows at once: {}",
    "columns": "columns that are summed side by side: {}",
    "channels": "channels of a task: {}",
    "threads": "threads that work together: {}",
    "vector": "neighbours that are read and written at once: {}",
    "repeat": "how often by each thread: {}",
    "strip": "results of a strip by each thread: {}",
    "neighbours": "neighbours by each thread: {}",
    "split": "k is cut into {} for blocks that add up their sums",
    "group": "blocks are launched in groups of {}, which share operands in L2",
    "stages": "slices of the operands in shared memory at once: {}",
}
# The decisions of attention on a GPU, some of which have the names of products' decisions.
_ATTENTION = {
    "columns": "columns of v that a block computes: {}",
    "tiles": "sixteens of queries of a warp: {}",
    "keys": "keys that a warp takes in a step: {}",
    "warps": "warps that have queries of their own: {}",
    "split": "warps that share the keys: {}",
    "heads": "heads of a block: {}",
    "stages": "steps of k and v in shared memory at once: {}",
}


def kind_of(config: Mapping[str, Any], lanes: int) -> tuple[Kind, MicroKernel] | None:
    """The micro-kernel of a config for a CPU; None if it has none."""
    try:
        tile = MicroKernel.parse(config["tile"], lanes)
    except (LookupError, ValueError, AttributeError):
        return None
    return tile.kind, tile


def unit_of(step: Mapping[str, Any]) -> tuple[str, str]:
    """The unit of a GPU that computes a stage, and the number format that it multiplies. A library
    of an older gtco does not say it of stages without a row.
    """
    known = step.get("unit")
    if known is None:
        row = step["schedule"].get("row", "fma")
        dtype = next(iter(step["inputs"]), step["output"]).partition("[")[0]
        return row.partition(".")[0], dtype if row != "fma" else "float32"
    unit, _, dtype = known.partition(":")
    return unit, dtype or "float32"


def instructions(step: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """The instruction set of a stage's innermost loop. ``target`` is that of the library's
    metadata.
    """
    config = step["schedule"]
    if target.get("kind") == "cuda":
        unit, _ = unit_of(step)
        return "CUDA cores" if unit == "fma" else f"Tensor Cores, {config.get('row', unit)}"
    lanes = target["lanes"]
    vectors = ISAS[target.get("isa", X86_64.name)].vector_name(lanes)
    if config.get("sketch") == "fallback":
        return f"as LLVM makes it for {target['mcpu']}"
    found = kind_of(config, lanes)
    if found is None:
        return f"{vectors} vectors"
    how = INSTRUCTIONS[found[0].name]
    return f"{vectors} {how}" if how.startswith("FMA") else how


def number_format(step: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """The dtype of what is multiplied; without a product, that of the first input, and on a GPU
    float32.
    """
    if target.get("kind") == "cuda":
        return unit_of(step)[1]
    found = kind_of(step["schedule"], target["lanes"])
    if found is None:
        return next(iter(step["inputs"]), str(step["output"])).partition("[")[0]
    # what is widened is multiplied in the format of its layout in registers
    return "int8" if found[0].operand == "int8" else found[0].a.dtype


def decisions(config: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[Decision, ...]:
    """The choices of a config, each in words; the sketch is left out."""
    return tuple(
        Decision(name, value, _words(name, value, config, target))
        for name, value in config.items()
        if name != "sketch"
    )


def _words(name: str, value: Any, config: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    if (
        name == "tile"
        and target.get("kind") != "cuda"
        and (found := kind_of(config, target["lanes"]))
    ):
        _, tile = found
        return (
            f"{tile.rows} rows by {tile.vectors} vectors ({tile.columns} columns) of the output "
            f"are summed in {'tiles' if tile.kind.in_tiles else 'registers'}"
        )
    if (name, value) in _VALUES:
        return _VALUES[name, value]
    numbers = _NUMBERS
    if target.get("kind") == "cuda":
        numbers = {**_NUMBERS, "tile": "squares of {0} x {0} are turned in shared memory"}
        if config.get("sketch") == "attention":
            numbers |= _ATTENTION
    if name in numbers and isinstance(value, int):
        pieces = "1 piece" if value == 1 else f"{value} pieces"
        return numbers[name].format(pieces if "cut into" in numbers[name] else value)
    return _TEXTS.get(name, "")


def loops_source(stage: StageFacts) -> str:
    """Where a stage's loops come from, or why there are none."""
    if not stage.loops:
        return "No nest is described: the library was made by an older gtco."
    if "grid" in stage.launch:
        return (
            "The loops of blocks, warps and threads, and what they compute: an arrow says where a "
            "value goes. gtco compile --dump has the CUDA C++."
        )
    if stage.sketch == "gemm":
        return "The product's nest, C = A x B. An arrow says where a value goes."
    return "The program's loops, and what they store: an arrow says where."


def sketch_words(sketch: str) -> str:
    return SKETCHES.get(sketch, sketch)
