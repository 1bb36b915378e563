"""Sizes that a model leaves open: their names, the sizes that may be given, and the error that asks
for them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gtco.cli import arguments
from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import ShapeError

Shape = tuple[int | str | None, ...] | None
RNG = np.random.default_rng(0)


def summed(*shapes: Shape, output: Shape = None) -> onnx.ModelProto:
    """y = sum(x) + sum(z) + ... + x, of inputs of these shapes."""
    names = "xzuv"[: len(shapes)]
    nodes = [helper.make_node("ReduceSum", [name], [f"s{name}"], keepdims=0) for name in names]
    total = "x"
    for name in names:
        nodes.append(helper.make_node("Add", [total, f"s{name}"], [f"t{name}"]))
        total = f"t{name}"
    graph = helper.make_graph(
        [*nodes, helper.make_node("Identity", [total], ["y"])],
        "g",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
            for n, s in zip(names, shapes, strict=True)
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def shapes_of(model: onnx.ModelProto, given: dict[str, object]) -> dict[str, tuple[int, ...]]:
    imported = load_onnx(model, shapes=given, simplify=False)  # type: ignore[arg-type]
    return {name: kind.shape for name, kind in imported.inputs.items()}


@pytest.mark.parametrize("word", [-1, "?", "", None, "None", "dynamic"])
def test_an_axis_that_is_unknown_is_a_dimension_of_its_own(word: int | str | None) -> None:
    model = summed((word, 3, word, word), output=(word, 3, word, word))
    with pytest.raises(ShapeError) as caught:
        load_onnx(model)
    for flag in ("--shape x.0=1", "--shape x.2=SIZE", "--shape x.3=SIZE", "x=1x3xSIZExSIZE"):
        assert flag in str(caught.value), str(caught.value)
    assert shapes_of(model, {"x.0": 1, "x.2": 5, "x.3": 7}) == {"x": (1, 3, 5, 7)}
    assert shapes_of(model, {"x": (1, 3, 5, 7)}) == {"x": (1, 3, 5, 7)}
    imported = load_onnx(model, shapes={"x.0": 2, "x.2": 5, "x.3": 7})
    x = RNG.standard_normal((2, 3, 5, 7)).astype(np.float32)
    y = lower(imported).check().evaluate({"x": x})["y"]
    np.testing.assert_allclose(y, x + x.sum(dtype=np.float64), rtol=1e-5, atol=1e-5)


def test_the_flags_that_the_error_prints_can_be_pasted() -> None:
    model = summed(("batch", "a b", -1), ("batch", 4), (None,))
    with pytest.raises(ShapeError) as caught:
        load_onnx(model)
    listed = re.search(r"size: (--shape .*) \(in Python", str(caught.value))
    assert listed is not None
    words = shlex.split(listed[1].replace("SIZE", "6"))
    assert words[::2] == ["--shape"] * 4
    given = arguments.unique(map(arguments.shape, words[1::2]), "--shape")
    assert given == {"batch": 1, "a b": 6, "x.2": 6, "u.0": 1}
    assert shapes_of(model, given) == {"x": (1, 6, 6), "z": (1, 4), "u": (1,)}


def test_a_name_on_two_axes_of_an_input_may_still_be_given_one_size() -> None:
    model = summed(("batch", "n", "n"), ("batch", "n"))
    with pytest.raises(ShapeError, match=r"x\.1=SIZE.*x\.2=SIZE.*z\.1=SIZE.*--shape n=SIZE gives"):
        load_onnx(model, shapes={"batch": 1})
    assert shapes_of(model, {"batch": 2, "n": 5}) == {"x": (2, 5, 5), "z": (2, 5)}
    own = {"batch": 2, "n": 5, "x.2": 1}
    assert shapes_of(model, own) == {"x": (2, 5, 1), "z": (2, 5)}


def test_what_is_given_for_one_axis_of_a_shared_name_holds_for_the_others() -> None:
    model = summed(("batch", 3), ("batch", 4))
    for given in ({"batch": 2}, {"x.0": 2}, {"x": (2, 3)}):
        assert shapes_of(model, given) == {"x": (2, 3), "z": (2, 4)}
    assert shapes_of(model, {"x.0": 2, "z": [1, 4]}) == {"x": (2, 3), "z": (1, 4)}
    three = summed(("batch", 3), ("batch", 4), ("batch",))
    with pytest.raises(ShapeError, match=r"'batch' \(u axis 0\)"):
        load_onnx(three, shapes={"x.0": 2, "z.0": 3})


def test_an_input_without_a_shape_takes_a_whole_one() -> None:
    with pytest.raises(ShapeError, match=r"'x' has no shape.*--shape x=SIZExSIZE"):
        load_onnx(summed(None))
    assert shapes_of(summed(None), {"x": (2, 3)}) == {"x": (2, 3)}
    assert shapes_of(summed(None), {"x": 4}) == {"x": (4,)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bacth": 1}, r"no symbolic dimension and no input named 'bacth'.*'batch', 'x\.2'.*'x'"),
        ({"?": 1}, r"named '\?'"),
        ({"x": (1, 4, 5)}, r"--shape x=1x4x5: .*\[batch, 3, \?\], of 3 axes"),
        ({"x": (1, 3)}, r"--shape x=1x3: .*\[batch, 3, \?\]"),
        ({"x": 5}, r"--shape x=5: .*\[batch, 3, \?\]"),
        ({"x.1": 4}, r"x\.1=4: the file states 3"),
        ({"batch": (1, 3)}, "'batch' is a dimension, and 1x3 is a whole shape"),
        ({"batch": 0}, r"--shape batch=0: a size is 1 or more"),
        ({"x": (1, 3, 0)}, r"--shape x=1x3x0: a size is 1 or more"),
    ],
)
def test_what_cannot_be_given(given: dict[str, object], said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        shapes_of(summed(("batch", 3, "?")), given)


def no_shape(value: onnx.ValueInfoProto) -> None:
    value.type.tensor_type.ClearField("shape")


def no_type(value: onnx.ValueInfoProto) -> None:
    value.ClearField("type")


def negative(value: onnx.ValueInfoProto) -> None:
    value.type.tensor_type.shape.dim.add(dim_value=-1)


@pytest.mark.parametrize("spoil", [no_shape, no_type, negative])
@pytest.mark.parametrize("contrib", [False, True])
def test_an_output_without_a_type_or_shape_is_inferred(
    spoil: Callable[[onnx.ValueInfoProto], None], contrib: bool
) -> None:
    """This includes outputs for which ONNX infers nothing, such as those after an operator of
    another domain.
    """
    model = summed((4,), output=())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    if contrib:
        model.graph.node[-1].CopyFrom(
            helper.make_node("FastGelu", ["tx"], ["y"], domain="com.microsoft")
        )
    spoil(model.graph.output[0])
    imported = load_onnx(model)
    graph = lower(imported)
    assert imported.notes == () and str(graph.types["y"]) == "float32[4]"


def test_shapes_on_the_command_line() -> None:
    assert arguments.shape("a=b=2") == ("a=b", 2)
    assert arguments.shape("x=1x3x96x96") == arguments.shape("x=1,3,96,96")
    assert arguments.shape("x=1x3x96x96") == ("x", (1, 3, 96, 96))
