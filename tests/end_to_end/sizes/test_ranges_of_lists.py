"""Ranges of sizes that are not batches: each size is compiled, and the user need not know which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gtco.compiler import compile_model, compile_to_file
from gtco.driver.cache import caching
from gtco.driver.compiled import CompiledModel
from gtco.driver.sizes.ways import ways
from gtco.runtime.module import Model, load
from gtco.support.errors import InputError, OptionError, ShapeError
from gtco.support.sizes import Range, range_of, sizes_of_variants
from tests.end_to_end.sizes.test_ranges import mixing
from tests.end_to_end.sizes.test_ranges_and_lists import PLAIN, images
from tests.end_to_end.sizes.test_variants import batched, named, random
from tests.runtime.test_ranges import set_shapes

WIDTHS, HEIGHTS = Range(8, 14, 3), [9, 12]
EACH = "width=8..14:3 has 3 sizes: each is compiled, since input 'x' has 'width' on axis 3"


def check(model: Model, *shapes: tuple[int, ...]) -> None:
    """Compares with ONNX Runtime."""
    session = onnxruntime.InferenceSession(images().SerializeToString())
    for shape in shapes:
        x = random(*shape)
        for mine, its in zip(model(x), session.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def widths() -> Iterator[CompiledModel]:
    dims: dict[str, Any] = {"batch": 2, "height": 9, "width": "8..14:3"}
    with compile_model(images(), dims=dims, threads=1, verify=True, **PLAIN) as model:
        yield model


def test_a_range_of_widths_is_a_list(widths: CompiledModel) -> None:
    assert widths.dims == {"width": WIDTHS}
    assert list(widths.report.variants) == ["width=8", "width=11", "width=14"]
    assert any(note.startswith(EACH) for note in widths.report.notes)
    check(widths, *((2, 3, 9, width) for width in WIDTHS))
    assert "compiled for\n *   width=8..14:3\n" in widths.path.with_suffix(".h").read_text()


def test_messages_are_about_the_range(widths: CompiledModel) -> None:
    with pytest.raises(InputError) as error:
        widths(random(2, 3, 9, 9))
    assert str(error.value) == (
        "input 'x' has shape (2, 3, 9, 9): 'width' (axis 3) is 9, and this library was compiled "
        "for width of 8 to 14 in steps of 3. Compile it for another range: gtco compile --dim "
        "width=LOW..HIGH:STEP (in Python: dims={'width': 'LOW..HIGH:STEP'})"
    )
    assert (
        "'width' (axis 3 of input 'x') is 9, and this model was compiled for 8 to 14 in steps of "
        "3; gtco compile --dim 'width=LOW..HIGH:STEP'" in set_shapes(widths, (2, 3, 9, 9))
    )
    with pytest.raises(OptionError, match=r"compiled for width=8\.\.14:3; compile it again with a"):
        load(widths.path, dims={"width": 9})


@pytest.fixture(scope="module")
def both() -> Iterator[CompiledModel]:
    """The widths come first, and the batch is found."""
    dims: dict[str, Any] = {"width": "8..14:3", "batch": "1..5", "height": HEIGHTS}
    with compile_model(images(), dims=dims, threads=1, **PLAIN) as model:
        yield model


def test_the_batch_of_two_ranges_is_found(both: CompiledModel) -> None:
    assert both.dims == {"batch": Range(1, 5), "width": WIDTHS, "height": HEIGHTS}
    check(both, (5, 3, 9, 14), (3, 3, 12, 8), (1, 3, 9, 11))
    assert any(note.startswith(EACH) for note in both.report.notes)
    header = both.path.with_suffix(".h").read_text()
    assert "compiled for\n *   width=8..14:3, batch=1..5, height=9\n" in header
    for shape, said in (
        ((6, 3, 9, 8), "for batch of 1 to 5. Compile it for another range: gtco compile --dim bat"),
        ((5, 3, 9, 9), "for width of 8 to 14 in steps of 3. Compile"),
        ((5, 3, 10, 8), "for height of 9, 12. Add the size to the list: gtco compile --dim height"),
    ):
        with pytest.raises(InputError, match=said):
            both(random(*shape))


def test_some_sizes_are_chosen_at_opening(both: CompiledModel) -> None:
    with load(both.path, dims={"height": 12}) as model:
        assert model.dims == {"batch": Range(1, 5), "width": WIDTHS}
        assert str(model.inputs[0]) == "x: float32[batch, 3, 12, width]"
        assert str(model.outputs[0]) == "y: float32[batch, 40, 6, y.3]"
        check(model, (5, 3, 12, 14), (1, 3, 12, 8), (4, 3, 12, 8))
        with pytest.raises(InputError, match="axis 2 is 12 in every call"):
            model(random(5, 3, 9, 14))
        with pytest.raises(OptionError, match=r"dims=\{'batch': 1, 'width': 8, 'height': 12\}"):
            _ = model.stages
    with load(both.path, dims={"height": 12, "width": 8}) as model:
        assert model.dims == {"batch": Range(1, 5)}
        check(model, (5, 3, 12, 8), (2, 3, 12, 8))
        assert {one.sizes["width"] for one in model.variants} == {8}
    with load(both.path, dims={"batch": 3}) as model:
        assert model.dims == {"width": WIDTHS, "height": HEIGHTS}
        assert str(model.inputs[0]) == "x: float32[3, 3, height, width]"
        check(model, (3, 3, 12, 8), (3, 3, 9, 14))
        with pytest.raises(InputError, match="axis 0 is 3 in every call"):
            model(random(2, 3, 9, 14))


def test_samples_that_are_taken_together_are_a_list() -> None:
    with compile_model(mixing("mean"), dims={"batch": "2..4"}, threads=1, **PLAIN) as model:
        assert model.dims == {"batch": Range(2, 4)}
        assert list(model.report.variants) == ["batch=2", "batch=3", "batch=4"]
        (note,) = [one for one in model.report.notes if "each is compiled" in one]
        since = "since operator ReduceMean (node"
        assert note.startswith(f"batch=2..4 has 3 sizes: each is compiled, {since}")
        for batch in (2, 3, 4):
            x = random(batch, *model.inputs[0].shape[1:])  # type: ignore[arg-type]
            np.testing.assert_allclose(model(x), x.mean(keepdims=True), rtol=1e-4, atol=1e-6)


def test_a_range_of_which_no_part_compiles() -> None:
    """Its parts would have 4 rows, and a window has 6."""
    graph = helper.make_graph(
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[6, 1])],
        "windows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 2, "rows", 3))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    with compile_model(model, dims={"rows": "7..9:2"}, threads=1, **PLAIN) as compiled:
        assert compiled.dims == {"rows": Range(7, 9, 2)}
        x = random(1, 2, 9, 3)
        windows = np.lib.stride_tricks.sliding_window_view(x, 6, axis=2)
        assert np.array_equal(compiled(x), windows.max(-1))


def test_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says which of its ranges the compiler made in parts, so it is not tried again."""
    monkeypatch.setattr(caching, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(caching, "cache_bytes", lambda: 10**9)
    options: dict[str, Any] = {"threads": 1, "verify": True, **PLAIN}
    for dims in (
        {"width": "8..14:3", "batch": "1..2", "height": 9},
        {"width": "8..14:3", "batch": 1, "height": 9},
    ):
        first = compile_to_file(images(), tmp_path / "m.so", dims=dims, **options)
        again = compile_to_file(images(), tmp_path / "m.so", dims=dims, **options)
        assert not first.cached and again.cached and again.notes == first.notes
        assert list(first.variants) == list(again.variants)
        assert all(one.verification.passed for one in again.variants.values())  # type: ignore[union-attr]


def test_torch_dims_of_images(tmp_path: Path) -> None:
    """A name of a Dim is the dimension's, whichever way its sizes are made."""
    import torch
    from torch.export import Dim

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3)

        def forward(self, x: Any, mask: Any) -> Any:
            return self.conv(x * mask).mean((2, 3))

    net = Two().eval()
    batch, rows = Dim("batch", min=1, max=4), Dim("rows", min=7, max=8)
    shapes: dict[str, Any] = {"x": {0: batch, 2: rows}, "mask": {2: rows}}
    example = torch.randn(1, 3, 9, 9), torch.randn(1, 1, 9, 9)
    with compile_model(net, example, dynamic_shapes=shapes, threads=1, **PLAIN) as model:
        assert model.dims == {"batch": Range(1, 4), "rows": Range(7, 8)}
        assert [str(one) for one in model.inputs] == [
            "x: float32[batch, 3, rows, 9]",
            "mask: float32[1, 1, rows, 9]",
        ]
        for size, height in ((3, 7), (4, 8), (1, 7)):
            given = torch.randn(size, 3, height, 9), torch.randn(1, 1, height, 9)
            want = net(*given).detach()
            torch.testing.assert_close(model(*given), want, rtol=1e-4, atol=1e-5)


def test_torch_dims_with_a_step() -> None:
    from torch.export import Dim

    from gtco.driver.sizes.dynamic_shapes import dims_of

    side = Dim("side", min=1, max=10)
    rows = 4 * Dim("n", min=2, max=3)
    given: dict[str, Any] = {"x": {2: 32 * side, 3: 32 * side}, "y": {0: rows}}
    want = {"x.2,x.3": Range(32, 320, 32), "y.0": Range(8, 12, 4)}
    assert dims_of("m.onnx", None, given) == want
    for other in (side, 16 * side):
        with pytest.raises(OptionError, match=r"x\.3 is .*, which follows from .* 32\*side"):
            dims_of("m.onnx", None, {"x": {2: 32 * side, 3: other}})


def test_what_has_too_many_sizes(tmp_path: Path) -> None:
    out = tmp_path / "m.so"
    with pytest.raises(ShapeError) as error:
        compile_to_file(mixing("mean"), out, dims={"batch": "1..8192"}, **PLAIN)
    assert "and operator ReduceMean (node over_all), whose result is" in str(error.value)
    assert str(error.value).endswith(
        "takes samples together. Otherwise each size is compiled, and batch=1..8192 has 8192 "
        "sizes, and one library has at most 4096: take a coarser step, such as --dim "
        "batch=2..8192:2, or give a list of the sizes that you need (--dim batch=SIZE,SIZE,...)"
    )
    tokens = named(batched(), x_0=None, x_1="tokens", tokens_0=None, tokens_1="tokens")
    with pytest.raises(ShapeError, match=r"has 'tokens' on axis 1.* tokens=3\.\.6001:2, or"):
        compile_to_file(tokens, out, dims={"tokens": "2..6001"}, shapes={"x.0": 3}, **PLAIN)
    many = {"batch": "1..64", "height": "224..1024:32", "width": "224..1024:32"}
    with pytest.raises(OptionError) as wrong:
        compile_to_file(images(), out, dims=many)
    assert str(wrong.value) == (
        "dims: height=224..1024:32 has 26 and width=224..1024:32 has 26 sizes, 676 choices "
        "together, and one library has at most 16 beside batch=1..64: take a coarser step, such "
        "as --dim height=352..1024:224 --dim width=352..1024:224, or give a list of the sizes "
        "that you need (--dim height=SIZE,SIZE,...)"
    )
    assert not out.exists()


def test_more_sizes_than_memory_holds_are_counted() -> None:
    """They would be 2^46 dictionaries."""
    with pytest.raises(OptionError, match="one library has at most"):
        ways({"a": "1..1048576", "b": "1..1048576", "c": "1..64"})


def test_ways() -> None:
    """A range in parts comes first, and what there is no room for is left out."""

    def said(dims: dict[str, Any]) -> list[tuple[str, int]]:
        found = [(range_of(way), len(sizes_of_variants(way))) for way in ways(dims)]
        return [(parted[0] if parted else "", number) for parted, number in found]

    assert said({"a": [1, 2]}) == [("", 2)]
    assert said({"a": "1..3"}) == [("a", 1), ("", 3)]
    assert said({"a": "1..8192"}) == [("a", 1)]
    assert said({"a": "1..64"}) == [("a", 1), ("", 64)]
    assert said({"a": "1..3", "b": "1..8192"}) == [("b", 3)]
    assert said({"a": "2..4", "b": "4..6", "c": 9}) == [("a", 3), ("b", 3), ("", 9)]
    assert said({"a": Range(1, 3, made="each")}) == [("", 3)]
    assert said({"a": Range(1, 3, made="parts")}) == [("a", 1)]
    for dims in ({"a": Range(1, 4097, made="each")}, {"a": [*range(1, 800)], "b": "1..8@3"}):
        with pytest.raises(OptionError, match="one library has at most"):
            ways(dims)
