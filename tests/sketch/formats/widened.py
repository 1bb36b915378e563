"""Contractions of float32 inputs by weights of a narrower dtype, against float64 of the same
operands. The micro-kernel widens the weights, or a copy in scratch is widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gtco.machine.target import Target
from gtco.support.dtypes import numpy_dtype
from gtco.tensor.space import Config, Sketch, configs
from gtco.tensor.stage import Stage, TensorType
from tests.kernels import assert_close, build_each, fresh_seed, reference, runnable
from tests.sketch.formats.test_bfloat16 import chain, window

T = TensorType
# Float32 sums of up to 1100 products, one after the other: roundings of 2**-24 add up like noise,
# to four times sqrt(1100) of them in the worst of a thousand elements.
TOLERANCE = 8e-6


def conv(
    dtype: str,
    size: int,
    channels: int,
    n: int,
    taps: int,
    layout: str = "NHWC",
    groups: int = 1,
) -> Stage:
    shape = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    out = (2, size, size, n) if layout == "NHWC" else (2, n, size, size)
    attrs = window(taps // 2, layout=layout, groups=groups)
    weights = T((n, channels // groups, taps, taps), dtype)
    return chain({"x": T(shape), "w": weights}, ("conv2d", "x w", "y", T(out), attrs))


def stages(dtype: str) -> dict[str, Stage]:
    """Contractions with weights of the dtype and nothing else that depends on it."""
    return {
        "normalised_in_front": chain(
            {"x": T((9, 40)), "g": T((40,)), "s": T((40,)), "w": T((40, 33), dtype)},
            ("layer_norm", "x g s", "l", T((9, 40)), {"epsilon": 1e-5}),
            ("matmul", "l w", "y", T((9, 33)), {}),
        ),
        "conv3x3": conv(dtype, 9, 12, 20, 3),
        "conv_odd": conv(dtype, 7, 5, 11, 3),
        "stem": conv(dtype, 13, 3, 20, 5, "NCHW"),
        "grouped": conv(dtype, 6, 10, 8, 3, groups=2),
        "conv1x1": conv(dtype, 6, 13, 20, 1),
        "transposed": chain(
            {"x": T((1, 5, 7, 9)), "w": T((9, 6, 3, 3), dtype)},
            (
                "conv_transpose2d",
                "x w",
                "y",
                T((1, 10, 14, 6)),
                {
                    "layout": "NHWC",
                    "groups": 1,
                    "strides": (2, 2),
                    "padding": (1,) * 4,
                    "output_padding": (1, 1),
                },
            ),
        ),
    }


def widens(config: Config, kind: str) -> bool:
    """True if the config's rows are of the kind that widens weights."""
    return str(config["tile"]).startswith(f"{kind}:")


def few(sketch: Sketch, kind: str) -> Iterator[Config]:
    """The first config, the last one and one between, both of rows that widen and of rows that do
    not.
    """
    every = list(configs(sketch))
    for wanted in (False, True):
        mine = [c for c in every if widens(c, kind) == wanted]
        yield from {mine[i * (len(mine) - 1) // 2] for i in range(3)} if mine else ()


def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Integers of the whole range of their dtype, or normal floats."""
    most = {"int8": 128, "int4": 8}.get(type.dtype)
    if most is None:
        return rng.standard_normal(type.sizes).astype(type.dtype)
    return rng.integers(-most, most, type.sizes).astype(numpy_dtype(type.dtype))


def check(
    match: Callable[[Stage, Target], Sketch | None], stage: Stage, name: str, kind: str
) -> set[bool]:
    """Checks the stage's results. Gives True if it has configs of rows of the ``kind``, which
    widen, False if it has others, or both.
    """
    machine = runnable(name)
    sketch = match(stage, machine)
    assert sketch is not None
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arrays = [drawn(rng, i.type) for i in stage.inputs]
    wanted = reference(stage, arrays).astype(np.float64)
    kinds = set()
    for config, kernel in build_each(sketch, few(sketch, kind), machine):
        print(config.to_json())
        kinds.add(widens(config, kind))
        assert_close(kernel(*arrays), wanted, TOLERANCE)
    return kinds
