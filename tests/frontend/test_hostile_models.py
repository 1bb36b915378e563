"""Models from strangers: text that is not UTF-8, impossible sizes, and data in forbidden places.
Each gets a GtcoError that says so, and legal links work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.support.errors import GtcoError, ModelError, ShapeError
from tests.frontend.test_frontend import RNG, linear, model


def external(folder: Path, **entries: str) -> Path:
    """``linear()`` with its weight in m.data, which ``entries`` describe."""
    proto = linear()
    tensor = proto.graph.initializer[0]
    (folder / "m.data").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "m.data"} | entries).items():
        tensor.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


NBYTES = 256 * 256 * 4


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"offset": "-4"}, "offset .* is not a number of bytes"),
        ({"offset": "four"}, "offset .* is not a number of bytes"),
        ({"offset": "0x10"}, "offset .* is not a number of bytes"),
        ({"offset": " 4"}, "offset .* is not a number of bytes"),
        ({"offset": "\u0664"}, "offset .* is not a number of bytes"),  # a digit, but not of ASCII
        ({"offset": str(2**63)}, "offset .* is not a number of bytes"),
        ({"offset": str(2**64 - 4)}, "offset .* is not a number of bytes"),
        ({"offset": str(10**17)}, "too short"),
        ({"offset": "4"}, "too short"),
        ({"length": "-1"}, "length .* is not a number of bytes"),
        ({"length": "many"}, "length .* is not a number of bytes"),
        ({"length": "12"}, r"takes 262144 bytes, but 12 are given"),
        ({"length": str(NBYTES * 2)}, "bytes, but 524288 are given"),
        ({"location": ""}, "outside"),
        ({"location": "/etc/passwd"}, "outside"),
        ({"location": "../m/../m/m.data"}, "outside"),
        ({"location": "m.data\0"}, "outside"),
        ({"location": "."}, "missing"),
        ({"location": "x" * 5000}, "cannot be found"),
        ({"location": "pipe"}, "missing"),
        ({"location": "circle"}, "cannot be found|missing"),
        ({"location": "secret"}, "outside"),  # a link that leads out of the folder
    ],
)
def test_external_data_that_cannot_be(
    tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(NBYTES))
    (folder / "secret").symlink_to(tmp_path / "secret")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    path = external(folder, **entries)
    with pytest.raises(ModelError, match=message):
        load_onnx(path, simplify=False)


def test_external_data_of_right_offset_and_length(tmp_path: Path) -> None:
    path = external(tmp_path, offset="0", length=str(NBYTES))
    assert load_onnx(path, simplify=False).weights["w"].nbytes == NBYTES


@pytest.mark.parametrize("inner", ["onnx/", ""])
@pytest.mark.parametrize("model_linked", [True, False])
def test_hugging_faces_cache(tmp_path: Path, inner: str, model_linked: bool) -> None:
    """snapshots/REVISION holds links into blobs; the link of the data leads out of the folder."""
    plain = tmp_path / "plain"
    plain.mkdir()
    made = external(plain)
    cache = tmp_path / "hub" / "models--a--b"
    snapshot = cache / "snapshots" / "0123abcd" / inner
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    up = "../" * (3 if inner else 2)
    for name, blob in (("m.onnx", "11aa"), ("m.data", "22bb")):
        (cache / "blobs" / blob).write_bytes((plain / name).read_bytes())
        (snapshot / name).symlink_to(f"{up}blobs/{blob}")
    if not model_linked:
        (snapshot / "m.onnx").unlink()
        (snapshot / "m.onnx").write_bytes(made.read_bytes())
    wanted = load_onnx(made, simplify=False).weights["w"]
    for path in (snapshot / "m.onnx", os.path.relpath(snapshot / "m.onnx")):
        np.testing.assert_array_equal(load_onnx(path, simplify=False).weights["w"], wanted)
    # a link into another repository's blobs is still refused
    (cache.parent / "other").write_bytes(bytes(NBYTES))
    (snapshot / "m.data").unlink()
    (snapshot / "m.data").symlink_to(cache.parent / "other")
    with pytest.raises(ModelError, match="outside"):
        load_onnx(snapshot / "m.onnx", simplify=False)


def test_data_of_an_attribute_is_read_as_carefully(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnx itself would read it from the folder in which the process runs."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "c.data").write_bytes(bytes(16))
    folder = tmp_path / "m"
    folder.mkdir()
    tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[4], name="c")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="c.data")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=tensor),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    path = folder / "m.onnx"
    path.write_bytes(model(nodes).SerializeToString())
    monkeypatch.chdir(secret)
    with pytest.raises(ModelError, match=r"m/c\.data' is missing"):
        load_onnx(path)
    (folder / "c.data").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    assert load_onnx(path).inputs
    tensor.external_data[0].value = "../secret/c.data"
    nodes[0] = helper.make_node("Constant", [], ["c"], value=tensor)
    path.write_bytes(model(nodes).SerializeToString())
    with pytest.raises(ModelError, match="outside"):
        load_onnx(path)


def negative_dim(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].dims[0] = -1


def wrapping_dims(proto: onnx.ModelProto) -> None:
    del proto.graph.initializer[0].dims[:]
    proto.graph.initializer[0].dims.extend([2**32, 2**32])


def negative_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -(2**63)


def huge_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**62


def unknown_type(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].data_type = 99


def unknown_input_type(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.elem_type = 99


def own_call(proto: onnx.ModelProto) -> None:
    for name, inner in (("f", "g"), ("g", "f")):
        proto.functions.append(
            helper.make_function(
                "own",
                name,
                ["a"],
                ["b"],
                [helper.make_node(inner, ["a"], ["b"], domain="own")],
                [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)],
            )
        )
    proto.opset_import.append(helper.make_opsetid("own", 1))
    proto.graph.node.append(helper.make_node("f", ["x"], ["z"], domain="own"))


@pytest.mark.parametrize(
    "damage",
    [
        negative_dim,
        wrapping_dims,
        negative_input,
        huge_input,
        unknown_type,
        unknown_input_type,
        own_call,
    ],
)
def test_sizes_types_and_calls_that_cannot_be(damage: Callable[[onnx.ModelProto], None]) -> None:
    proto = linear()
    damage(proto)
    with pytest.raises(GtcoError) as caught:
        load_onnx(proto.SerializeToString(), simplify=False)
    assert isinstance(caught.value, ModelError | ShapeError) or "99" in str(caught.value)


# node's name, tensor's name, operator, producer, graph
@pytest.mark.parametrize("name", ["relu", "x", "Relu", "test", "g"])
def test_text_that_is_not_utf8_is_said(name: str) -> None:
    """protobuf gives the bytes unchanged, and Python fails when it first reads them."""
    data = model().SerializeToString()
    field = bytes([len(name)]) + name.encode()
    assert field in data
    damaged = data.replace(field, bytes([len(name)]) + b"\xff" * len(name))
    with pytest.raises(ModelError, match="is not UTF-8"):
        load_onnx(damaged)


def test_a_path_that_cannot_be() -> None:
    with pytest.raises(ModelError, match="cannot read"):
        load_onnx("a\0b.onnx")


def test_data_in_a_nested_graph_is_read_as_carefully(tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(RNG.standard_normal(4).astype(np.float32), "c")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    y = helper.make_tensor_value_info("t", TensorProto.FLOAT, [1, 4])
    branch = helper.make_graph([helper.make_node("Add", ["x", "c"], ["t"])], "b", [], [y], [tensor])
    nodes = [helper.make_node("If", ["on"], ["y"], then_branch=branch, else_branch=branch)]
    path = tmp_path / "m.onnx"
    path.write_bytes(model(nodes, initializers={"on": np.array(True)}).SerializeToString())
    with pytest.raises(ModelError, match="outside"):
        load_onnx(path)
