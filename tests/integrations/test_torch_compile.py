"""torch.compile(model, backend="gtco"): values, structure and memory of results, sizes, weights
that change, refusals, and the entry point.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import gtco
from gtco.support.errors import ModelError, OptionError, ShapeError, UnsupportedError
from gtco.support.options import cache_folder
from gtco.support.sizes import MOST_SIZE, Range

torch = pytest.importorskip("torch")

from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import gtco.compiler  # noqa: E402
from gtco.driver import caching  # noqa: E402
from gtco.frontend.digest import digest_of  # noqa: E402
from gtco.frontend.program_writes import notes_of_writes  # noqa: E402
from gtco.frontend.pytorch import export  # noqa: E402
from gtco.integrations.torch_compile import backend  # noqa: E402
from gtco.models.vit import VisionTransformer  # noqa: E402

UNBOUNDED = Range(2, MOST_SIZE, symbol="batch")  # what torch leaves open
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # of float32 sums in another order


@pytest.fixture(autouse=True)
def fresh():
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.fixture
def compiles(monkeypatch):
    """Takes gtco's place where a test is about what is compiled and when. The shapes and the
    options of each compile.
    """
    seen: list[SimpleNamespace] = []

    def compile_model(module, inputs, **options):
        seen.append(SimpleNamespace(shapes=[tuple(i.shape) for i in inputs], options=options))
        return module

    monkeypatch.setattr(gtco.compiler, "compile_model", compile_model)
    return seen


def check_same(found, wanted):
    """Equal structures, and tensors of equal values, dtypes and strides."""
    ours, structure = pytree.tree_flatten(found)
    theirs, expected = pytree.tree_flatten(wanted)
    assert structure == expected
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(mine, other, **TOLERANCE, check_stride=True)
        else:
            assert mine == other


def refused(kind, call):
    """The text of the error inside torch's."""
    with pytest.raises(BackendCompilerFailed) as failed:
        call()
    assert isinstance(failed.value.inner_exception, kind)
    return str(failed.value.inner_exception)


class Parts(torch.nn.Module):
    """Token embeddings with a part in the middle that torch does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.first = torch.nn.Linear(8, 16)
        self.drop = torch.nn.Dropout(0.5)
        self.second = torch.nn.Linear(16, 3)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, tokens, image, factor=2):
        hidden = torch.nn.functional.gelu(self.first(self.embed(tokens)) * self.scale)
        torch._dynamo.graph_break()
        out = self.drop(self.second(hidden)) * factor
        return {
            "out": out,
            "more": (out.transpose(0, 1), image.view(-1), None, 3, hidden),
            "index": tokens + 1,
        }


def test_a_model_in_two_graphs_with_integers_and_a_structure():
    model = Parts().eval()
    compiled = torch.compile(model, backend=backend, options={"threads": 1})
    tokens, image = torch.randint(0, 11, (5, 7)), torch.randn(2, 3)
    found = compiled(tokens, image)
    check_same(found, model(tokens, image))
    # what are views in PyTorch are views here
    assert found["more"][1].data_ptr() == image.data_ptr()
    assert found["more"][0].data_ptr() == found["out"].data_ptr()


def test_inference_mode(compiles):
    model = Parts().eval()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        with torch.inference_mode():
            tokens, image = torch.randint(0, 11, (5, 7)), torch.randn(2, 3)
            check_same(compiled(tokens, image), model(tokens, image))
    assert len(compiles) == 2


def test_a_vision_transformer():
    model = VisionTransformer(image_size=(32, 32), width=32, depth=1, heads=2, classes=5).eval()
    image = torch.randn(2, 3, 32, 32)
    check_same(torch.compile(model, backend=backend, fullgraph=True)(image), model(image))


def test_a_graph_that_writes_to_its_inputs():
    def step(x, count):
        x.add_(1)
        return x, x.view(-1)[2:], x @ x, count.add_(2)

    ours = [torch.randn(3, 3), torch.zeros(4, dtype=torch.int64)]
    theirs = [value.clone() for value in ours]
    found = torch.compile(step, backend=backend)(*ours)
    check_same(found, step(*theirs))
    check_same(ours, theirs)
    assert found[1].data_ptr() == ours[0].data_ptr() + 8


def test_a_view_of_an_input_that_begins_elsewhere_in_the_next_call(compiles):
    def step(x):
        return x[1:], x + 1

    compiled = torch.compile(step, backend=backend)
    whole = torch.arange(40.0).view(10, 4)
    for start in (0, 3, 6):
        x = whole[start : start + 4]
        found = compiled(x)
        check_same(found, step(x))
        assert found[0].data_ptr() == x[1:].data_ptr()
    assert len(compiles) == 1


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
    assert seen.options == {"dims": {"args_0.0,args_1.0": Range(2, 64, symbol="batch")}}


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


def test_floats_that_torch_makes_tensors_of(compiles):
    model = torch.nn.LayerNorm(4)
    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedError, match="mark the sizes that vary"):
        torch.compile(model, backend=backend, dynamic=True)(x)
    torch.compiler.reset()
    torch._dynamo.mark_dynamic(x, 0)
    check_same(torch.compile(model, backend=backend)(x), model(x))


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


def test_samples_that_depend_on_each_other_are_compiled_by_size(compiles, monkeypatch):
    """The proof is in tests/end_to_end/test_ranges.py."""
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


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.inner(x))


def test_modules_that_share_code_keep_their_own_weights(compiles):
    layers = [Layer() for _ in range(3)]
    compiled = [torch.compile(layer, backend=backend) for layer in layers]
    x = torch.randn(2, 4)
    for _ in range(2):
        for layer, ours in zip(layers, compiled, strict=True):
            check_same(ours(x), layer(x))
    assert len(compiles) == 3
    with torch.no_grad():
        layers[2].inner.bias.add_(1)
    layers[2].inner.weight = torch.nn.Parameter(torch.ones(4, 4))
    check_same(compiled[2](x), layers[2](x))  # the bias is the same tensor with other values
    check_same(compiled[2](x), layers[2](x))
    assert len(compiles) == 4
    layers[0].load_state_dict({k: v + 1 for k, v in layers[1].state_dict().items()}, assign=True)
    check_same(compiled[0](x), layers[0](x))  # these are other tensors: compiled for them
    assert len(compiles) == 5


def in_place(layer):
    layer.inner.weight.mul_(2)


def loaded(layer):
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()})


def trained(layer):
    layer.inner.weight.grad = torch.ones(4, 4)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def data_replaced(layer):
    layer.inner.bias.data = torch.ones(4)


@pytest.mark.parametrize("change", [in_place, loaded, trained, data_replaced])
def test_a_weight_that_was_changed_is_an_error(compiles, change):
    layer, other = Layer(), Layer()
    compiled, beside = torch.compile(layer, backend=backend), torch.compile(other, backend=backend)
    x = torch.randn(2, 4)
    compiled(x), beside(x)
    change(layer)
    with pytest.raises(ModelError, match=r"changed in place.*torch\.compiler\.reset"):
        compiled(x)
    check_same(beside(x), other(x))
    torch.compiler.reset()
    check_same(compiled(x), layer(x))


def test_the_training_mode_and_gradients_are_refused(compiles):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
    x = torch.randn(2, 4)
    text = refused(ModelError, lambda: torch.compile(model, backend=backend)(x))
    assert "model.eval()" in text
    statistics = torch.nn.BatchNorm1d(4)
    assert "BatchNorm" in refused(ModelError, lambda: torch.compile(statistics, backend=backend)(x))
    with torch.enable_grad():
        text = refused(ModelError, lambda: torch.compile(model.eval(), backend=backend)(x))
    assert "torch.no_grad()" in text
    assert not compiles
    model.requires_grad_(False)
    with torch.enable_grad():
        check_same(torch.compile(model, backend=backend)(x), model(x))
    # attention draws nothing without dropout, and InstanceNorm has no statistics to update
    check = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 3, 4)
    check_same(torch.compile(lambda q: check(q, q, q), backend=backend)(q), check(q, q, q))
    norm = torch.nn.InstanceNorm1d(2)
    check_same(torch.compile(norm, backend=backend)(q[0]), norm(q[0]))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"options": {"presicion": "bf16"}}, "unknown option presicion; known: target, precision"),
        ({"options": {"precision": "int3"}}, "unknown precision 'int3'"),
        ({"options": {"shapes": {"x": 1}}}, "shapes is for models with symbolic dimensions"),
        ({"mode": "max-autotune"}, "options={'tune': 'quick'}"),
    ],
)
def test_options_that_do_not_exist(given, text):
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=backend, **given)
    assert text in refused(OptionError, lambda: compiled(torch.randn(2, 4)))


def test_options_reach_the_compile(compiles):
    given = {"precision": "bf16", "threads": 1, "tune": "off"}
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=backend, options=given)
    compiled(torch.randn(2, 4))
    assert compiles[0].options == given


def test_results_that_overlap_in_part_are_refused(compiles):
    def overlapping(x):
        y = x + 1
        return y[:3], y[1:]

    text = refused(
        UnsupportedError, lambda: torch.compile(overlapping, backend=backend)(torch.randn(4))
    )
    assert "overlap in memory" in text

    def apart(x):
        return (x + 1).chunk(2)

    x = torch.randn(4)
    found = torch.compile(apart, backend=backend)(x)
    for ours, theirs in zip(found, apart(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_entry_point_is_torchs(root, tmp_path, monkeypatch, compiles):
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    from torch._dynamo.backends import registry

    registry._discover_entrypoint_backends.cache_clear()
    registry._discover_entrypoint_backends()
    assert "gtco" in torch.compiler.list_backends()
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    check_same(torch.compile(model, backend="gtco")(x), model(x))
    assert len(compiles) == 1


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x):
        self.calls.view(-1).add_(1)
        return x * self.calls


class Writer(torch.nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


def test_aot_compile(tmp_path):
    model = Writer()
    program = torch.export.export(model, (torch.randn(3, 2),))
    path = gtco.aot_compile(program, tmp_path / "m.so", threads=1)
    x = torch.randn(3, 2)
    with gtco.load(path) as compiled:
        torch.testing.assert_close(compiled(x), (x + 1) * 2)
        assert any("changes its input 'x' in place" in n for n in compiled.metadata["notes"])
    with pytest.raises(OptionError, match=r"aot_compile takes an ExportedProgram, not a Writer"):
        gtco.aot_compile(model, tmp_path / "m.so")


@pytest.mark.parametrize("decomposed", [False, True])
def test_notes_say_what_a_library_does_not_write(decomposed):
    for module, text in ((Counter(), "own tensor 'calls'"), (Writer(), "its input 'x'")):
        program = torch.export.export(module, (torch.randn(3, 2),))
        if decomposed:
            program = program.run_decompositions({})
        (note,) = notes_of_writes(program)
        assert text in note
    assert not notes_of_writes(torch.export.export(Layer(), (torch.randn(2, 4),)))


def test_torch_compile_keeps_the_state_of_a_module():
    ours, theirs = Counter(), Counter()
    compiled, x = torch.compile(ours, backend=backend), torch.randn(3, 2)
    for _ in range(2):
        check_same(compiled(x), theirs(x))
    assert torch.equal(ours.calls, theirs.calls)


def digest(module, *inputs):
    return digest_of(export(module.eval(), inputs))


def test_the_digest_of_a_module():
    """It says everything that a compile depends on, and nothing else."""
    model, x = Layer(), torch.randn(2, 4)
    twin = Layer()
    twin.load_state_dict(model.state_dict())
    base = digest(model, x)
    assert base and digest(twin, torch.randn(2, 4)) == base
    program = torch.export.export(model, (x,))
    assert digest_of(export(program)) == base
    others = [digest(model, torch.randn(3, 4)), digest(Layer(), x)]
    others += [digest(torch.nn.Sequential(model), x), digest(model.double(), x.double())]
    assert len({base, *others}) == 5

    @torch.library.custom_op("gtco_test::own", mutates_args=())
    def own(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @own.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Own(torch.nn.Module):
        def forward(self, x):
            return own(x)

    assert digest(Own(), x) is None


SCRIPT = """
import torch
from gtco.driver import compilation
from gtco.integrations.torch_compile import backend

compilation.Compilation.prepare = None  # nothing can be compiled
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
"""


def test_another_process_finds_the_library(tmp_path, monkeypatch):
    for table in cache_folder().glob("rates-*.json"):  # measuring the machine takes seconds
        shutil.copy(table, tmp_path)
    monkeypatch.setattr(caching, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(caching, "cache_bytes", lambda: 10**9)
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    torch.compile(model, backend=backend)(x)
    assert len([*(tmp_path / "libraries").iterdir()]) == 1
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "GTCO_CACHE": str(tmp_path), "GTCO_CACHE_GB": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
