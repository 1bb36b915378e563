"""Reading ONNX: what is accepted, and the message for everything that is not."""

from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend import simplify
from gtco.frontend.onnx import load_onnx
from gtco.frontend.weights import LARGE
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites import canonicalize
from gtco.support.errors import ModelError, ShapeError, UnsupportedError
from tests.end_to_end.test_verify import encoder

RNG = np.random.default_rng(0)


def model(
    nodes: list[onnx.NodeProto] | None = None,
    shape: tuple[int | str | None, ...] = (1, 4),
    initializers: dict[str, np.ndarray] | None = None,
    opsets: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """x -> nodes (Relu by default) -> y."""
    graph = helper.make_graph(
        nodes or [helper.make_node("Relu", ["x"], ["y"], name="relu")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))],
        [numpy_helper.from_array(value, name) for name, value in (initializers or {}).items()],
    )
    imports = [helper.make_opsetid(d, v) for d, v in ({"": 17} | (opsets or {})).items()]
    return helper.make_model(graph, opset_imports=imports, producer_name="test")


def linear(size: int = 256) -> onnx.ModelProto:
    weight = RNG.standard_normal((size, size)).astype(np.float32)
    assert weight.nbytes > LARGE
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")], (1, size), {"w": weight}
    )


def test_bytes_path_and_message_give_the_same(tmp_path: Path) -> None:
    proto = linear()
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    x = RNG.standard_normal((1, 256)).astype(np.float32)
    wanted = x @ numpy_helper.to_array(proto.graph.initializer[0])
    before = proto.SerializeToString()
    for source in (path, str(path), path.read_bytes(), proto):
        imported = load_onnx(source)
        assert (imported.opset, imported.producer, imported.notes) == (17, "test", ())
        assert list(imported.inputs) == ["x"] and list(imported.weights) == ["w"]
        y = lower(imported).check().evaluate({"x": x})["y"]
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    assert proto.SerializeToString() == before  # the caller's model is the caller's


def test_external_data_is_mapped_and_its_absence_named(tmp_path: Path) -> None:
    proto = linear()
    weight = numpy_helper.to_array(proto.graph.initializer[0])
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="m.weights", size_threshold=0)
    imported = load_onnx(path)
    assert isinstance(imported.weights["w"], np.memmap)
    np.testing.assert_array_equal(imported.weights["w"], weight)
    with pytest.raises(ModelError, match=r"m\.weights.*give the path"):
        load_onnx(path.read_bytes())
    data = tmp_path / "m.weights"
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"m\.weights.*too short"):
        load_onnx(path)
    data.unlink()
    with pytest.raises(ModelError, match=r"m\.weights.*missing"):
        load_onnx(path)


def test_external_data_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    proto = linear()
    (tmp_path / "secret").write_bytes(b"\0" * 256 * 256 * 4)
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="outside"):
        load_onnx(folder / "m.onnx")


@pytest.mark.parametrize("content", [b"", b"not onnx at all", b"\x08\x08"])
def test_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx"):
        load_onnx(path)


def test_truncated_and_absent(tmp_path: Path) -> None:
    data = linear().SerializeToString()
    with pytest.raises(ModelError, match="cut short"):
        load_onnx(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot read"):
        load_onnx(tmp_path / "absent.onnx")


def test_damaged_initializer_and_checker() -> None:
    proto = linear()
    proto.graph.initializer[0].raw_data = b"abc"
    with pytest.raises(ModelError, match="initializer 'w' is damaged"):
        load_onnx(proto)
    with pytest.raises(ModelError, match="checker"):
        load_onnx(model([helper.make_node("Relu", ["nowhere"], ["y"])]))


def test_symbolic_dimensions_are_named_with_their_flags() -> None:
    proto = model(shape=("batch", 3, None))
    with pytest.raises(ShapeError) as caught:
        load_onnx(proto)
    message = str(caught.value)
    assert "'batch' (x axis 0)" in message and "--shape batch=1" in message
    assert "--shape x.2=SIZE" in message
    with pytest.raises(ShapeError, match=r"'x\.2'"):
        load_onnx(proto, shapes={"batch": 2})
    imported = load_onnx(proto, shapes={"batch": 2, "x.2": 5})
    assert imported.inputs["x"].shape == (2, 3, 5)
    with pytest.raises(ShapeError, match="no symbolic dimension and no input named 'bacth'"):
        load_onnx(proto, shapes={"bacth": 1, "batch": 1, "x.2": 5})


@pytest.mark.parametrize("imported", ["", "ai.onnx"])
def test_both_names_of_the_standard_domain(imported: str) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], domain="ai.onnx"),
        helper.make_node("Softmax", ["a"], ["y"]),
    ]
    proto = model(nodes, shape=(2, 3))
    proto.opset_import[0].domain = imported
    assert load_onnx(proto).opset == 17
    assert [node.domain for node in proto.graph.node] == ["ai.onnx", ""]  # the caller's is kept


def test_every_unsupported_operator_is_listed() -> None:
    nodes = [
        helper.make_node("Foo", ["x"], ["a"], name="first", domain="my.ops"),
        helper.make_node("Foo", ["a"], ["b"], name="second", domain="my.ops"),
        helper.make_node("Det", ["b"], ["c"], name="det"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    with pytest.raises(UnsupportedError) as caught:
        load_onnx(model(nodes, opsets={"my.ops": 1}))
    assert "my.ops::Foo (2): first, second" in str(caught.value)
    assert "Det (1): det" in str(caught.value) and "Relu" not in str(caught.value)


def test_outputs_of_unknown_size_are_listed_with_the_others() -> None:
    """NonZero has an importer, but no artifact can plan its output."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["i"], name="where_is_it"),
        helper.make_node("Cast", ["i"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Det", ["c"], ["y"], name="det"),
    ]
    with pytest.raises(UnsupportedError) as caught:
        load_onnx(model(nodes))
    assert "NonZero (1): where_is_it" in str(caught.value)
    assert "Det (1): det" in str(caught.value)
    assert "size of what NonZero gives depends on values" in str(caught.value)


def test_boxes_that_are_picked_have_no_known_count() -> None:
    """A detector with its NonMaxSuppression is refused before anything is lowered."""
    nodes = [
        helper.make_node("NonMaxSuppression", ["x", "s"], ["i"], name="pick"),
        helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
    ]
    scores = {"s": np.ones((1, 2, 5), np.float32)}
    with pytest.raises(UnsupportedError) as caught:
        load_onnx(model(nodes, (1, 5, 4), scores))
    assert "NonMaxSuppression (1): pick" in str(caught.value)
    assert "size of what NonMaxSuppression gives depends on values" in str(caught.value)


def test_importer_errors_name_the_node() -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"], name="bad_reshape")]
    with pytest.raises(ModelError, match="bad_reshape"):
        load_onnx(model(nodes, initializers={"s": np.array([3, 3])}), simplify=False)


def test_onnxsim_out_of_time_or_failing_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = load_onnx(linear(), simplify_timeout=0.01)
    assert "did not finish in 0.01 s" in imported.notes[0]
    monkeypatch.setattr(simplify, "_CHILD", "raise SystemExit('broken')")
    imported = load_onnx(linear())
    assert "onnxsim failed (broken)" in imported.notes[0]
    lower(imported).check()


def test_onnxsim_runs_until_it_folds_no_more_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAM 2 pads by shapes after an If: one pass folds the If, and the next one the shapes. Here a
    fake onnxsim folds one operator in each pass.
    """
    (tmp_path / "onnxsim.py").write_text(
        "def simplify(model, skipped_optimizers):\n"
        "    first = model.graph.node[0]\n"
        "    if first.op_type == 'Identity':\n"
        "        model.graph.node[1].input[0] = first.input[0]\n"
        "        del model.graph.node[0]\n"
        "    return model, True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["x", "a", "b", "c"]
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in pairwise(names)]
    shape = [helper.make_node("Shape", ["c"], ["s"]), helper.make_node("Cast", ["s"], ["y"], to=1)]
    known, note = simplify.simplify(model([*nodes, *shape]), 60)
    assert [n.op_type for n in known.graph.node] == ["Shape", "Cast"] and not note
    relu = [helper.make_node("Relu", ["c"], ["y"])]
    once, _ = simplify.simplify(model([*nodes, *relu]), 60)
    assert [n.op_type for n in once.graph.node] == ["Identity", "Identity", "Relu"]


def test_onnxsim_brings_in_no_operators_of_other_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fuses plain attention into an operator of ONNX Runtime, which no other compiler knows."""
    imported = load_onnx(encoder("float32", masked=False))
    assert not imported.notes and lower(imported).check()
    monkeypatch.setattr(simplify, "SKIPPED", [])
    imported = load_onnx(encoder("float32", masked=False))
    assert "onnxsim brought in operators of com.microsoft" in imported.notes[0]
    assert lower(imported).check()


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_onnxsim_leaves_a_softmax_over_one_element(kind: str) -> None:
    """The result is NaN if that element is not a number, so it is not constant."""
    proto = model([helper.make_node(kind, ["x"], ["y"], axis=0)])
    graph = lower(load_onnx(proto)).check()
    assert kind.lower() in [op.kind.replace("_", "") for op in graph.operators.values()]


def test_names_that_need_cleaning_keep_their_spelling() -> None:
    proto = model([helper.make_node("Relu", ["x.1/in put"], ["0"])])
    proto.graph.input[0].name = "x.1/in put"
    proto.graph.output[0].name = "0"
    graph = lower(load_onnx(proto)).check()
    assert graph.inputs == ("x.1/in put",) and graph.outputs == ("0",)


def test_output_that_is_an_input_or_a_constant() -> None:
    proto = linear()
    proto.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 256]))
    graph = lower(load_onnx(proto)).check()
    x = RNG.standard_normal((1, 256)).astype(np.float32)
    values = graph.evaluate({"x": x})
    assert len(values) == 2
    np.testing.assert_array_equal(list(values.values())[1], x)


def test_more_than_two_gigabytes_of_weights_take_no_memory(tmp_path: Path) -> None:
    """A sparse file has two weights of 1.3 GB each. They are mapped, never read, and never in a
    protobuf message.
    """
    rows, columns = 1 << 15, 10_000
    proto = model(
        [
            helper.make_node("MatMul", ["x", "w0"], ["a"]),
            helper.make_node("MatMul", ["a", "w1"], ["y"]),
        ],
        (1, rows),
    )
    for index, dims in enumerate(((rows, columns), (columns, rows))):
        tensor = proto.graph.initializer.add(name=f"w{index}", dims=dims)
        tensor.data_type = TensorProto.FLOAT
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "w"), ("offset", index * rows * columns * 4)):
            tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with open(tmp_path / "w", "wb") as file:
        file.truncate(2 * rows * columns * 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = canonicalize(lower(load_onnx(tmp_path / "m.onnx")))
    assert graph.histogram() == {"matmul": 2}
    assert sum(value.nbytes for value in graph.constants.values()) > 2 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB


def test_an_output_listed_twice_is_refused():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[3] x) => (float[3] y, float[3] y) { y = Relu(x) }"""
    )
    with pytest.raises(ModelError, match=r"outputs more than once: 'y'.*Identity of another name"):
        load_onnx(model)
