"""Sizes that torch leaves open: ranges of batches, libraries by size, and floats, which torch hands
over in tensors.
"""

from __future__ import annotations

import threading

import pytest

import gtco
from gtco.support.errors import ModelError, ShapeError, UnsupportedError
from gtco.support.sizes import MOST_SIZE, Range

torch = pytest.importorskip("torch")

import gtco.compiler  # noqa: E402
from gtco.integrations.torch_compile import backend  # noqa: E402
from gtco.models.vit import VisionTransformer  # noqa: E402
from tests.integrations.torch_compile.shared import Layer, check_same, refused  # noqa: E402

UNBOUNDED = Range(2, MOST_SIZE, symbol="batch", made="parts")  # what torch leaves open


def test_new_sizes_are_compiled_when_they_are_seen(compiles):
    model = torch.nn.Linear(4, 2)
    compiled = torch.compile(model, backend=backend)
    for batch in (3, 5, 5, 6, 5, 6):
        x = torch.randn(batch, 4)
        check_same(compiled(x), model(x))
    # torch makes a graph for 3 rows, and then one for any number, which is compiled for a range
    assert [seen.shapes for seen in compiles] == [[(n, 4)] for n in (3, 5)]
    assert [seen.options.get("dims") for seen in compiles] == [None, {"args_0.0": UNBOUNDED}]
    marked = torch.compile(model, backend=backend, dynamic=True)
    marked(torch.randn(7, 4)), marked(torch.randn(8, 4))
    assert [seen.shapes for seen in compiles[2:]] == [[(7, 4)]]


def test_an_empty_batch_is_refused_and_the_next_one_runs(compiles):
    model = torch.nn.Linear(4, 2)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    assert "(0, 4) is empty" in refused(ShapeError, lambda: compiled(torch.randn(0, 4)))
    x = torch.randn(3, 4)
    check_same(compiled(x), model(x))
    assert "(0, 4) is empty" in refused(ShapeError, lambda: compiled(torch.randn(0, 4)))


class Windows(torch.nn.Module):
    """Of a batch of images: windows, the images in a mask, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, mask):
        y = self.linear(x) * mask[:, None, None]
        return y.reshape(2 * x.shape[0], -1, 3), y[:, 0], x.shape[0]


def test_a_batch_that_torch_leaves_open_is_a_range(compiles):
    model = Windows()
    compiled = torch.compile(model, backend=backend)
    for batch in (3, 7, 64, 3, 2):
        x, mask = torch.randn(batch, 6, 4), torch.rand(batch)
        for tensor in (x, mask):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=64)
        check_same(compiled(x, mask), model(x, mask))
    (seen,) = compiles
    assert seen.shapes == [(3, 6, 4), (3,)]
    marked = Range(2, 64, symbol="batch", made="parts")
    assert seen.options == {"dims": {"args_0.0,args_1.0": marked}}


def test_a_batch_beside_another_open_size(compiles):
    """The batch is a range for each of the other sizes."""
    model = Windows()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for batch, tokens in ((3, 6), (4, 6), (5, 8), (3, 8), (7, 6)):
        x, mask = torch.randn(batch, tokens, 4), torch.rand(batch)
        check_same(compiled(x, mask), model(x, mask))
    assert [seen.shapes for seen in compiles] == [[(3, 6, 4), (3,)], [(5, 8, 4), (5,)]]
    compiled = torch.compile(Layer(), backend=backend)
    for tokens in (3, 4, 5, 6):  # no batch is open
        x = torch.randn(2, tokens, 4)
        torch._dynamo.mark_dynamic(x, 1)
        compiled(x)
    assert [seen.shapes for seen in compiles[2:]] == [[(2, n, 4)] for n in (3, 4, 5, 6)]
    assert all("dims" not in seen.options for seen in compiles[2:])


class Scaled(torch.nn.Module):
    """Two floats: an epsilon and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = torch.nn.LayerNorm(4), 0.25

    def forward(self, x):
        return self.norm(x) * self.scale


def test_floats_are_constants(compiles):
    """Another value is compiled when it is first seen, and is found again."""
    model = Scaled().eval()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for batch, scale in ((3, 0.25), (5, 0.25), (5, 0.5), (7, 0.25), (7, 0.5)):
        model.scale = scale
        x = torch.randn(batch, 4)
        check_same(compiled(x), model(x))
    assert [seen.shapes for seen in compiles] == [[(3, 4)], [(5, 4)]]
    assert all(list(seen.options["dims"]) == ["args_0.0"] for seen in compiles)


def test_a_vision_transformer_of_any_batch():
    model = VisionTransformer(image_size=(32, 32), width=32, depth=1, heads=2, classes=5).eval()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for batch in (2, 5):
        image = torch.randn(batch, 3, 32, 32)
        check_same(compiled(image), model(image))


def test_a_number_that_is_read_out_of_a_tensor_is_refused():
    def scaled(x, factor):
        return x * factor.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(scaled, backend=backend)
        call = lambda: compiled(torch.randn(3, 4), torch.tensor(2.0))  # noqa: E731
        assert "reads a number out of a tensor" in refused(UnsupportedError, call)


def test_weights_of_a_range_that_change(compiles):
    layer = Layer()
    compiled = torch.compile(layer, backend=backend, dynamic=True)
    compiled(torch.randn(3, 4))
    layer.inner.weight.mul_(2)
    with pytest.raises(ModelError, match="was changed in place"):
        compiled(torch.randn(5, 4))
    layer.inner.weight = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.randn(5, 4)
    check_same(compiled(x), layer(x))
    assert [seen.shapes for seen in compiles] == [[(3, 4)], [(5, 4)]]


def test_a_library_goes_with_its_weights(compiles):
    """A layer whose weight is another one at each call keeps one library."""
    graphs = []

    def kept(graph, arguments, **more):
        graphs.append(backend(graph, arguments, **more))
        return graphs[-1]

    layer, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    compiled = torch.compile(layer, backend=kept)
    for _ in range(3):
        layer.weight = torch.nn.Parameter(torch.randn(2, 4))
        check_same(compiled(x), layer(x))
    libraries = [len(made) for graph in graphs for made in graph._made.values()]
    assert len(compiles) == 3 and max(libraries) == 1


def test_int8_is_compiled_for_each_size(compiles):
    """A quantized module has one shape."""
    options = {"precision": "int8"}
    compiled = torch.compile(torch.nn.Linear(4, 2), backend=backend, dynamic=True, options=options)
    for batch in (3, 5):
        compiled(torch.randn(batch, 4))
    assert [seen.shapes for seen in compiles] == [[(3, 4)], [(5, 4)]]
    assert [seen.options for seen in compiles] == [options, options]


def test_samples_that_depend_on_each_other_are_compiled_by_size(compiles, monkeypatch):
    """The proof is in tests/end_to_end/sizes/test_ranges.py."""
    compile_model = gtco.compiler.compile_model

    def refusing(module, inputs, **options):
        if "dims" in options:
            raise ShapeError("operator mean takes samples together")
        return compile_model(module, inputs, **options)

    monkeypatch.setattr(gtco.compiler, "compile_model", refusing)

    def centred(x):
        return x - x.mean(0)

    compiled = torch.compile(centred, backend=backend, dynamic=True)
    with pytest.warns(UserWarning, match="each size by itself: operator mean takes"):
        compiled(torch.randn(3, 4))
    x = torch.randn(5, 4)
    check_same(compiled(x), centred(x))
    assert [seen.shapes for seen in compiles] == [[(3, 4)], [(5, 4)]]


def test_a_library_of_a_range(monkeypatch):
    asked: list[object] = []
    compile_model = gtco.compiler.compile_model

    def watched(module, inputs, **options):
        asked.append(options["dims"])
        return compile_model(module, inputs, **options)

    monkeypatch.setattr(gtco.compiler, "compile_model", watched)
    model = Windows()
    options = {"threads": 1}
    compiled = torch.compile(model, backend=backend, dynamic=True, options=options)
    for batch in (3, 2, 9, 33, 3):
        x, mask = torch.randn(batch, 6, 4), torch.rand(batch)
        check_same(compiled(x, mask), model(x, mask))
    assert asked == [{"args_0.0,args_1.0": UNBOUNDED}]


def test_threads_that_call_a_model_first():
    """Each batch is compiled in the thread that sees it, while torch traces in others."""
    model, failed = torch.nn.Sequential(Layer(), Layer()), []
    compiled = torch.compile(model, backend=backend, dynamic=True)

    def call(first):
        try:
            with torch.no_grad():  # of each thread
                for batch in range(first, 9, 3):
                    x = torch.randn(batch, 6, 4)
                    check_same(compiled(x), model(x))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(first,)) for first in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
