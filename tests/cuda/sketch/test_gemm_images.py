"""Machine code of GPU products. The policy's picks compile for every architecture, multiply on
Tensor Cores if there are some for the format, and keep to their registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gtco.codegen.cuda import gpu_code
from gtco.codegen.sass import machine_code
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.search.gpu.policy import GpuPolicy, occupancy
from gtco.tensor import space
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.stage import Stage
from tests.cuda.sketch.test_gemm import T, chain, conv, dense, sketch_of, window

# GLPN's first convolution, of an image that is transposed and rounded on its way
PATCHES = chain(
    {"x": T(1, 3, 480, 640), "w": T(32, 3, 7, 7, dtype="float16"), "bias": T(32)},
    ("cast", "x", "h", T(1, 3, 480, 640, dtype="float16"), {}),
    ("permute", "h", "p", T(1, 480, 640, 3, dtype="float16"), {"axes": (0, 2, 3, 1)}),
    ("conv2d", "p w", "c", T(1, 120, 160, 32), window(3, layout="NHWC", strides=(4, 4))),
    ("add", "c bias", "y", T(1, 120, 160, 32), {}),
)


def rectified(
    read: tuple[int, int, int],
    made: tuple[int, int, int],
    taps: int,
    out: str = "",
    dtype: str = "float16",
    **attrs: Any,
) -> Stage:
    """A float16 convolution of an image [h, w, channels] of ``dtype``, with bias and ReLU."""
    wide, image = T(1, *made), T(1, *read, dtype="float16")
    weights = T(made[2], read[2], taps, taps, dtype="float16")
    rows: list[Any] = [] if dtype == "float16" else [("cast", "x", "h", image, {})]
    operands = "h w" if rows else "x w"
    rows += [
        ("conv2d", operands, "c", wide, window(taps // 2, layout="NHWC", **attrs)),
        ("add", "c bias", "s", wide, {}),
        ("relu", "s", "y", wide, {}),
    ]
    if out:
        rows.append(("cast", "y", "z", T(1, *made, dtype=out), {}))
    return chain({"x": T(1, *read, dtype=dtype), "w": weights, "bias": T(made[2])}, *rows)


STAGES = {  # ViT-B's, a head, a convolution of DETR's backbone
    "projection": dense(197, 768, 768, "float16"),
    "feed_forward": dense(197, 3072, 768, "bfloat16", out="bfloat16"),
    "many_rows": dense(6304, 2304, 768, "float16", out="float16"),
    "head": dense(1, 1000, 768, "float16"),
    "computed": dense(197, 197, 64, "float16", constant=False),
    "float32": dense(197, 768, 3072, "float32"),
    "convolution": conv(28, 128, 128, 3, "float16"),
    # three channels: each element of A is computed alone
    "first_convolution": conv(480, 3, 64, 7, "float16", strides=(2, 2)),
    "patches": PATCHES,
    # places of a padded image's chunks beside the sums: of DETR's backbone, SwiftFormer's second
    "backbone": rectified((200, 334, 64), (200, 334, 64), 3, out="float16"),
    "stem": rectified((112, 112, 24), (56, 56, 48), 3, strides=(2, 2)),
    # the places of computed runs: of DETR's residual stream, and of a float32 image with its places
    "narrowed": rectified((200, 334, 256), (200, 334, 64), 1, out="float16", dtype="float32"),
    "widened": rectified((200, 334, 64), (200, 334, 64), 3, out="float16", dtype="float32"),
}


def in_turn() -> Iterator[Any]:
    """Every stage for every architecture. ``make test`` takes every other one of them."""
    for number, name in enumerate(STAGES):
        for at, arch in enumerate(ARCHITECTURES):
            marks = [pytest.mark.scheduled] if (number + at) % 2 else []
            yield pytest.param(STAGES[name], arch, id=f"{name}-{arch}", marks=marks)


@pytest.mark.parametrize(("stage", "arch"), in_turn())
def test_picks(stage: Stage, arch: str) -> None:
    target = gpu_target(f"cuda:{arch}")
    sketch = sketch_of(stage, target)
    config = GpuPolicy(target).compared(sketch)[0][0]
    program, launch = space.build(sketch, config, "product"), sketch.workload(config)
    assert isinstance(program, CudaProgram)
    images = gpu_code(replace(program, registers=launch.registers), target)
    assert isinstance(images, dict), images
    image = images[arch]
    assert not image.spills and not image.local
    assert image.registers * launch.threads <= target.registers_sm
    assert launch.shared <= target.shared
    used = replace(launch, registers=image.registers)
    assert occupancy(used, target).blocks >= occupancy(launch, target).blocks
    code = machine_code(image.cubin)["product"]
    cores = target.rate(f"mma:{sketch.operand}") > 0
    assert (code.tensor_core > 0) == cores and not code.spilled
    stores = {name for name in code.instructions if name.startswith("STG")}
    if program.counters:  # other blocks add the sums up: lanes have neighbours
        assert "STG.E" in stores or "STG.E.SYS" in stores
        stores -= {"STG.E", "STG.E.SYS"}
    wide = ".128" if stage.output.type.dtype == "float32" else ".64"  # four elements at once
    assert all(wide in name for name in stores) == (stage is not STAGES["computed"]), stores
    asynchronous = code.count("LDGSTS") > 0
    assert asynchronous == (target.generation >= 80)
