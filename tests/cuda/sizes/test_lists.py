"""Libraries for GPUs of several sizes, from the model to the call: each size equals ONNX Runtime in
the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import gtco
from gtco.codegen.jobs import GpuKernel
from gtco.codegen.nvrtc import Image
from gtco.compiler import compile_to_file
from gtco.driver.linking.places import Places, share_counters
from gtco.driver.sizes.variants import renamed
from gtco.runtime.library import read_metadata
from gtco.runtime.plan import BufferRef
from gtco.support.errors import OptionError
from gtco.support.sizes import MOST_VARIANTS
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.models.test_whole_models import Feedforward
from tests.cuda.whole import outputs, prepared_library, several
from tests.end_to_end.sizes.test_variants import TOKENS, WIDTH, batched, convolution


def check(
    model: onnx.ModelProto, loaded: Any, workers: Any, shapes: Sequence[Sequence[int]]
) -> None:
    """The library at these shapes of its input, in order, beside ONNX Runtime."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    rng = np.random.default_rng(len(shapes))
    for shape in shapes:
        x = rng.standard_normal(shape).astype(np.float32)
        found = outputs(loaded, workers, {"x": x})
        for name, want in zip(names, session.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5)


def in_order(shapes: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    order = np.random.default_rng(count).integers(0, len(shapes), count)
    return [*shapes, *(shapes[int(n)] for n in order)]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_a_list_of_batches(driver: FakeDriver, tmp_path: Path, arch: str) -> None:
    model, batches = batched(), [1, 4, 3]
    report, loaded, workers = several(
        driver, tmp_path, model.SerializeToString(), None, arch, dims={"batch": batches}
    )
    assert not report.notes and list(report.variants) == [f"batch={n}" for n in batches]
    with loaded:
        assert loaded.dims == {"batch": batches}
        assert [str(spec) for spec in loaded.outputs] == [
            f"tokens: float32[batch, {TOKENS}, {WIDTH}]",
            f"pooled: float32[batch, {WIDTH}]",
        ]
        check(model, loaded, workers, in_order([(n, TOKENS, WIDTH) for n in batches], 6))
    driver.check()


def test_lists_of_other_sizes(driver: FakeDriver, tmp_path: Path) -> None:
    """Every choice of heights and widths; the variants have one copy of the weights."""
    model = convolution()
    dims = {"x.2": [8, 13], "x.3": [8, 9]}
    report, loaded, workers = several(
        driver, tmp_path, model.SerializeToString(), None, "sm_80", dims=dims
    )
    assert len(report.variants) == 4
    with loaded:
        check(model, loaded, workers, in_order([(1, 3, h, w) for h in (8, 13) for w in (8, 9)], 4))
        with gtco.load(loaded.path, dims={"x.2": 13}) as some:
            assert some.dims == {"x.3": [8, 9]}
            check(model, some, workers, [(1, 3, 13, 9), (1, 3, 13, 8)])
    driver.check()


class Split(nn.Module):
    """A product with few tiles and a long k, which is split over blocks that count."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(4096, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.long(x))


def test_blocks_that_count_have_one_place_for_all_sizes(driver: FakeDriver, tmp_path: Path) -> None:
    """The counters lie behind the arena of the largest variant, which no other writes to."""
    torch.manual_seed(0)
    model, rows = Split().eval().requires_grad_(False), [1, 5, 40]
    x = torch.randn(1, 4096)
    report, loaded, workers = several(
        driver, tmp_path, model, (x,), "sm_80", dims={"x.0": rows}, precision="fp16"
    )
    split = [s["schedule"]["split"] for v in report.variants.values() for s in v.stages]
    assert max(split) > 1, split
    with loaded:
        counters = {
            step["buffers"][-2][1]
            for variant in loaded.metadata["variants"]
            for step in variant["steps"]
            if step["schedule"]["split"] > 1
        }
        assert len(counters) == 1
        for seed, n in enumerate([*rows, 40, 1, 1, 5, 40]):
            given = torch.randn(n, 4096, generator=torch.Generator().manual_seed(seed))
            found = outputs(loaded, workers, {loaded.inputs[0].name: given.numpy()})
            wanted = model.double()(given.double()).float().numpy()
            model.float()
            (got,) = found.values()
            np.testing.assert_allclose(got, wanted, atol=4e-3 * np.abs(wanted).max())
    driver.check()


def test_counters_of_variants() -> None:
    def places(total: int, counters: int) -> Places:
        found = Places()
        found.arena_bytes, found.counter_bytes = total + counters, counters
        scratch = BufferRef("arena", 0), BufferRef("arena", total)
        found.between = {3: scratch} if counters else {}
        return found

    every = [places(640, 64), places(1280, 0), places(128, 192)]
    assert share_counters(every) == (1472, 192)
    assert [one.arena_bytes for one in every] == [832, 1280, 320]
    assert all(one.between[3][1].index == 1280 for one in (every[0], every[2]))
    alone = [places(640, 64)]
    assert share_counters(alone) == (704, 64) and alone[0].arena_bytes == 704


def test_a_module_of_several_sizes_in_float16(driver: FakeDriver, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Feedforward().eval().requires_grad_(False)
    x = torch.randn(1, 21, 40)
    dims = {"x.0": [1, 3], "x.1": [21, 8]}
    report, loaded, workers = several(
        driver, tmp_path, model, (x,), "sm_80", dims=dims, precision="fp16"
    )
    assert len(report.variants) == 4
    with loaded:
        for shape in ((1, 21), (3, 8), (3, 21), (1, 8), (3, 8)):
            given = torch.randn(*shape, 40)
            found = outputs(loaded, workers, {"x": given.numpy()})
            wanted = model(given).numpy()
            np.testing.assert_allclose(
                next(iter(found.values())), wanted, atol=2e-3 * np.abs(wanted).max()
            )
    driver.check()


def test_weights_are_stored_once_for_each_layout(tmp_path: Path) -> None:
    """Two sizes whose kernels read a weight in one layout have it once."""
    def weights(**dims: Any) -> int:
        folder = tmp_path / f"{len(dims)}{dims}"
        folder.mkdir()
        made, built, workers = prepared_library(
            folder, convolution().SerializeToString(), None, "cuda:sm_80", **dims
        )
        workers.link(800)
        made.finish(built, folder)
        return int(read_metadata(folder / "model.so")["weights_bytes"])

    one = weights(shapes={"x.2": 8, "x.3": 8})
    assert weights(dims={"x.2": [8, 16], "x.3": [8, 16]}) < 1.5 * one


# the driver ---------------------------------------------------------------------------------------
def test_one_kernel_for_several_shapes_is_refused(tmp_path: Path) -> None:
    """It has the steps of one shape. ``auto`` says that each shape is a graph."""
    out = tmp_path / "m.so"
    for dims in ({"batch": [1, 2]}, {"batch": "1..8"}):
        with pytest.raises(OptionError, match=r"--launches persistent .* --dim \(dims\)"):
            compile_to_file(
                batched(), out, dims=dims, target="cuda:sm_80", launches="persistent"
            )
    made, _, _ = prepared_library(
        tmp_path, batched().SerializeToString(), None, "cuda:sm_80",
        dims={"batch": [1, 2]}, launches="auto",
    )  # fmt: skip
    report = made.report()
    assert [note for note in report.notes if "each shape is launched as a graph" in note]
    assert not out.exists()


def test_a_kernel_under_a_name_of_its_own() -> None:
    """In machine code and PTX, at the same places."""
    symbol = "gtco_0123456789abcdef"
    code, ptx = f"ELF .text.{symbol}\0{symbol}\0".encode(), f".entry {symbol}(".encode()
    kernel = GpuKernel(
        symbol=symbol,
        images={"sm_80": Image(code, "", 8, 0, 0, 0, ptx)},
        grid=(1, 1, 1),
        threads=32,
        shared=0,
        source="",
        packings={},
    )
    assert renamed(kernel, MOST_VARIANTS - 1).symbol == "vfff_0123456789abcdef"
    other = renamed(kernel, 7)
    assert isinstance(other, GpuKernel) and other.symbol == "v007_0123456789abcdef"
    image = other.images["sm_80"]
    assert image.cubin == f"ELF .text.{other.symbol}\0{other.symbol}\0".encode()
    assert image.ptx == f".entry {other.symbol}(".encode()
    assert replace(kernel, symbol=other.symbol, images=other.images) == other
