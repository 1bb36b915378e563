"""Files of readings: how long configs of some stages took on one machine, with the machine's table
of rates. So a price can be compared with a machine that is not at hand.

A file is gzipped JSON, one value a line. The first line is the machine: ``about`` (its CPU) and
``table``, as the cache keeps it. Each further line is one batch of configs of one stage that were
timed alternately: the stage's name (:data:`STAGES`), ``standing``, the seconds of the config that
all batches of the stage share, and for each config its time relative to that one. Lines are only
appended, so measuring may be interrupted. A later reading of a config counts in place of an earlier
one. ``final`` marks batches of the fastest configs: the fastest of many short readings is partly
luck, and these were timed once more, side by side and for longer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gtco.search.calibration.profile import table_from_json
from gtco.search.calibration.rates import RateTable
from gtco.support.errors import OptionError
from gtco.support.options import PRECISIONS
from gtco.tensor.space import Config
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage

FOLDER = Path(__file__).parents[1] / "readings"
PRODUCTS = (  # m, k, n of layers of ViT, DINOv2 at 518x518, Swin, DETR and SegFormer
    (197, 192, 576),
    (197, 192, 768),
    (197, 768, 192),
    (197, 384, 1536),
    (197, 768, 768),
    (197, 768, 3072),
    (197, 3072, 768),
    (1370, 384, 1536),
    (1370, 1536, 384),
    (1370, 384, 1152),
    (3136, 96, 384),
    (3136, 384, 96),
    (784, 192, 768),
    (49, 768, 3072),
    (49, 3072, 768),
    (3152, 768, 192),
    (1050, 256, 2048),
    (16384, 32, 128),
)
CONVOLUTIONS = (  # side, input and output channels, kernel, stride
    (56, 64, 64, 3, 1),
    (28, 128, 128, 3, 1),
    (128, 32, 64, 3, 2),
)
ATTENTIONS = ((3, 197, 64), (6, 1370, 64))  # heads, tokens, width


def product(m: int, k: int, n: int, dtype: str = "float32") -> Stage:
    """A product with constant weights and a bias."""
    types = {"x": TensorType((m, k), dtype), "w": TensorType((k, n), dtype), "b": TensorType((n,))}
    out = TensorType((m, n))
    operators = [Operator("matmul", ("x", "w"), "t", out), Operator("add", ("t", "b"), "y", out)]
    return make_stage(_stored(operators, dtype), types, ["w", "b"])


def convolution(
    side: int, channels: int, outputs: int, kernel: int, stride: int, dtype: str = "float32"
) -> Stage:
    pad = kernel // 2
    types = {
        "x": TensorType((1, side, side, channels), dtype),
        "w": TensorType((outputs, channels, kernel, kernel), dtype),
        "b": TensorType((outputs,)),
    }
    out = TensorType((1, side // stride, side // stride, outputs))
    window = make_attrs(
        groups=1,
        layout="NHWC",
        strides=(stride, stride),
        padding=(pad, pad, pad, pad),
        dilation=(1, 1),
    )
    operators = [
        Operator("conv2d", ("x", "w"), "t", out, window),
        Operator("add", ("t", "b"), "y", out),
    ]
    return make_stage(_stored(operators, dtype), types, ["w", "b"])


def attention(heads: int, tokens: int, width: int, dtype: str = "float32") -> Stage:
    shape = (1, heads, tokens, width)
    scale = make_attrs(scale=width**-0.5)
    core = Operator("attention", ("q", "k", "v"), "y", TensorType(shape), scale)
    return make_stage(_stored([core], dtype), dict.fromkeys("qkv", TensorType(shape, dtype)), [])


def _stored(operators: Sequence[Operator], dtype: str) -> list[Operator]:
    """The operators, and a cast of their float32 result to the dtype."""
    last = operators[-1]
    if dtype == last.type.dtype:
        return [*operators]
    return [*operators, Operator("cast", (last.output,), "z", TensorType(last.type.shape, dtype))]


def _stages(precision: str) -> dict[str, Stage]:
    """The stages whose operands and results have a precision, by name. The name begins with the
    precision unless it is fp32.
    """
    dtype, mark = PRECISIONS[precision], "" if precision == "fp32" else f"{precision} "
    return {
        **{f"{mark}product {m}x{k}x{n}": product(m, k, n, dtype) for m, k, n in PRODUCTS},
        **{
            f"{mark}convolution {side}x{side}x{i} to {o}, {k}x{k} by {s}": convolution(
                side, i, o, k, s, dtype
            )
            for side, i, o, k, s in CONVOLUTIONS
        },
        **{f"{mark}attention {h}x{t}x{w}": attention(h, t, w, dtype) for h, t, w in ATTENTIONS},
    }


STAGES: Mapping[str, Stage] = {n: s for p in PRECISIONS for n, s in _stages(p).items()}


def precision_of(name: str) -> str:
    """The precision of the stage with this name."""
    first = name.split()[0]
    return first if first in PRECISIONS else "fp32"


@dataclass(frozen=True)
class Readings:
    """The contents of a file. By the stage's name, ``seconds`` has the time of each config, and
    ``final`` the configs that were timed once more.
    """

    about: str
    table: RateTable
    seconds: Mapping[str, Mapping[Config, float]]
    final: Mapping[str, frozenset[Config]]


def load(file: Path) -> Readings:
    """The readings of a file. Raises :class:`OptionError` if it is not such a file."""
    try:
        with gzip.open(file, "rt") as lines:
            first, *batches = map(json.loads, lines)
        table = table_from_json(first["table"])
        return Readings(first["about"], table, _seconds(batches), _final(batches))
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise OptionError(
            f"{file} is not a file of readings ({error}): make one with "
            "python -m gtco.bench readings"
        ) from error


def _seconds(batches: Iterable[Mapping[str, Any]]) -> dict[str, dict[Config, float]]:
    ratios: dict[str, dict[Config, float]] = {}
    standing: dict[str, list[float]] = {}
    for batch in batches:
        standing.setdefault(batch["stage"], []).append(batch["standing"])
        for config, ratio in batch["ratios"]:
            ratios.setdefault(batch["stage"], {})[Config.from_json(config)] = ratio
    return {
        stage: {config: ratio * median(standing[stage]) for config, ratio in each.items()}
        for stage, each in ratios.items()
    }


def _final(batches: Iterable[Mapping[str, Any]]) -> dict[str, frozenset[Config]]:
    found: dict[str, frozenset[Config]] = {}
    for batch in batches:
        if batch.get("final"):
            configs = frozenset(Config.from_json(config) for config, _ in batch["ratios"])
            found[batch["stage"]] = found.get(batch["stage"], frozenset()) | configs
    return found


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Adds one line: the machine, or a batch."""
    with gzip.open(file, "at") as out:
        out.write(json.dumps(line, separators=(",", ":")) + "\n")
