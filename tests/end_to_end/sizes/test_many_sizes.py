"""Libraries of many sizes, whose kernels read their sizes from an array."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.cli import inspection, main
from gtco.codegen.workers import Workers
from gtco.compiler import compile_model, compile_to_file
from gtco.driver import fusing, library
from gtco.driver.compiled import CompiledModel
from gtco.driver.sizes import many
from gtco.driver.sizes.anchors import ANCHORS, anchors
from gtco.driver.sizes.forms import Forms
from gtco.driver.sizes.many import Many, check_steps, in_order, wait
from gtco.driver.sizes.ways import notes
from gtco.graph.fusion import stages
from gtco.report import gather
from gtco.runtime.writing.table import CSRC
from gtco.search.policy import Policy
from gtco.support.environment import c_compiler
from gtco.support.errors import GtcoError, OptionError
from gtco.support.sizes import Range, evenly_spread, sizes_text
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from tests.end_to_end.sizes.test_variants import random

HEIGHTS, WIDTHS = (5, 16, 31), (7, 16, 24, 33)
CHANNELS = 24


def text() -> onnx.ModelProto:
    """Of images of any size: convolutions, a pool, tokens with attention to each other, norms."""
    rng = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> Any:
        scale = np.sqrt(1 / np.prod(shape[1:]))
        return numpy_helper.from_array((scale * rng.standard_normal(shape)).astype("f4"), name)

    def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
        return helper.make_node(kind, inputs.split(), [output], **attributes)

    nodes = [
        node("Conv", "x k", "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("HardSwish", "c", "h"),
        node("Conv", "h d", "g", pads=[1, 1, 1, 1], group=CHANNELS),
        node("Relu", "g", "r"),
        node("MaxPool", "r", "m", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 2]),
        node("Reshape", "m tokens", "t"),
        node("Transpose", "t", "s", perm=[0, 2, 1]),
        node("LayerNormalization", "s one zero", "n"),
        node("MatMul", "n wq", "q"),
        node("MatMul", "n wk", "e"),
        node("Transpose", "e", "et", perm=[0, 2, 1]),
        node("MatMul", "q et", "scores"),
        node("Softmax", "scores", "p"),
        node("MatMul", "p n", "a"),
        node("Add", "a s", "y"),
        node("GlobalAveragePool", "m", "z"),
    ]
    constants = [
        weight("k", CHANNELS, 3, 3, 3),
        weight("d", CHANNELS, 1, 3, 3),
        weight("wq", CHANNELS, CHANNELS),
        weight("wk", CHANNELS, CHANNELS),
        numpy_helper.from_array(np.ones(CHANNELS, "f4"), "one"),
        numpy_helper.from_array(np.zeros(CHANNELS, "f4"), "zero"),
        numpy_helper.from_array(np.array([0, CHANNELS, -1]), "tokens"),
    ]
    graph = helper.make_graph(
        nodes,
        "text",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, "height", "width"))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


@pytest.fixture(scope="module")
def compiled() -> Iterator[CompiledModel]:
    dims = {"height": HEIGHTS, "width": WIDTHS}
    with compile_model(text(), dims=dims, threads=2, tune="off", simplify=False) as model:
        yield model


def kernels(model: CompiledModel) -> tuple[int, int]:
    """How many different stages and how many kernels it has."""
    stages = [stage for variant in model.variants for stage in variant.stages]
    return len({stage["key"] for stage in stages}), len({stage["kernel"] for stage in stages})


def test_every_size_in_turn(compiled: CompiledModel) -> None:
    """In an order in which no two calls have the same size."""
    session = onnxruntime.InferenceSession(text().SerializeToString())
    every = [*product(HEIGHTS, WIDTHS)]
    order = [*every, *np.random.default_rng(0).permutation(every).tolist()]
    for number, (height, width) in enumerate(order):
        x = random(1, 3, height, width, seed=number)
        for mine, its in zip(compiled(x), session.run(None, {"x": x}), strict=True):
            assert mine.shape == its.shape
            np.testing.assert_allclose(mine, its, rtol=1e-4, atol=2e-5)


def test_more_sizes_than_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes between the anchors take the configs of these, and are right. A stage gets a full look
    only where it has none of them: no tile of an anchor is among its own.
    """
    theirs = dict[str, bool]()  # keys of stages between the anchors -> one of these fits

    def near(self: Forms, policy: Policy, stage: Stage, wrapped: Any = Forms.near) -> list[Pick]:
        picks: list[Pick] = wrapped(self, policy, stage)
        if self.settled:
            theirs[stage.key] = bool(picks)
        return picks

    monkeypatch.setattr(Forms, "near", near)
    heights, widths = range(4, 36, 8), range(5, 40, 7)
    assert len(heights) * len(widths) > ANCHORS
    with compile_model(
        text(),
        dims={"height": [*heights], "width": [*widths]},
        threads=2,
        tune="off",
        simplify=False,
    ) as model:
        session = onnxruntime.InferenceSession(text().SerializeToString())
        for number, (height, width) in enumerate(product(heights, widths)):
            x = random(1, 3, height, width, seed=number)
            for mine, its in zip(model(x), session.run(None, {"x": x}), strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-4, atol=2e-5)
        every = [{"height": h, "width": w} for h, w in product(heights, widths)]
        fixed = {sizes_text(every[number]) for number in anchors(every)}

        def forms(at_anchors: bool) -> set[str]:
            """What the products' kernels are, without the cuts."""
            found = set()
            for variant in model.variants:
                if (sizes_text(variant.sizes) in fixed) == at_anchors:
                    for stage in variant.stages:
                        schedule = stage["schedule"]
                        if "tile" in schedule and theirs.get(stage["key"], True):
                            found.add(f"{schedule['sketch']} {schedule['tile']}")
            return found

        assert forms(False) <= forms(True)
        assert sum(theirs.values()) > 0.8 * len(theirs)


def write_cases(model: CompiledModel, path: Path) -> None:
    """Inputs and outputs of every size, as many_sizes.c reads them."""
    whole = [len(model.variants), len(model.inputs), len(model.outputs)]
    with path.open("wb") as file:
        np.array(whole, np.int64).tofile(file)
        for number, variant in enumerate(model.variants):
            given = {spec.name: random(*spec.shape, seed=number) for spec in variant.inputs}
            for array in (*given.values(), *model.run(given).values()):
                np.array([array.ndim, *array.shape, array.nbytes], np.int64).tofile(file)
                file.write(array.tobytes() + bytes(-array.nbytes % 8))


def test_every_size_in_two_threads_from_c(compiled: CompiledModel, tmp_path: Path) -> None:
    """Two handles, at another size in every call, with sizes that are refused between them."""
    write_cases(compiled, tmp_path / "cases")
    source = Path(__file__).with_name("many_sizes.c")
    build = [c_compiler(), "-O1", "-pthread", f"-I{CSRC}", str(source), "-o", "sizes", "-ldl"]
    subprocess.run(build, cwd=tmp_path, check=True)
    command = [str(tmp_path / "sizes"), str(compiled.path), str(tmp_path / "cases"), "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ns to set other shapes" in done.stdout


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 3, 16), "of 3 axes; expected .*, of 4"),
        ((1, 3, 16, 8), "'width' .axis 3. is 8"),
        ((1, 3, 0, 16), "'height' .axis 2. is 0"),
        ((1, 4, 16, 16), "axis 1"),
        ((2, 3, 16, 16), "axis 0"),
    ],
)
def test_other_sizes_are_refused(
    compiled: CompiledModel, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(GtcoError, match=said):
        compiled(np.zeros(shape, np.float32))
    assert compiled(random(1, 3, 16, 16))[0].shape


def test_kernels_are_shared(compiled: CompiledModel) -> None:
    stages, made = kernels(compiled)
    assert made < 0.9 * stages
    shared = [
        stage
        for variant in compiled.variants
        for stage in variant.stages
        if len(stage["buffers"]) > len(stage["inputs"]) + 1
    ]
    assert shared
    for stage in shared:  # its numbers, behind its output
        assert stage["buffers"][-1][0] == "weight"


def test_reports_name_some_of_many(
    compiled: CompiledModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a kernel's numbers are its last buffer, a report knows the output."""
    monkeypatch.setattr(gather, "MOST_MODELS", 5)
    monkeypatch.setattr(inspection, "MOST_ROWS", 5)
    facts = gather.gather(compiled.path)
    assert len(facts.models) == 5 and "5 of 12 variants are shown" in facts.notes[-1]
    for model in facts.models:
        assert {stage.output.place for stage in model.stages} == {"stage", "output"}
        assert all(stage.read_by or stage.output.place == "output" for stage in model.stages)
    assert main(["inspect", "--no-profile", str(compiled.path)]) == 0
    shown = capsys.readouterr().out
    assert "7 more variants: --all shows a row for each" in shown
    assert shown.count("height=") == 5 + 1  # and the option that shows one
    assert main(["inspect", "--no-profile", "--all", str(compiled.path)]) == 0
    assert capsys.readouterr().out.count("height=") == 12 + 1
    every = [f"height={h}, width={w}" for h, w in product(HEIGHTS, WIDTHS)]
    for options, shown in (([], 5), (["--all"], 12)):
        assert main(["inspect", "--no-profile", "--json", *options, str(compiled.path)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["variants"]) == shown
        assert sorted([*found["variants"], *found["variants_left_out"]]) == sorted(every)
        (*_, last) = found["variants"].values()
        assert {*last["metadata"]["loops"]} <= {stage["kernel"] for stage in last["stages"]}


def test_few_sizes_have_kernels_of_their_own() -> None:
    """Nothing of this touches libraries of one size or of a few."""
    dims = {"width": WIDTHS[:2]}
    shapes = {"height": HEIGHTS[0]}
    with compile_model(
        text(), dims=dims, shapes=shapes, threads=2, tune="off", simplify=False
    ) as model:
        for variant in model.variants:
            for stage in variant.stages:
                assert len(stage["buffers"]) == len(stage["inputs"]) + 1
                assert stage["kernel"].endswith(stage["key"])


@pytest.mark.parametrize(
    ("widths", "wanted"),
    [
        ([32, 64, 96, 128, 160], [0, 4, 1, 2, 3]),
        ([160, 128, 96, 64, 32], [4, 0, 3, 2, 1]),
        ([7, 8], [0, 1]),
        ([5], [0]),
    ],
)
def test_the_order_of_sizes(widths: Sequence[int], wanted: Sequence[int]) -> None:
    assert in_order([{"width": width} for width in widths]) == wanted


def test_which_sizes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest, the largest, and what is far from all that were searched."""
    fuse, searched = stages.fuse, []

    def noted(graph: Any, *given: Any, **options: Any) -> Any:
        searched.append(graph.types["x"].shape[1])
        return fuse(graph, *given, **options)

    monkeypatch.setattr(fusing, "fuse", noted)
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["y"])],
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, "width"))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (4, "width"))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    options: Any = {"threads": 2, "tune": "off", "simplify": False, "cache": False}
    with compile_model(model, dims={"width": [8, 16, 64, 96, 4000]}, **options):
        assert searched == [8, 4000, 64]


def test_too_many_steps_are_said_before_the_work() -> None:
    check_steps([300, 310, 305], 3000)
    said = r"4096 sizes, .* 300 steps .* 1,048,573 .* give 3495 sizes"
    with pytest.raises(OptionError, match=said):
        check_steps([300, 310, 305], 4096)


def test_which_sizes_are_compared() -> None:
    sizes = [{"height": h, "width": w} for h in range(8, 0, -1) for w in (3, 1, 2)]
    some = evenly_spread(sizes, 6)
    assert len(some) == 6 and some == sorted(set(some))
    assert {"height": 1, "width": 1} in [sizes[n] for n in some]
    assert {"height": 8, "width": 3} in [sizes[n] for n in some]
    assert evenly_spread(sizes[:4], 6) == [0, 1, 2, 3]


def test_a_compile_of_many_sizes_says_what_is_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "MOST_VERIFIED", 2)
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["y"])],
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, "width"))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (4, "width"))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m")
    command = ["compile", str(tmp_path / "m"), "-o", str(tmp_path / "m.so"), "--verify"]
    assert main([*command, "--dim", "width=5,6,7,8,9", "--tune", "off"]) == 0
    said = capsys.readouterr()
    assert "note: 2 of 5 sizes were compared: width=5; width=9" in said.out
    (link,) = (line for line in (said.out + said.err).splitlines() if "5 variants, weights" in line)
    assert "width=" not in link


def test_the_time_of_outlines_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    outline, clock = Many.outline, [0.0]

    def slow(self: Many, *given: Any) -> None:
        clock[0] += 1000.0
        outline(self, *given)

    now = time.perf_counter
    monkeypatch.setattr(Many, "outline", slow)
    monkeypatch.setattr(many.time, "perf_counter", lambda: now() + clock[0])
    dims = {"height": HEIGHTS[:1], "width": [5, 6, 7, 8, 9]}
    with compile_model(text(), dims=dims, threads=2, tune="off", simplify=False) as model:
        assert sum(seconds for name, seconds in model.report.phases if name == "fuse") > 5000.0


def test_a_library_does_not_depend_on_which_kernel_was_compiled_first(tmp_path: Path) -> None:
    """Of a model with stages that share a kernel at one size."""
    inputs = {"a": (4, "width"), "b": (6, "width"), "c": (9, "width")}
    graph = helper.make_graph(
        [helper.make_node("Softmax", [name], [name * 2]) for name in inputs],
        "rows",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in inputs.items()],
        [helper.make_tensor_value_info(k * 2, TensorProto.FLOAT, v) for k, v in inputs.items()],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    build, made = Workers.build, []

    def backwards(self: Workers, jobs: Any) -> Any:
        return reversed([*build(self, [*jobs])])

    for number, answers in enumerate((build, backwards)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Workers, "build", answers)
            path = tmp_path / f"{number}" / "m.so"
            path.parent.mkdir()
            options: Any = {"threads": 2, "tune": "off", "simplify": False, "cache": False}
            compile_to_file(source, path, dims={"width": [7, 16, 24, 33, 40]}, **options)
            made.append(path.read_bytes())
    assert made[0] == made[1]


def test_the_wait_for_the_other_sizes_is_told() -> None:
    """The anchors take longer than the sizes between them, so what they tell is an upper bound."""
    assert wait([], 1024) == "" and wait([1.0, 1.0], 60) == ""
    assert wait([1.0, 3.0], 602) == ", at most about 20 min for 600 more"
    assert wait([2.0] * 16 + [0.5] * 8, 1024) == ", about 8 min for 1000 more"
    assert wait([40.0], 16) == ", about 10 min for 15 more"  # all of them are anchors


def test_a_range_of_which_each_of_many_sizes_is_compiled_has_a_coarser_one_named() -> None:
    dims = {"batch": Range(1, 1024, made="each"), "width": Range(32, 320, 32, made="each")}
    many, few = notes(dims, {"batch": "samples depend on each other"})
    assert many == (
        "batch=1..1024 has 1024 sizes: each is compiled, since samples depend on each other. Fewer "
        "sizes compile sooner: --dim batch=64..1024:64, or a list of those that you need"
    )
    assert few == "width=32..320:32 has 10 sizes: each is compiled"
