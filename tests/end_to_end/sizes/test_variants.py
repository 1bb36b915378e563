"""Models compiled for several sizes: each variant equals the library of that size alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import gtco
from gtco.codegen.jobs import Kernel
from gtco.compiler import compile_model, compile_to_file
from gtco.driver.compiled import CompiledModel
from gtco.driver.sizes.dimensions import open_dimensions
from gtco.driver.sizes.variants import renamed, symbolic
from gtco.runtime.artifact import Artifact
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import InputError, ModelError, OptionError, ShapeError
from gtco.support.options import Tune
from gtco.support.sizes import fixed_sizes, sizes_of_variants
from tests.by_constants import by_constants
from tests.golden.test_plan import TOKENS, WIDTH, tiny
from tests.runtime.test_models import compile_kernels

BATCHES = (1, 4, 16)


def named(model: onnx.ModelProto, **dims: str | None) -> onnx.ModelProto:
    """The model with other sizes of its tensors: ``x_0="batch"``; None has no name."""
    for value in (*model.graph.input, *model.graph.output):
        for place, name in dims.items():
            tensor, _, axis = place.rpartition("_")
            if tensor == value.name:
                dim = value.type.tensor_type.shape.dim[int(axis)]
                dim.Clear()
                if name:
                    dim.dim_param = name
    return model


def batched() -> onnx.ModelProto:
    return named(tiny(), x_0="batch", tokens_0="batch", pooled_0="batch")


def convolution(*, channels: int = 5) -> onnx.ModelProto:
    """Of images of any size, without names for the sizes: a strided convolution, a pool, the shape
    of the result, and a table that is added."""
    rng = np.random.default_rng(1)
    kernel = rng.standard_normal((channels, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "k"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["y"]),
            helper.make_node("GlobalAveragePool", ["y"], ["p"]),
            helper.make_node("Add", ["p", "table"], ["z"]),
        ],
        "convolution",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, "?", "?"))],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, None),
        ],
        [
            numpy_helper.from_array(kernel, "k"),
            # large enough to be a weight, and in one layout in every variant
            numpy_helper.from_array(
                rng.standard_normal((64, channels, 8, 8)).astype(np.float32), "table"
            ),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


@pytest.fixture(scope="module")
def compiled() -> Iterator[CompiledModel]:
    with by_constants():  # else one layout of a weight may be as good as the best of each size
        with compile_model(batched(), dims={"batch": BATCHES}, threads=2, verify=True) as model:
            yield model


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_each_variant_equals_the_static_library(compiled: CompiledModel) -> None:
    """Bit for bit: the same stages with the same kernels, from weights that are shared."""
    for batch in BATCHES:
        with compile_model(batched(), shapes={"batch": batch}, threads=2) as alone:
            one = next(v for v in compiled.variants if v.sizes == {"batch": batch})
            assert [s["schedule"] for s in one.stages] == [s["schedule"] for s in alone.stages]
            for seed in range(3):
                x = random(batch, TOKENS, WIDTH, seed=seed)
                for mine, its in zip(compiled(x), alone(x), strict=True):
                    assert mine.shape == its.shape
                    assert np.array_equal(mine, its)


def test_what_it_says_of_itself(compiled: CompiledModel) -> None:
    assert compiled.dims == {"batch": [1, 4, 16]}
    assert [str(t) for t in (*compiled.inputs, *compiled.outputs)] == [
        f"x: float32[batch, {TOKENS}, {WIDTH}]",
        f"tokens: float32[batch, {TOKENS}, {WIDTH}]",
        f"pooled: float32[batch, {WIDTH}]",
    ]
    report = compiled.report
    assert list(report.variants) == ["batch=1", "batch=4", "batch=16"]
    for one in report.variants.values():
        assert one.verification is not None and one.verification.passed
        assert len(one.stages) == 3 and one.predicted_seconds > 0
    with pytest.raises(InputError, match=r"'batch' \(axis 0\) is 3, .* of 1, 4, 16"):
        compiled(random(3, TOKENS, WIDTH))


def test_the_features_are_those_of_its_kernels(tmp_path: Path) -> None:
    """As for a model of one shape: the tile unit is needed only by kernels that multiply in it."""
    features = []
    for batches in ([1], [1, 4]):
        library = tmp_path / "tiny.so"
        compile_to_file(batched(), library, dims={"batch": batches}, target="sapphirerapids")
        features.append(read_metadata(library)["cpu_features"])
    assert features[0] == features[1]
    assert "avx512f" in features[0] and "amx-tile" not in features[0]


def test_saved_and_opened_at_one_size(compiled: CompiledModel, tmp_path: Path) -> None:
    path = compiled.save(tmp_path / "tiny.so")
    x = random(4, TOKENS, WIDTH)
    with load(path, dims={"batch": 4}) as one, load(path) as every:
        assert one.inputs[0].shape == x.shape
        for mine, its in zip(one(x), every(x), strict=True):
            assert np.array_equal(mine, its)


def test_images_of_several_sizes() -> None:
    """Unnamed dimensions, and the product of two lists; against ONNX Runtime."""
    model = convolution()
    assert open_dimensions(model.SerializeToString()) == {"x.2": [("x", 2)], "x.3": [("x", 3)]}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    heights, widths = (17, 32), (32, 9, 40)
    with compile_model(model, dims={"x.2": heights, "x.3": list(widths)}, threads=2) as compiled:
        assert [v.sizes for v in compiled.variants] == [
            {"x.2": h, "x.3": w} for h, w in product(heights, widths)
        ]
        assert compiled.inputs[0].shape == (1, 3, "x.2", "x.3")
        # sizes of outputs that are not a dimension's are named by their place; the rest are numbers
        assert compiled.outputs[0].shape == (1, 5, "y.2", "y.3")
        assert compiled.outputs[1].shape == (64, 5, 8, 8)
        # the table and the convolution's weights are stored once
        stored = compiled.metadata["weights_by_dtype"]["float32"]
        assert 64 * 5 * 8 * 8 * 4 < stored < 1.3 * 64 * 5 * 8 * 8 * 4
        for height, width in [*product(heights, widths), (32, 32), (17, 9)]:
            x = random(1, 3, height, width, seed=height * width)
            for mine, its in zip(compiled(x), session.run(None, {"x": x}), strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
        with pytest.raises(InputError, match=r"'x.3' \(axis 3\) is 41"):
            compiled(random(1, 3, 17, 41))


def pair() -> onnx.ModelProto:
    """x + y, of as many rows; the file has no names for their numbers."""
    shape = (None, 6)
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "y"], ["z"])],
        "pair",
        inputs,
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, shape)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def test_two_axes_of_one_size() -> None:
    with compile_model(pair(), dims={"x.0,y.0": [2, 5]}) as compiled:
        assert [v.sizes for v in compiled.variants] == [{"x.0": n, "y.0": n} for n in (2, 5)]
        assert [spec.shape for spec in compiled.inputs] == [("x.0", 6), ("y.0", 6)]
        assert compiled.outputs[0].shape == ("x.0", 6)
        for rows in (5, 2):
            x, y = random(rows, 6), random(rows, 6, seed=1)
            assert np.array_equal(compiled(x, y), x + y)
        with pytest.raises(InputError, match="do not go together"):
            compiled(random(2, 6), random(5, 6))


def test_a_module_and_its_example(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(12, 7)

        def forward(self, x: Any, mask: Any) -> Any:
            return self.linear(x) * mask[:, None]

    net = Net().eval()
    example = torch.zeros(1, 12), torch.ones(1)
    dims = {"x.0,mask.0": [1, 3, 8]}
    with compile_model(net, example, dims=dims, verify=True) as compiled:
        assert compiled.inputs[0].shape == ("x.0", 12)
        for batch in (3, 8, 1, 3):
            x, mask = torch.randn(batch, 12), torch.rand(batch)
            expected = net(x, mask).detach()
            torch.testing.assert_close(compiled(x, mask), expected, rtol=1e-4, atol=1e-5)
    for wrong, said in (
        ({"batch": [1, 2]}, "'batch' is not an input of the module with an axis, such as 'x.0'"),
        ({"x.2": [1, 2]}, "'x' has the shape"),
    ):
        with pytest.raises(OptionError, match=said):
            compile_to_file(net, tmp_path / "m.so", example, dims=wrong)


def test_a_module_that_takes_any_number_of_arguments() -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, *rest: Any) -> Any:
            return x * rest[0] - rest[1]

    example = torch.zeros(2, 5), torch.ones(2, 1), torch.ones(5)
    with compile_model(Net(), example, dims={"x.0,rest_0.0": [1, 3]}) as compiled:
        assert [spec.name for spec in compiled.inputs] == ["x", "rest_0", "rest_1"]
        for batch in (1, 3):
            x, scale, shift = torch.randn(batch, 5), torch.randn(batch, 1), torch.randn(5)
            torch.testing.assert_close(compiled(x, scale, shift), x * scale - shift)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("sizes", [[3, 2], "2..4"])
def test_a_module_that_cannot_be_traced_at_a_size(sizes: Any, cache: bool) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, y: Any) -> Any:
            return x + y

    example = torch.zeros(2, 5), torch.ones(2, 5)
    with pytest.raises(ModelError, match=r"at x\.0=[34]: torch.export cannot trace Net"):
        compile_model(Net(), example, dims={"x.0": sizes}, cache=cache)


def test_a_program_with_dynamic_dimensions(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(9, 4), torch.nn.ReLU()).eval()
    shapes = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(net, (torch.randn(2, 9),), dynamic_shapes=shapes)
    assert open_dimensions(program) == {"rows": [("input", 0)]}
    with compile_model(program, dims={"rows": [2, 3]}) as compiled:
        for rows in (3, 2):
            x = torch.randn(rows, 9)
            torch.testing.assert_close(compiled(x), net(x).detach(), rtol=1e-4, atol=1e-5)


def test_tuned_together(tmp_path: Path) -> None:
    """Stages of all variants are measured by one budget; records have those of each."""
    effort = Tune(trials=4, seconds=60.0)
    options: dict[str, Any] = {"dims": {"batch": [2, 3]}, "threads": 1}
    records = tmp_path / "tiny.records"
    with compile_model(batched(), tune=effort, records=records, **options) as compiled:
        report = compiled.report
        assert report.tuned is not None
        assert report.tuning and any(one.tuning for one in report.variants.values())
        assert sum(name == "tune" for name, _ in report.phases) == 1
        chosen = [[s["schedule"] for s in v.stages] for v in compiled.variants]
        for batch in (3, 2):
            x = random(batch, TOKENS, WIDTH)
            with compile_model(batched(), shapes={"batch": batch}) as alone:
                for mine, its in zip(compiled(x), alone(x), strict=True):
                    np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
    with compile_model(batched(), records=records, **options) as again:
        assert [[s["schedule"] for s in v.stages] for v in again.variants] == chosen


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ({"batch": []}, "is empty"),
        ({"batch": [1, 1]}, "has 1 twice"),
        ({"batch": [0, 1]}, "whole numbers of 1 or more"),
        ({"batch": [1, -2]}, "whole numbers of 1 or more"),
        ({"batch": "1-64"}, "or a range, such as"),
        ({"batch": [1.5]}, "whole numbers of 1 or more"),
        ({"batch": "1,,4"}, r"dims\['batch'\]='1,,4': give a list of whole numbers"),
        ({"batch": [1, True]}, "whole numbers of 1 or more"),
        ({"batch": range(1, 4098)}, "4097 variants, and one library has at most 4096"),
        ({"x.0": range(1, 81), "x.1": range(1, 61)}, "80 x 60 sizes are 4800 variants"),
        ({"x.0": [1, 2], "x.0,y.0": [1, 2]}, "'x.0' is given twice"),
        ([("batch", 1)], "give a dictionary"),
        ({1: [1, 2]}, "is not a name"),
    ],
)
def test_lists_that_are_refused(dims: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=said):
        compile_to_file(batched(), tmp_path / "m.so", dims=dims)


def test_a_list_as_the_command_line_takes_it() -> None:
    assert sizes_of_variants({"batch": "1,4,16"}) == [{"batch": size} for size in BATCHES]


def test_dims_that_the_model_or_another_option_does_not_take(tmp_path: Path) -> None:
    out = tmp_path / "m.so"
    with pytest.raises(OptionError, match=r"one size .* and a list"):
        compile_to_file(batched(), out, dims={"batch": [1, 2]}, shapes={"batch": 1})
    with pytest.raises(ShapeError, match="no symbolic dimension and no input named 'rows'"):
        compile_to_file(batched(), out, dims={"rows": [1, 2]})
    with pytest.raises(ShapeError, match=r"x.1=2: the file states 5"):
        compile_to_file(batched(), out, dims={"x.1": [2, 5], "batch": 1})
    with pytest.raises(ShapeError, match=r"without a value: 'x\.3'"):
        compile_to_file(convolution(), out, dims={"x.2": [8, 9]})
    with pytest.raises(OptionError, match="this is made for one shape"):
        gtco.compiler.stages_of(batched(), dims={"batch": [1, 2]})
    assert not out.exists()


def test_lists_of_one_size_are_static() -> None:
    dims = {"batch": [3], "x.1": 4}
    assert sizes_of_variants(dims) == [{}] and fixed_sizes(dims) == {"batch": 3, "x.1": 4}
    assert fixed_sizes({"batch": "3"}) == {"batch": 3}
    with compile_model(batched(), dims={"batch": [3]}) as compiled:
        assert compiled.dims == {} and compiled.inputs[0].shape == (3, TOKENS, WIDTH)
        assert len(compiled.stages) == 3


def test_kernels_of_one_stage_with_two_configs(tmp_path: Path) -> None:
    """Variants may have a stage with different configs, after tuning: both kernels are linked."""
    symbol = "gtco_0123456789abcdef"
    source = "#include <stdint.h>\nvoid %s(float* x, float* y, void* w, int64_t b, int64_t e) {"
    source += " for (; b < e; ++b) y[b] = x[b] + %d; }"
    first, second = (
        Kernel(symbol, compile_kernels(source % (symbol, n), tmp_path), 3, 0, {}) for n in (1, 2)
    )
    other = renamed(second, 1)
    assert other.symbol != symbol and len(other.code) == len(second.code)
    assert symbol.encode() not in other.code
    artifact = Artifact(
        "two",
        (TensorSpec("x", "float32", (3,)),),
        (TensorSpec("y", "float32", (3,)), TensorSpec("z", "float32", (3,))),
        tuple(
            Step(k.symbol, (BufferRef("input", 0), BufferRef("output", n)), 3)
            for n, k in enumerate((first, other))
        ),
        0,
        {"a.o": first.code, "b.o": other.code},
    )
    x = np.arange(3, dtype=np.float32)
    with load(write_artifact(artifact, tmp_path / "two.so")) as model:
        y, z = model(x)
    assert y.tolist() == [1, 2, 3] and z.tolist() == [2, 3, 4]


def test_names_of_sizes() -> None:
    def specs(*shapes: tuple[int, ...]) -> list[list[TensorSpec]]:
        return [[TensorSpec("y", "float32", shape)] for shape in shapes]

    sizes = [{"batch": 1, "side": 8}, {"batch": 1, "side": 9}, {"batch": 2, "side": 8}]
    (found,) = symbolic(specs((1, 8, 7, 3), (1, 9, 7, 4), (2, 8, 7, 3)), sizes)
    assert found == replace(found, name="y", shape=("batch", "side", 7, "y.3"))


def test_c_program(compiled: CompiledModel, tmp_path: Path) -> None:
    path = compiled.save(tmp_path / "tiny.so")
    folder = Path(__file__).parents[3] / "examples/c"
    program = tmp_path / "run"
    subprocess.run(["make", "-s", "-C", str(folder), f"MODEL={path}", f"OUT={program}"], check=True)
    for batch in BATCHES:
        ran = subprocess.run(
            [program, f"{batch}x{TOKENS}x{WIDTH}"], capture_output=True, text=True, check=True
        )
        assert f"pooled: float32[{batch}, {WIDTH}], {batch * WIDTH * 4} bytes" in ran.stdout
