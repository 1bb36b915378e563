"""torch.compile(model, backend="gtco"): values, structure and memory of results, weights that
change, refusals, and the entry point.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys

import pytest

import gtco
from gtco.support.environment import cache_folder
from gtco.support.errors import ModelError, OptionError, UnsupportedError

torch = pytest.importorskip("torch")


import gtco.compiler  # noqa: E402
from gtco.driver.cache import caching  # noqa: E402
from gtco.frontend.digest import digest_of  # noqa: E402
from gtco.frontend.pytorch.export import export  # noqa: E402
from gtco.frontend.pytorch.program_writes import notes_of_writes  # noqa: E402
from gtco.integrations.torch_compile import backend  # noqa: E402
from gtco.models.vit import VisionTransformer  # noqa: E402
from tests.integrations.torch_compile.shared import Layer, check_same, refused  # noqa: E402


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
        ({"options": {"presicion": "bf16"}}, "unknown option presicion (did you mean precision?)"),
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


def test_views_are_of_the_argument_that_the_graph_views(compiles):
    """Although two arguments lie in one tensor in the first call, and in others later."""

    def function(x, y):
        return x + 1, y.reshape(8, 4)

    compiled = torch.compile(function, backend=backend)
    whole, other, third = (torch.randn(80, 8) for _ in range(3))
    for x, y in (
        (whole[:4], whole[4:8]),
        (other[:4], third[4:8]),
        (other[:4], other[8:12]),
        (third[2:6].clone(), third[1:5].clone()),
    ):
        check_same(compiled(x, y), function(x, y))
    assert len(compiles) == 1


def test_what_is_written_overlaps_nothing_in_any_call(compiles):
    def function(cache, new):
        cache.add_(1)
        return cache * new

    compiled = torch.compile(function, backend=backend)
    compiled(torch.ones(4), torch.ones(4))
    whole = torch.ones(8)
    with pytest.raises(UnsupportedError, match="shares its memory with another one"):
        compiled(whole[:4], whole[2:6])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1, x.view(torch.int32)),
        lambda x: (x + 1, x.view(torch.uint8)),
        lambda x: ((y := x + 1)[1:], y.view(torch.int32)[:2]),
    ],
)
def test_views_of_another_type_are_refused(function, compiles):
    text = refused(
        UnsupportedError, lambda: torch.compile(function, backend=backend)(torch.randn(4, 4))
    )
    assert "a result is a view of torch.float32 as torch." in text


@pytest.mark.parametrize(
    "views",
    [
        lambda y: (y[:3], y[1:], y[0, ::2]),
        lambda y: (y[:, 1], y[2, 1]),
        lambda y: (y[1:], y.t()[2, 1:], y[1:, 3]),
        lambda y: (y[0, :4].expand(3, 4), y[0, 2:], y[:1, 1].expand(2)),
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_results_that_overlap_share_memory(views, dynamic, compiles):
    """No result covers all of the memory. A write to one result changes the others too."""

    def function(x):
        return views(x + 1)

    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    for rows in (4, 6):
        x = torch.randn(rows, 5)
        found, wanted = compiled(x), function(x)
        check_same(found, wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.stride() == theirs.stride()
            ours[(0,) * ours.dim()].zero_()
            theirs[(0,) * theirs.dim()].zero_()
        check_same(found, wanted)


def test_results_that_are_apart_have_memory_of_their_own(compiles):
    def apart(x):
        return (x + 1).chunk(2)

    x = torch.randn(4)
    found = torch.compile(apart, backend=backend)(x)
    check_same(found, apart(x))


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
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            others.append(digest(model.float(), x))
    assert len({base, *others}) == 7

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


def test_complex_results_are_refused(compiles):
    text = refused(
        UnsupportedError,
        lambda: torch.compile(lambda x: torch.complex(x, -x), backend=backend)(torch.randn(3)),
    )
    assert "torch.view_as_real" in text and not compiles


SCRIPT = """
import torch
from gtco.driver import compilation
from gtco.integrations.torch_compile import backend

compilation.Compilation.generate = None  # nothing can be compiled
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
