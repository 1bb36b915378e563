"""Products of uint8 by constant int8 weights in int32: every element is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gtco.machine.target import TARGETS, detect
from gtco.tensor.intrinsics.table import kinds
from gtco.tensor.sketch import sketches
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import Config, Sketch, configs
from gtco.tensor.stage import Stage, TensorType
from tests.kernels import EMULATED, build_each, config_with, fresh_seed, reference, runnable
from tests.sketch.formats.test_bfloat16 import chain, few, window

T = TensorType
TESTED = ("native", "alderlake", EMULATED)


def machine_of(name: str) -> Any:
    machine = runnable(name)
    if not kinds(machine, "int8"):
        pytest.skip("this CPU has no VNNI")
    return machine


def dense(m: int, n: int, k: int) -> Stage:
    types = {"x": T((m, k), "uint8"), "w": T((k, n), "int8")}
    return chain(types, ("matmul", "x w", "y", T((m, n), "int32"), {}))


def conv(size: int, channels: int, n: int, taps: int, layout: str = "NHWC", **attrs: Any) -> Stage:
    image = (2, size, size, channels) if layout == "NHWC" else (2, channels, size, size)
    attrs = window(0, layout=layout, **attrs)
    out = (size - (taps - 1) * attrs["dilation"][0] - 1) // attrs["strides"][0] + 1
    shape = (2, out, out, n) if layout == "NHWC" else (2, n, out, out)
    weights = T((n, channels // attrs["groups"], taps, taps), "int8")
    types = {"x": T(image, "uint8"), "w": weights}
    return chain(types, ("conv2d", "x w", "y", T(shape, "int32"), attrs))


def dressed(m: int, n: int, k: int, out: str) -> Stage:
    """The zero point's correction, the scale, and the quantization of the result."""
    c, f = T((m, n), "int32"), T((m, n))
    return chain(
        {
            "x": T((m, k)),
            "w": T((k, n), "int8"),
            "columns": T((n,), "int32"),
            "scale": T((n,)),
        },
        ("cast", "x", "q", T((m, k), "uint8"), {}),
        ("matmul", "q w", "c", c, {}),
        ("add", "c columns", "d", c, {}),
        ("cast", "d", "e", f, {}),
        ("multiply", "e scale", "s", f, {}),
        ("round", "s", "r", f, {}),
        ("clip", "r", "h", f, {"min": float(np.iinfo(out).min), "max": float(np.iinfo(out).max)}),
        ("cast", "h", "y", T((m, n), out), {}),
    )


STAGES = {
    "even": dense(32, 64, 64),
    "odd": dense(13, 37, 33),
    "one_step": dense(5, 20, 1),
    "three_steps": dense(7, 33, 3),
    "one_row": dense(1, 50, 130),
    "one_column": dense(19, 1, 47),
    "blocks_of_k": dense(11, 40, 519),
    "batches": chain(
        {"x": T((3, 10, 21), "uint8"), "w": T((3, 21, 18), "int8")},
        ("matmul", "x w", "y", T((3, 10, 18), "int32"), {}),
    ),
    "padded": chain(
        {"x": T((2, 7, 7, 5), "uint8"), "w": T((11, 5, 3, 3), "int8")},
        ("pad", "x", "p", T((2, 9, 9, 5), "uint8"),
         {"before": (0, 1, 1, 0), "after": (0, 1, 1, 0), "value": 119}),
        ("conv2d", "p w", "y", T((2, 7, 7, 11), "int32"), window(0)),
    ),
    "conv1x1": conv(6, 13, 20, 1),
    "conv3x3": conv(9, 12, 20, 3),
    "stem": conv(19, 3, 20, 7, "NCHW", strides=(2, 2)),
    "patches": conv(16, 3, 20, 4, "NCHW", strides=(4, 4)),
    "grouped": conv(6, 10, 8, 3, groups=2),
    "stored_as_uint8": dressed(13, 37, 33, "uint8"),
    "stored_as_int8": dressed(13, 37, 33, "int8"),
}  # fmt: skip


def drawn(stage: Stage, seed: int) -> list[np.ndarray]:
    """Integers of the whole range, scales that bring the sums to some hundreds."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    found = []
    for i in stage.inputs:
        match i.type.dtype:
            case "uint8" | "int8" as dtype:
                bounds = np.iinfo(dtype)
                found.append(rng.integers(bounds.min, bounds.max + 1, i.type.sizes).astype(dtype))
            case "int32":
                found.append(rng.integers(-(2**20), 2**20, i.type.sizes).astype(np.int32))
            case _ if i.name == "scale":
                found.append((2.0 ** rng.integers(-13, -9, i.type.sizes)).astype(np.float32))
            case _:
                found.append(rng.integers(0, 256, i.type.sizes).astype(np.float32))
    return found


def exact(sketch: Sketch, every: list[Config], machine: Any, arrays: list[np.ndarray]) -> None:
    wanted = reference(sketch.stage, arrays)
    for config, kernel in build_each(sketch, every, machine):
        print(config.to_json())
        got = kernel(*arrays)
        assert got.dtype == sketch.stage.output.type.dtype
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_products(stage: Stage, name: str) -> None:
    """Scales are powers of two, so that also the results that are rounded are exact."""
    machine = machine_of(name)
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    exact(sketch, [*few(sketch, 4)], machine, drawn(stage, fresh_seed()))


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_every_sketch_that_takes_integers_is_exact(stage: Stage) -> None:
    """Winograd's convolution took them once, and its transformed values did not fit 8 bits."""
    machine = machine_of("native")
    for sketch in sketches(stage, machine):
        if sketch.name != "fallback":
            exact(sketch, [*few(sketch, 2)], machine, drawn(stage, fresh_seed()))


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("values", [(255, -128), (255, 127), (0, -128), (255, 0)])
def test_the_largest_sums(values: tuple[int, int], name: str) -> None:
    """255 x -128 over all of k: 16 bits would saturate after one product, float32 would round."""
    machine, (a, b) = machine_of(name), values
    stage = dense(9, 35, 1031)
    arrays = [np.full((9, 1031), a, np.uint8), np.full((1031, 35), b, np.int8)]
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    assert (reference(stage, arrays) == 1031 * a * b).all()
    exact(sketch, [*few(sketch, 3)], machine, arrays)


@pytest.mark.parametrize("name", TESTED)
def test_windows_read_in_place(name: str) -> None:
    machine, stage = machine_of(name), conv(9, 12, 20, 3)
    sketch = convolution.match(stage, machine)
    assert sketch is not None
    exact(sketch, [*few(sketch, 4)], machine, drawn(stage, fresh_seed()))


@pytest.mark.parametrize("name", TESTED)
def test_bytes_are_read_in_place(name: str) -> None:
    """A that lies in an input is not packed, if k is a whole number of steps."""
    machine = machine_of(name)
    for k, places in ((64, {"direct", "packed"}), (63, {"packed"})):
        sketch = gemm.match(dense(13, 37, k), machine)
        assert sketch is not None
        assert {c["a"] for c in configs(sketch)} == places
    sketch = gemm.match(dense(13, 37, 64), machine)
    assert sketch is not None
    arrays = drawn(sketch.stage, fresh_seed())
    exact(sketch, [config_with(sketch, a="direct")], machine, arrays)


@pytest.mark.parametrize("name", ["native", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("stage", [dense(5, 9, 7), conv(6, 5, 4, 3)], ids=["dense", "conv"])
def test_every_machine_has_a_kernel(stage: Stage, name: str) -> None:
    """Where no row multiplies such operands, the fallback does."""
    machine = runnable(name)
    found = sketches(stage, machine)
    assert [s.name for s in found if s.name != "fallback"] or not kinds(machine, "int8")
    assert all(s.name == "fallback" for s in found) or kinds(machine, "int8")
    assert found
    exact(found[-1], [next(iter(configs(found[-1])))], machine, drawn(stage, fresh_seed()))


def test_rows_of_machines() -> None:
    """VPDPBUSD is used where the target has it, in the width of its vectors; before it the tiles.
    """
    names = {name: [k.name for k in kinds(row, "int8")] for name, row in TARGETS.items()}
    assert names["x86-64-v3"] == names["x86-64-v4"] == names["skylake-avx512"] == []
    assert names["alderlake"] == ["vnni256"]
    for name in ("cascadelake", "icelake-server", "znver4", "znver5"):
        assert names[name] == ["vnni"]
    assert names["sapphirerapids"] == ["tiles8", "vnni"]
    assert len(kinds(detect(), "int8")) <= 2
