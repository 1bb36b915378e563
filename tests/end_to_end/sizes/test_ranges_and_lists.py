"""Models compiled for a range of batches and lists of other sizes, in one library."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.compiler import compile_model, compile_to_file
from gtco.driver.cache import caching
from gtco.driver.compiled import CompiledModel
from gtco.driver.sizes.parts import candidates, most_choices
from gtco.runtime.module import load
from gtco.support.errors import InputError, OptionError, ShapeError
from gtco.support.sizes import Range
from tests.end_to_end.sizes.test_variants import convolution, named, random

HIGH, HEIGHTS, WIDTHS = 6, (9, 16), (8, 11)
# onnxsim takes most of the time of so small a compile
PLAIN: dict[str, Any] = {"simplify": False}
TABLE = 40 * 32 * 32  # elements of the weight that every plan reads in one layout


def images() -> onnx.ModelProto:
    """Of a batch of images of any size: features, and a table that their mean is added to."""
    rng = np.random.default_rng(1)
    kernel = rng.standard_normal((40, 3, 3, 3)).astype(np.float32)
    table = rng.standard_normal((40, 32, 32)).astype(np.float32)
    model = convolution()
    del model.graph.initializer[:]
    model.graph.initializer.extend(
        [numpy_helper.from_array(kernel, "k"), numpy_helper.from_array(table, "table")]
    )
    return named(model, x_0="batch", x_2="height", x_3="width")


@pytest.fixture(scope="module")
def compiled() -> Iterator[CompiledModel]:
    dims: dict[str, Any] = {"batch": f"1..{HIGH}", "height": HEIGHTS, "width": list(WIDTHS)}
    with compile_model(images(), dims=dims, threads=2, verify=True, **PLAIN) as model:
        yield model


def test_every_shape(compiled: CompiledModel) -> None:
    session = onnxruntime.InferenceSession(images().SerializeToString())
    every = [*product(range(1, HIGH + 1), HEIGHTS, WIDTHS)]
    for batch, height, width in np.random.default_rng(0).permutation(every).tolist():
        x = random(batch, 3, height, width, seed=batch)
        for mine, its in zip(compiled(x), session.run(None, {"x": x}), strict=True):
            assert mine.shape == its.shape
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


def test_what_it_says_of_itself(compiled: CompiledModel) -> None:
    assert compiled.dims == {"batch": Range(1, HIGH), "height": [*HEIGHTS], "width": [*WIDTHS]}
    assert [str(tensor) for tensor in (*compiled.inputs, *compiled.outputs)] == [
        "x: float32[batch, 3, height, width]",
        "y: float32[batch, 40, y.2, y.3]",
        "z: float32[batch, 40, 32, 32]",
    ]
    assert list(compiled.report.variants) == [str(one) for one in compiled.variants]
    assert all(one.verification.passed for one in compiled.report.variants.values())  # type: ignore[union-attr]
    sizes = [(one.sizes["height"], one.sizes["width"]) for one in compiled.variants]
    assert list(dict.fromkeys(sizes)) == [*product(HEIGHTS, WIDTHS)]
    # the table is stored once, and the convolution's weights in a few layouts
    stored = compiled.metadata["weights_by_dtype"]["float32"]
    assert 4 * TABLE < stored < 1.2 * 4 * TABLE


def test_opened_at_one_shape(compiled: CompiledModel) -> None:
    height, width = HEIGHTS[1], WIDTHS[0]
    x = random(5, 3, height, width)
    with load(compiled.path, dims={"batch": 5, "height": height, "width": width}) as one:
        assert one.inputs[0].shape == x.shape and not one.dims
        assert len(one.profile(x)) == len(one.stages)
        assert all(map(np.array_equal, one(x), compiled(x)))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((7, 3, 9, 8), r"'batch' \(axis 0\) is 7, .* for batch of 1 to 6\..* --dim batch=LOW"),
        ((1, 3, 10, 8), r"'height' \(axis 2\) is 10, .* of 9, 16\..* --dim height=9,16,10 "),
        ((1, 3, 9, 9), r"'width' \(axis 3\) is 9, .* of 8, 11\..*\{'width': \[8, 11, 9\]\}"),
        ((1, 4, 9, 8), r"expected x: .*: axis 1 is 3 in every call"),
    ],
)
def test_shapes_that_it_refuses(compiled: CompiledModel, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        compiled(np.zeros(shape, np.float32))


def test_c_program(compiled: CompiledModel, tmp_path: Path) -> None:
    path = compiled.save(tmp_path / "images.so")
    folder = Path(__file__).parents[3] / "examples/c"
    program = tmp_path / "run"
    subprocess.run(["make", "-s", "-C", str(folder), f"MODEL={path}", f"OUT={program}"], check=True)
    ran = subprocess.run([program, "5x3x16x11"], capture_output=True, text=True, check=True)
    assert f"y: float32[5, 40, 8, 6], {5 * 40 * 8 * 6 * 4} bytes" in ran.stdout
    ran = subprocess.run([program, "5x3x16x12"], capture_output=True, text=True, check=False)
    assert "'width' (axis 3 of input 'x') is 12" in ran.stderr and "for 8,11; gtco" in ran.stderr


def test_torch(tmp_path: Path) -> None:
    import torch
    from torch.export import Dim

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1)).eval()
    batch = Dim("batch", min=1, max=4)
    shapes: dict[str, Any] = {"input": {0: batch, 2: [7, 12]}}
    x = torch.randn(1, 3, 9, 9)
    options: dict[str, Any] = {"threads": 1, "verify": True, **PLAIN}
    with compile_model(net, (x,), dynamic_shapes=shapes, **options) as model:
        assert model.dims == {"batch": Range(1, 4), "input.2": [7, 12]}
        for size, height in ((3, 7), (4, 12), (1, 7)):
            given = torch.randn(size, 3, height, 9)
            torch.testing.assert_close(model(given), net(given).detach(), rtol=1e-4, atol=1e-5)


def test_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(caching, "cache_bytes", lambda: 10**9)
    dims: dict[str, Any] = {"batch": "1..2", "height": [5, 6], "width": 5}
    options: dict[str, Any] = {"dims": dims, "threads": 1, "verify": True, **PLAIN}
    first = compile_to_file(images(), tmp_path / "m.so", **options)
    again = compile_to_file(images(), tmp_path / "m.so", **options)
    assert not first.cached and again.cached
    assert list(first.variants) == list(again.variants)
    assert all(one.verification.passed for one in again.variants.values())  # type: ignore[union-attr]


def test_models_and_options_that_it_refuses(tmp_path: Path) -> None:
    out = tmp_path / "m.so"
    taken = images()
    taken.graph.node.append(helper.make_node("ReduceMean", ["z"], ["w"], name="over_all"))
    taken.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))
    dims: dict[str, Any] = {"batch": "1..3000", "height": [5, 6], "width": 5}
    refused = r"--dim batch=1\.\.3000: .*ReduceMean \(node over_all\).* most"
    with pytest.raises(ShapeError, match=refused):
        compile_to_file(taken, out, dims=dims, **PLAIN)
    many: dict[str, Any] = {"batch": "1..600@2,3", "height": [5, 6, 7], "width": [5, 6, 7]}
    with pytest.raises(OptionError, match=r"9 choices together, .* most 8 beside batch=1\.\.600@"):
        compile_to_file(images(), out, dims=many)
    with pytest.raises(OptionError, match="3 x 1400 sizes are 4200 variants"):
        compile_to_file(images(), out, dims={**many, "width": [*range(5, 1405)]})
    with pytest.raises(ShapeError, match=r"without a value: 'width'"):
        compile_to_file(images(), out, dims={"batch": "1..2", "height": [5, 6]})
    assert not out.exists()


def test_the_bound_is_that_of_any_machine() -> None:
    """With many choices of other sizes fewer parts are tried."""
    range_ = Range(1, 64)
    assert len(candidates(range_, 2)) == 3 and len(candidates(range_, 64)) == 4
    assert len(candidates(range_, 64, 8)) == 4 and candidates(range_, 64, 10) == [1, 4, 16]
    assert candidates(range_, 2, 16) == candidates(range_, 64, 16) == [1, 4]
    assert candidates(Range(1, 64, weighted=(2, 3)), 64, 8) == [1, 2, 3, 4]
    assert most_choices(range_) == 16 and most_choices(Range(1, 2)) == 16
    assert most_choices(Range(1, 64, weighted=(2, 3))) == 8
