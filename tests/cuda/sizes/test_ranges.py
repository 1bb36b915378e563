"""Libraries for GPUs of a range of batches, from the model to the call: every batch equals ONNX
Runtime in the emulator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

import gtco
from gtco.support.errors import InputError, ShapeError
from gtco.support.sizes import Range
from models.export import export_onnx
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.models.test_whole_models import Feedforward
from tests.cuda.sizes.test_lists import check
from tests.cuda.whole import outputs, prepared_library, several
from tests.end_to_end.sizes.test_variants import TOKENS, WIDTH, batched, convolution, named
from tests.models.test_models import TINY, seeded


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_range_of_batches(driver: FakeDriver, tmp_path: Path, arch: str) -> None:
    """Batches in any order, among them some that no parts add up to."""
    model = batched()
    report, loaded, workers = several(
        driver, tmp_path, model.SerializeToString(), None, arch, dims={"batch": "1..64"}
    )
    assert not report.notes and next(iter(report.variants)) == "batch=1"
    batches = [1, 2, 3, 5, 15, 64, 4, 33, *map(int, np.random.default_rng(3).integers(1, 65, 5))]
    with loaded:
        assert loaded.dims == {"batch": Range(1, 64)}
        check(model, loaded, workers, [(n, TOKENS, WIDTH) for n in batches])
        with pytest.raises(InputError, match=r"'batch' \(axis 0\) is 65, .* of 1 to 64.*--dim"):
            loaded(np.zeros((65, TOKENS, WIDTH), np.float32))
        with gtco.load(loaded.path, dims={"batch": 7}) as seven:
            check(model, seven, workers, [(7, TOKENS, WIDTH)])
    driver.check()


def test_samples_that_nobody_asked_for_do_not_count(driver: FakeDriver, tmp_path: Path) -> None:
    """A run of 3 samples in a part of 4 leaves the fourth as an earlier run did: NaN."""
    model = batched()
    _, loaded, workers = several(
        driver, tmp_path, model.SerializeToString(), None, "sm_80", dims={"batch": "1..16@4"}
    )
    with loaded:
        covered = loaded._variants.covered
        sizes = covered.choices[0].sizes
        parts = [[sizes[part] for part in covered.choices[0].of(n)] for n in range(1, 17)]
        assert any(sum(run) > n for n, run in enumerate(parts, 1)), parts
        x = np.full((16, TOKENS, WIDTH), np.nan, np.float32)
        for n in (16, 4, 3, 15, 2):
            loaded(x[:n])
            check(model, loaded, workers, [(n - 1, TOKENS, WIDTH)])
    driver.check()


def test_a_range_beside_a_list(driver: FakeDriver, tmp_path: Path) -> None:
    """Any batch of images of two heights, each with parts of its own."""
    model = named(convolution(), x_0="batch")
    model.graph.node[-1].CopyFrom(helper.make_node("Relu", ["p"], ["z"]))
    del model.graph.initializer[1]
    report, loaded, workers = several(
        driver, tmp_path, model.SerializeToString(), None, "sm_80",
        dims={"batch": "1..9", "x.2": [8, 13]}, shapes={"x.3": 8},
    )  # fmt: skip
    assert {name.partition(", ")[2] for name in report.variants} == {"x.2=8", "x.2=13"}
    rng = np.random.default_rng(5)
    shapes = [(int(rng.integers(1, 10)), 3, int(rng.choice((8, 13))), 8) for _ in range(10)]
    with loaded:
        check(model, loaded, workers, shapes)
        with pytest.raises(InputError, match=r"'x.2' \(axis 2\) is 9, .* of 8, 13"):
            loaded(np.zeros((2, 3, 9, 8), np.float32))
    driver.check()


def test_a_module_in_float16(driver: FakeDriver, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Feedforward().eval().requires_grad_(False)
    x = torch.randn(1, 21, 40)
    _, loaded, workers = several(
        driver, tmp_path, model, (x,), "sm_90a", dims={"x.0": "1..20"}, precision="fp16"
    )
    with loaded:
        for batch in (20, 1, 6, 3, 17):
            given = torch.randn(batch, 21, 40)
            (found,) = outputs(loaded, workers, {"x": given.numpy()}).values()
            wanted = model(given).numpy()
            np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())
    driver.check()


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("vit", 2e-3),
        pytest.param("swin", 2e-3, marks=pytest.mark.scheduled),
        pytest.param("setr", 5e-3, marks=pytest.mark.scheduled),
        pytest.param("detr", 1e-2, marks=pytest.mark.scheduled),
    ],
)
def test_vision_transformers(
    driver: FakeDriver, tmp_path: Path, name: str, tolerance: float
) -> None:
    """Of the family's small members, in float16, at batches that change."""
    create, (_, *shape) = TINY[name]
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    export_onnx(seeded(create()), (torch.randn(2, *shape),), path, open_axes={0: "batch"})
    session = onnxruntime.InferenceSession(path)
    _, loaded, workers = several(
        driver, tmp_path, path, None, "sm_80", dims={"batch": "1..4"}, precision="fp16"
    )
    with loaded:
        for batch in (3, 1, 2, 4, 1):
            image = torch.randn(batch, *shape).numpy()
            wanted = session.run(None, {"image": image})
            found = outputs(loaded, workers, {"image": image})
            for array, right in zip(found.values(), wanted, strict=True):
                error = np.abs(array - right).max() / np.abs(right).max()
                assert error <= tolerance, f"{name} at batch {batch}: {error:.2g}"
    driver.check()


def test_samples_that_depend_on_each_other(driver: FakeDriver, tmp_path: Path) -> None:
    """Each size of the range is compiled, or the range is refused."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x", "axes"], ["y"], name="over_all")],
        "mixing",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ("batch", 40))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.array([0]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    source = model.SerializeToString()
    dims = {"batch": "2..4"}
    report, loaded, workers = several(driver, tmp_path, source, None, "sm_80", dims=dims)
    assert any("batch=2..4 has 3 sizes: each is compiled" in note for note in report.notes)
    session = onnxruntime.InferenceSession(source)
    with loaded:
        for n in (4, 2, 3):
            x = np.random.default_rng(n).standard_normal((n, 40)).astype(np.float32)
            (found,) = outputs(loaded, workers, {"x": x}).values()
            np.testing.assert_allclose(found, session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="operator ReduceMean"):
        prepared_library(tmp_path, source, None, "cuda:sm_80", dims={"batch": "1..5000"})
    driver.check()
