"""Models compiled for a range of batches: any size runs, as a sum of parts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from ctypes import POINTER, addressof, c_int64, c_void_p, cast
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import gtco
from gtco.compiler import compile_model, compile_to_file
from gtco.driver.cache import caching
from gtco.driver.compiled import CompiledModel
from gtco.runtime.module import load
from gtco.support.errors import InputError, OptionError, ShapeError
from gtco.support.sizes import Range
from tests.end_to_end.sizes.test_variants import batched, named, random
from tests.golden.test_plan import TOKENS, WIDTH


@pytest.fixture(scope="module")
def compiled() -> Iterator[CompiledModel]:
    options: dict[str, Any] = {"dims": {"batch": "1..64"}, "threads": 2, "verify": True}
    with compile_model(batched(), **options) as model:
        yield model


@pytest.fixture(scope="module")
def reference() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(batched().SerializeToString())


def test_every_size(compiled: CompiledModel, reference: onnxruntime.InferenceSession) -> None:
    rng = np.random.default_rng(0)
    for batch in (*range(1, 22), 63, 64, *map(int, rng.integers(1, 65, 20))):
        x = random(batch, TOKENS, WIDTH, seed=batch)
        tokens, pooled = compiled(x)
        assert tokens.shape == x.shape and pooled.shape == (batch, WIDTH)
        for mine, its in zip((tokens, pooled), reference.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


def test_parts_are_the_libraries_of_their_sizes(compiled: CompiledModel) -> None:
    """Bit for bit, and nothing lies between them."""
    batch = sum(one.sizes["batch"] for one in compiled.variants) + 1
    x = random(batch, TOKENS, WIDTH)
    whole = compiled(x)
    covered = compiled._variants.covered
    assert covered is not None
    sizes = [covered.choices[0].sizes[part] for part in covered.choices[0].of(batch)]
    begins = [*accumulate(sizes[:-1], initial=0)]
    begins[-1] = batch - sizes[-1]  # the last may compute some samples again
    for at, size, end in zip(begins, sizes, [*begins[1:], batch], strict=True):
        with compile_model(batched(), shapes={"batch": size}, threads=2) as alone:
            for mine, its in zip(whole, alone(x[at : at + size]), strict=True):
                assert np.array_equal(mine[at:end], its[: end - at])


def test_what_it_says_of_itself(compiled: CompiledModel) -> None:
    assert compiled.dims == {"batch": Range(1, 64)}
    assert [str(t) for t in (*compiled.inputs, *compiled.outputs)] == [
        f"x: float32[batch, {TOKENS}, {WIDTH}]",
        f"tokens: float32[batch, {TOKENS}, {WIDTH}]",
        f"pooled: float32[batch, {WIDTH}]",
    ]
    with pytest.raises(OptionError, match=r"runs batch of 1\.\.64, each as parts"):
        _ = compiled.stages
    assert list(compiled.report.variants) == [str(one) for one in compiled.variants]
    with load(compiled.path, dims={"batch": 6}) as six:
        assert six.inputs[0].shape == (6, TOKENS, WIDTH) and not six.dims
        x = random(6, TOKENS, WIDTH)
        assert len(six.profile(x)) == len(six.stages) >= 3
        assert np.array_equal(six(x)[0], compiled(x)[0])


def test_inputs_in_any_memory(compiled: CompiledModel) -> None:
    """Unaligned, strided and given results; parts begin at places that are not multiples of 64."""
    for batch in (3, 7, 22):
        x = random(batch, TOKENS, WIDTH)
        want = compiled(x)
        loose = np.empty(x.nbytes + 4, np.uint8)[4:].view(np.float32).reshape(x.shape)
        loose[...] = x
        out = [np.empty_like(y) for y in want]
        for given in (loose, np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2]):
            got = compiled(given, out=out)
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert np.array_equal(compiled.run({"x": x})["pooled"], want[1])


def test_the_library_takes_the_same_parts(compiled: CompiledModel) -> None:
    covered = compiled._variants.covered
    assert covered is not None
    for batch in range(1, 65):
        shape = (c_int64 * 3)(batch, TOKENS, WIDTH)
        shapes = (c_void_p * 1)(addressof(shape))
        assert compiled._library.set_shapes(compiled._handle, shapes) == 0
        stages = [s for p in covered.choices[0].of(batch) for s in compiled.variants[p].stages]
        assert compiled._library.num_steps(compiled._handle) == len(stages)
        info = compiled._library.sized_output(compiled._handle, 1).contents
        assert [info.dims[i] for i in range(2)] == [batch, WIDTH]
        assert info.nbytes == 4 * batch * WIDTH
    compiled._set = None


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, TOKENS, WIDTH), "'batch' (axis 0 of input 'x') is 0, and this model was compiled for"),
        ((65, TOKENS, WIDTH), "for 1 to 64; gtco compile --dim 'batch=LOW..HIGH' gives another"),
        ((-1, TOKENS, WIDTH), "is -1, and"),
        ((2**62, TOKENS, WIDTH), "is 4611686018427387904, and"),
        ((2, TOKENS + 1, WIDTH), "axis 1 of input 'x' has size 6, and this model was compiled"),
    ],
)
def test_sizes_that_c_refuses(compiled: CompiledModel, shape: Any, said: str) -> None:
    given = (c_int64 * 3)(*shape)
    shapes = (c_void_p * 1)(addressof(given))
    assert compiled._library.set_shapes(compiled._handle, shapes) == 1
    assert said in compiled._library.last_error(compiled._handle).decode()
    x = random(3, TOKENS, WIDTH)
    y = compiled(x)[0]
    assert compiled._library.set_shapes(compiled._handle, shapes) == 1  # and nothing changed
    assert np.array_equal(compiled(x)[0], y)
    info = compiled._library.input(compiled._handle, 0).contents
    assert info.dims[0] == -1 and info.symbols[0] == b"batch" and info.nbytes == -1


def test_a_run_before_shapes(compiled: CompiledModel) -> None:
    with load(compiled.path) as model:
        nothing = cast(None, POINTER(c_void_p))
        assert model._library.run(model._handle, nothing, nothing) == 1
        said = model._library.last_error(model._handle).decode()
        assert "was compiled for batch of 1 to 64; gtco_set_shapes says which one" in said


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, TOKENS, WIDTH), "'batch' (axis 0) is 0, and this library was compiled for batch of 1"),
        ((65, TOKENS, WIDTH), "--dim batch=LOW..HIGH"),
        ((2, TOKENS, 3), "axis 2 is 16 in every call"),
        ((2, TOKENS), "of 2 axes; expected x: float32[batch"),
    ],
)
def test_sizes_that_a_call_refuses(compiled: CompiledModel, shape: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        compiled(np.zeros(shape, np.float32))
    assert said in str(error.value)


def test_memory_stays_flat(compiled: CompiledModel) -> None:
    """Shapes change from call to call, and nothing grows once each was seen. Of two rounds the
    lesser growth counts, since Python itself takes a MiB now and then.
    """

    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    inputs = [random(batch, TOKENS, WIDTH) for batch in range(1, 65)]
    out = [[np.empty_like(y) for y in compiled(x)] for x in inputs]
    for x, y in zip(inputs, out, strict=True):
        compiled(x, out=y)
    rng, grown = np.random.default_rng(0), []
    for _ in range(2):
        before = mapped()
        for n in map(int, rng.integers(0, 64, 1000)):
            compiled(inputs[n], out=out[n])
        grown.append(mapped() - before)
    assert min(grown) < 1 << 20, grown


def test_two_handles_at_two_shapes(compiled: CompiledModel) -> None:
    wrong: list[int] = []

    def serve(model: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for batch in map(int, rng.integers(1, 65, 60)):
            x = random(batch, TOKENS, WIDTH, seed=seed)
            if not np.array_equal(model(x)[0], alone[batch, seed]):
                wrong.append(batch)

    alone = {
        (batch, seed): compiled(random(batch, TOKENS, WIDTH, seed=seed))[0]
        for batch in range(1, 65)
        for seed in (1, 2)
    }
    with load(compiled.path, threads=1) as one, load(compiled.path, threads=2) as two:
        threads = [Thread(target=serve, args=(m, s)) for m, s in ((one, 1), (two, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_c_program(compiled: CompiledModel, tmp_path: Path) -> None:
    path = compiled.save(tmp_path / "tiny.so")
    assert "compiled for\n *   batch=1..64" in path.with_suffix(".h").read_text()
    folder = Path(__file__).parents[3] / "examples/c"
    program = tmp_path / "run"
    subprocess.run(["make", "-s", "-C", str(folder), f"MODEL={path}", f"OUT={program}"], check=True)
    ran = subprocess.run(
        [program, f"9x{TOKENS}x{WIDTH}"], capture_output=True, text=True, check=True
    )
    assert f"pooled: float32[9, {WIDTH}], {9 * WIDTH * 4} bytes" in ran.stdout


def with_mask() -> onnx.ModelProto:
    """Two inputs of one batch and one of none; windows of a sample as the first axis of a result;
    a result that no sample changes.
    """
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "mask"], ["masked"]),
            helper.make_node("Add", ["masked", "shift"], ["shifted"]),
            helper.make_node("Reshape", ["shifted", "to"], ["windows"]),
            helper.make_node("Softmax", ["windows"], ["y"], axis=1),
            helper.make_node("Relu", ["shift"], ["z"]),
        ],
        "with_mask",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 6, 8)),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ("n", 6, 1)),
            helper.make_tensor_value_info("shift", TensorProto.FLOAT, (8,)),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, (None, 2, 8)),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, (8,)),
        ],
        [onnx.numpy_helper.from_array(np.array([-1, 2, 8], np.int64), "to")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def test_several_inputs() -> None:
    session = onnxruntime.InferenceSession(with_mask().SerializeToString())
    with compile_model(with_mask(), dims={"n": "2..40:2@6"}, threads=2) as model:
        assert 6 in [one.sizes["n"] for one in model.variants]
        assert model.outputs[0].shape == ("y.0", 2, 8) and model.outputs[1].shape == (8,)
        for n in (2, 4, 6, 20, 40):
            feeds = {"x": random(n, 6, 8), "mask": random(n, 6, 1), "shift": random(8)}
            got = model.run(feeds)
            assert got["y"].shape == (3 * n, 2, 8)
            for mine, its in zip(got.values(), session.run(None, feeds), strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
        with pytest.raises(InputError, match="'n' is 4 in input 'x' and 6 in input 'mask'"):
            model(random(4, 6, 8), random(6, 6, 1), random(8))
        with pytest.raises(
            InputError, match="is 3, and this library was compiled for n of 2 to 40"
        ):
            model(random(3, 6, 8), random(3, 6, 1), random(8))
        # a program in C that gives a size between two steps
        odd = [(c_int64 * len(shape))(*shape) for shape in ((3, 6, 8), (3, 6, 1), (8,))]
        places = (c_void_p * 3)(*map(addressof, odd))
        assert model._library.set_shapes(model._handle, places) == 1
        said = model._library.last_error(model._handle).decode()
        assert "is 3, and this model was compiled for 2 to 40 in steps of 2" in said


def mixing(kind: str) -> onnx.ModelProto:
    nodes = {
        "mean": [helper.make_node("ReduceMean", ["x"], ["y"], name="over_all", keepdims=1)],
        "last": [helper.make_node("Transpose", ["x"], ["y"], name="turn", perm=[1, 0, 2])],
    }
    model = batched()
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend(nodes[kind])
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    return model


def test_models_that_have_no_range(tmp_path: Path) -> None:
    """The message names the operator and what to do."""
    out = tmp_path / "m.so"
    with pytest.raises(ShapeError) as error:
        compile_to_file(mixing("mean"), out, dims={"batch": "1..9000"})
    said = str(error.value)
    assert "--dim batch=1..9000: a range of so many sizes needs a model that computes each" in said
    assert "operator ReduceMean (node over_all)" in said and "--dim batch=SIZE,SIZE" in said
    with pytest.raises(ShapeError, match="output 'y' has 'batch' on axis 1"):
        compile_to_file(mixing("last"), out, dims={"batch": "1..9000"})
    first = mixing("mean")
    first.graph.node[0].CopyFrom(helper.make_node("Slice", ["x", "zero", "nine", "zero"], ["y"]))
    for name, n in (("zero", 0), ("nine", 9)):
        first.graph.initializer.append(onnx.numpy_helper.from_array(np.array([n], np.int64), name))
    with pytest.raises(ShapeError, match="whose size is not the dimension times a number"):
        compile_to_file(first, out, dims={"batch": "1..9000"})  # its parts have 1, 4 and 16 samples
    first.graph.initializer[-1].CopyFrom(onnx.numpy_helper.from_array(np.array([2500]), "nine"))
    with pytest.raises(ShapeError, match="whose size is not the dimension times a number"):
        compile_to_file(first, out, dims={"batch": "1..7800"})
    tokens = named(batched(), x_0=None, x_1="tokens", tokens_0=None, tokens_1="tokens")
    with pytest.raises(ShapeError, match=r"--dim tokens=2..6000.* 'tokens' on axis 1"):
        compile_to_file(tokens, out, dims={"tokens": "2..6000"}, shapes={"x.0": 3})
    with pytest.raises(ShapeError, match="no symbolic dimension and no input named 'rows'"):
        compile_to_file(batched(), out, dims={"rows": "1..8"})
    assert not out.exists()


def test_torch_export_dims() -> None:
    import torch
    from torch.export import Dim

    net = torch.nn.Sequential(torch.nn.Linear(9, 12), torch.nn.GELU()).eval()
    x = torch.randn(1, 9)  # a batch of 1 says nothing of the others
    batch: dict[str, Any] = {"input": {0: Dim("batch", min=1, max=24)}}
    with compile_model(net, (x,), dynamic_shapes=batch, threads=1, verify=True) as model:
        assert model.dims == {"batch": Range(1, 24)}
        for n in (24, 1, 5):
            given = torch.randn(n, 9)
            torch.testing.assert_close(model(given), net(given).detach(), rtol=1e-4, atol=1e-5)
    for wrong, said in (
        ({"input": {0: Dim("batch")}}, "without a largest size"),
        ({"input": {0: Dim.AUTO}}, "give a torch.export.Dim with min and max"),
        ({"input": 3}, "a dictionary by axis"),
        (7, "a dictionary by the input's name"),
    ):
        with pytest.raises(OptionError, match=said):
            compile_model(net, (x,), dynamic_shapes=wrong)


def test_dynamic_shapes_of_an_onnx_model() -> None:
    with compile_model(batched(), dynamic_shapes={"x": {0: (1, 4)}}, threads=1) as model:
        assert model(random(3, TOKENS, WIDTH))[1].shape == (3, WIDTH)
    with pytest.raises(OptionError, match="give one of them"):
        compile_model(batched(), dynamic_shapes={"x": {0: (1, 4)}}, dims={"batch": [1]})


def test_tuned_parts() -> None:
    effort = gtco.Tune(trials=4, seconds=60.0)
    with compile_model(batched(), dims={"batch": "1..8"}, tune=effort, threads=1) as model:
        assert model.report.tuned is not None
        for batch in (8, 3):
            x = random(batch, TOKENS, WIDTH)
            assert model(x)[0].shape == x.shape


def test_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(caching, "cache_bytes", lambda: 10**9)
    options: dict[str, Any] = {"dims": {"batch": Range(1, 8)}, "threads": 1, "verify": True}
    first = compile_to_file(batched(), tmp_path / "m.so", **options)
    again = compile_to_file(batched(), tmp_path / "m.so", **options)
    assert not first.cached and again.cached
    assert list(first.variants) == list(again.variants)
    assert all(one.verification.passed for one in again.variants.values())


def detector(gather: str) -> onnx.ModelProto:
    """The best five of forty tokens of each sample, as detectors take their queries."""
    take = {
        "elements": """t = Tile (u, reps)
            g = GatherElements <axis = 1> (x, t)""",
        "batched": "g = GatherND <batch_dims = 1> (x, u)",
        "counted": """n = Shape <start = 0, end = 1> (x)
            s0 = Squeeze (n)
            a = Range (zero, s0, one)
            b = Unsqueeze (a, behind)
            c = Expand (b, eachi)
            d = Concat <axis = 2> (c, u)
            g = GatherND (x, d)""",
    }[gather]
    if gather == "counted":
        take = "eachi = Shape (u)\n" + take
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 17]>
        detector (float[batch, 40, 6] x) => (float[batch, 5, 3] y) {{
            s = ReduceMax <axes = [2], keepdims = 0> (x)
            v, i = TopK <axis = 1> (s, k)
            u = Unsqueeze (i, two)
            {take}
            y = MatMul (g, w)
        }}"""
    )
    weights = np.random.default_rng(0).standard_normal((6, 3), np.float32)
    numbers = {"k": [5], "two": [2], "reps": [1, 1, 6], "zero": 0, "one": 1, "behind": [1, 2]}
    for name, value in {**numbers, "w": weights}.items():
        array = np.asarray(value)
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("gather", ["elements", "batched", "counted"])
def test_each_sample_takes_rows_of_its_own(gather: str) -> None:
    model = detector(gather)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with compile_model(model, dims={"batch": "1..9"}, cache=False, verify=True) as compiled:
        assert compiled.dims == {"batch": Range(1, 9)}, compiled.report.notes
        assert len(compiled.report.variants) < 4
        for batch in range(1, 10):
            x = random(batch, 40, 6, seed=batch)
            np.testing.assert_allclose(compiled(x), session.run(None, {"x": x})[0], atol=1e-5)
