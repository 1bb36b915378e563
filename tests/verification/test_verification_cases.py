"""The cases of verification: its inputs, and the masks and indices that follow from the graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from ml_dtypes import finfo

import gtco
from gtco.verification import Role, cases, onnx_roles, verify
from gtco.verification.cases import mask_of, ranges_to_try
from tests.verification.test_verification import TensorSpec


def test_cases_are_what_they_say_and_repeat():
    specs = (TensorSpec("x", "float32", (3, 5)), TensorSpec("ids", "int64", (400,)))
    seen, again = cases(specs, seed=1), cases(specs, seed=1)
    floats = ["random", "large", "zeros", "constant", "spike"]
    assert list(seen) == [*floats, "runs", "narrow"] and list(cases(specs[:1])) == floats
    for case, inputs in seen.items():
        assert inputs["x"].dtype == np.float32 and inputs["ids"].dtype == np.int64
        np.testing.assert_array_equal(inputs["x"], again[case]["x"])
        np.testing.assert_array_equal(inputs["ids"], again[case]["ids"])
    np.testing.assert_allclose(seen["large"]["x"], seen["random"]["x"] * 30, rtol=1e-6)
    assert (seen["spike"]["x"] != 0).sum() == 1 and not seen["zeros"]["x"].any()
    assert list(cases(specs[1:])) == ["random", "runs", "narrow"]


def test_integers_reach_over_the_whole_of_their_range():
    ids, pixels = TensorSpec("ids", "int64", (2, 300)), TensorSpec("pixels", "uint8", (40, 40))
    known = cases((ids,), roles={"ids": Role(index=True, bound=30522)})["random"]["ids"]
    assert known.min() == 0 and known.max() == 30521 and len(np.unique(known)) > 300
    assert cases((ids,), ranges={"ids": (0, 16)})["random"]["ids"].max() == 15
    drawn = cases((ids, pixels), roles={})["random"]
    assert (drawn["pixels"].min(), drawn["pixels"].max()) == (0, 255)
    assert cases((pixels,))["random"]["pixels"].max() == 255
    signed = cases((ids,), roles={"ids": Role()})["random"]["ids"]
    assert signed.min() == -1000 and signed.max() == 1000


def test_masks_are_tried_whole_empty_at_random_and_with_a_masked_row():
    specs = (
        TensorSpec("x", "float32", (2, 4)),
        TensorSpec("keep", "bool", (3, 7)),
        TensorSpec("attention_mask", "int64", (3, 7)),
        TensorSpec("bias", "float32", (2, 1, 5, 7)),
    )
    seen = cases(specs, roles={"bias": Role(mask="additive")})
    lowest = np.finfo(np.float32).min
    for name, one, zero in (("keep", True, False), ("attention_mask", 1, 0), ("bias", 0, lowest)):
        assert (seen["mask ones"][name] == one).all()
        assert (seen["mask zeros"][name] == zero).all()
        at_random = seen["mask random"][name]
        assert set(np.unique(at_random)) == {one, zero}
        rows = seen["mask row"][name].reshape(-1, 7)
        assert (rows[0] == zero).all() and (rows[1] == one).all() and (rows[2:] == one).any()
        if name != "bias":
            assert set(np.unique(seen["random"][name])) == {one, zero}
            assert (seen["random"][name] == one).any(-1).all()  # some of every row
            assert (seen["large"][name] == one).all()
    for case in ("mask zeros -inf", "mask random -inf", "mask row -inf"):
        assert set(np.unique(seen[case]["bias"])) <= {0, -np.inf}
        assert np.isneginf(seen[case]["bias"]).any() and seen[case]["keep"].dtype == np.bool_
    assert "mask row lowest" not in seen  # for a mask of which nothing is known but its name
    either = cases((TensorSpec("pad_mask", "float32", (3, 7)),))
    assert set(np.unique(either["mask random"]["pad_mask"])) == {0, 1}
    assert set(np.unique(either["mask random lowest"]["pad_mask"])) == {0, lowest}
    assert set(np.unique(either["mask row -inf"]["pad_mask"])) == {0, -np.inf}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_lowest_number_of_a_mask_is_finite(dtype: str) -> None:
    bias = TensorSpec("bias", dtype, (2, 1, 5, 7))
    seen = cases((bias,), roles={"bias": Role(mask="additive")})["mask zeros"]["bias"]
    assert (seen == finfo(seen.dtype).min).all() and seen.dtype == dtype


def graph(text: str, **initializers: np.ndarray) -> onnx.GraphProto:
    result = onnx.parser.parse_graph(text)
    for name, value in initializers.items():
        result.initializer.append(onnx.numpy_helper.from_array(value, name))
    return result


ONE = np.array(1, np.int64)


def test_roles_are_read_from_the_graph():
    roles = onnx_roles(
        graph(
            """
            g (float[2,4] x, int64[2,3] ids, int64[3] places, int64[2,3] keep, float[2,3] soft,
               float[2,1,3] bias, float[2,3] threshold, uint8[4] pixels, int64[2] pick)
                => (float[2,4] y)
            {
                e = Gather(table, ids)
                flat = Unsqueeze(places, one)
                shifted = Add(flat, one)
                p = Gather(positions, shifted)
                k = Unsqueeze(keep, one)
                f = Cast<to=1>(k)
                inverse = Sub(one, f)
                m = Mul(inverse, low)
                s = Sub(one, soft)
                scores = MatMul(x, x)
                a = Add(scores, m)
                b = Add(a, bias)
                c = Div(b, one)
                d = Add(s, c)
                probabilities = Softmax(d)
                t = Less(threshold, one)
                image = Cast<to=1>(pixels)
                scaled = Mul(image, one)
                q = Gather<axis=1>(table, pick)
                y = MatMul(probabilities, scaled)
            }
            """,
            table=np.zeros((50, 4), np.float32),
            positions=np.zeros((9, 4), np.float32),
            one=ONE,
            low=np.array(-3e38, np.float32),
        )
    )
    assert roles["x"] == Role(data=True) and roles["pixels"] == Role(data=True)
    assert roles["ids"] == Role(index=True, bound=50)
    assert roles["pick"] == Role(index=True, bound=4)
    assert roles["places"] == Role(index=True, low=-1, bound=8)  # one is added to it
    assert roles["keep"].mask == "binary" and roles["soft"].mask == "binary"
    assert roles["bias"].mask == "additive" and roles["threshold"].mask == "binary"
    assert "table" not in roles


def role_of(body: str, **constants: np.ndarray) -> Role:
    """The role of ``i``, an int64[2,30] input, in a graph that also has a float input ``x``."""
    text = f"g (int64[2,30] i, float[2,30] x) => (float[2,30] y) {{ {body} }}"
    return onnx_roles(graph(text, **constants))["i"]


TABLE = np.zeros((26, 4), np.float32)


@pytest.mark.parametrize(
    ("body", "constants", "range_"),
    [
        # bytes that are compared with all possible bytes, as byte classifiers do
        ("p = Equal(i, c) q = Cast<to=1>(p) y = MatMul(q, t)", {"c": np.arange(257)}, (0, 257)),
        ("p = OneHot<axis=-1>(i, c, v) y = MatMul(p, t)", {"c": np.array(40)}, (0, 40)),
        # letters: a table of 26 entries, of ids less 97
        ("j = Sub(i, c) y = Gather(t, j)", {"c": np.array(97)}, (97, 123)),
        ("j = Sub(c, i) y = Gather(t, j)", {"c": np.array(25)}, (0, 26)),
        ("d = Mul(i, c) y = Gather(t, d)", {"c": np.array(5)}, (0, 6)),
        # ids, which are also compared with the padding
        ("m = Equal(i, c) y = Gather(t, i) z = Where(m, y, x)", {"c": ONE}, (0, 26)),
        # pixels and lengths
        ("f = Cast<to=1>(i) s = Div(f, c) y = Conv(s, t)", {"c": np.float32(255)}, (-1000, 1001)),
        ("m = Less(c, i) f = Cast<to=1>(m) y = Mul(f, x)", {"c": np.arange(30)}, (0, 30)),
        ("m = Greater(i, c) f = Cast<to=1>(m) y = Mul(f, x)", {"c": ONE * 127}, (-1000, 1001)),
    ],
)
def test_integers_that_are_data_are_no_masks(body, constants, range_):
    role = role_of(body, t=TABLE, v=np.array([0, 1], np.float32), **constants)
    spec = TensorSpec("i", "int64", (2, 300))
    assert mask_of(spec, {"i": role}) is None
    assert ranges_to_try(spec, role)[0] == range_
    drawn = cases((spec,), roles={"i": role})
    assert list(drawn) == ["random", "runs", "narrow"]
    values = drawn["random"]["i"]
    assert (values.min(), values.max()) == (range_[0], range_[1] - 1)
    assert len(np.unique(values)) > min(200, range_[1] - range_[0]) / 2
    if role.told:  # ids that the model distinguishes occur often, also in the places of padding
        assert (values == role.told[0]).sum() > 50
        assert (drawn["narrow"]["i"][0, 150:] == role.told[0]).all()
    assert (np.ptp(drawn["runs"]["i"][1]), drawn["runs"]["i"].dtype) == (0, np.int64)
    assert np.ptp(drawn["narrow"]["i"][1]) <= np.ptp(values) / 4


@pytest.mark.parametrize(
    "body",
    [
        "m = Cast<to=9>(i) y = Where(m, x, z)",
        "m = Equal(i, zero) y = Where(m, z, x)",
        "f = Cast<to=1>(i) r = Sub(one, f) n = Mul(r, low) s = Add(x, n) y = Softmax(s)",
        # a mask of pixels is resized; means over tokens count it
        "f = Cast<to=1>(i) r = Resize(f, none, c) b = Cast<to=9>(r) y = Where(b, x, z)",
        "f = Cast<to=1>(i) n = ReduceSum(f) k = Mul(x, f) y = Div(k, n) b = Cast<to=9>(i)",
        "a = Unsqueeze(i, one) b = Unsqueeze(i, two) c = Mul(a, b) d = Cast<to=9>(c)",
    ],
)
def test_what_is_only_asked_whether_is_a_mask(body):
    constants = {"zero": ONE * 0, "one": ONE, "two": ONE * 2, "low": np.float32(-3e38)}
    role = role_of(body, **{n: np.asarray(v) for n, v in constants.items()})
    assert mask_of(TensorSpec("i", "int64", (2, 30)), {"i": role}) == "binary"


def test_floats_that_are_compared_are_data():
    def kind(name: str, body: str) -> str | None:
        text = f"g (float[2,30] {name}) => (float[2,30] y) {{ {body} }}"
        roles = onnx_roles(graph(text, zero=np.float32(0), slope=np.float32(0.1)))
        return mask_of(TensorSpec(name, "float32", (2, 30)), roles)

    leaky = "m = Greater(x, zero) n = Mul(x, slope) y = Where(m, x, n)"
    assert kind("x", leaky) is None and kind("x", leaky + " z = Relu(y)") is None
    assert kind("x", "m = IsNaN(x) n = Where(m, zero, x) y = Exp(n)") is None
    assert kind("pad_mask", "m = Greater(pad_mask, zero) y = Cast<to=1>(m)") == "binary"


def test_subgraphs_read_inputs_too():
    body = onnx.parser.parse_graph("b () => (float[2,4] t) { t = Gather(table, i) }")
    outer = graph(
        "g (int64[2] i, bool k) => (float[2,4] y) { n = Neg(i) }",
        table=np.zeros((7, 4), np.float32),
    )
    outer.node.append(onnx.helper.make_node("If", ["k"], ["y"], then_branch=body, else_branch=body))
    assert onnx_roles(outer)["i"].bound == 7


def test_floats_that_index_stay_in_their_table():
    """As the patches of Kosmos, whose first elements are the row and the column."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1,6,5] x) => (float[1,6,4] y) {
            place = Slice(x, zero, one, two)
            row = Squeeze(place, two)
            ids = Cast<to=7>(row)
            e = Gather(table, ids)
            rest = Slice(x, one, five, two)
            y = Add(e, rest)
        }"""
    )
    values = {"zero": [0], "one": [1], "two": [2], "five": [5]}
    constants = {name: np.array(value, np.int64) for name, value in values.items()}
    constants["table"] = np.arange(28, dtype=np.float32).reshape(7, 4)
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    roles = onnx_roles(model.graph)
    assert roles["x"].index and roles["x"].bound == 7
    drawn = cases((TensorSpec("x", "float32", (1, 6, 5)),), roles=roles)
    assert drawn["large"]["x"].max() == 6 and drawn["large"]["x"].min() >= 0
    assert drawn["random"]["x"].max() < 6
    assert gtco.compile_model(model, verify=True).report.verification.passed


def test_ids_that_the_reference_refuses_are_drawn_smaller():
    """Two tables, of 1000 and of 3 entries: each input reaches the largest power of 2 that fits."""
    seen: list[dict[str, np.ndarray]] = []

    def reference(inputs):
        seen.append(inputs)
        table = np.arange(1000, dtype=np.float32)
        return [table[inputs["ids"]] + table[:3][inputs["kind"]]]

    @dataclass(frozen=True)
    class Embedding:
        inputs = (TensorSpec("ids", "int64", (2, 80)), TensorSpec("kind", "int32", (2, 80)))
        outputs = (TensorSpec("y", "float32", (2, 80)),)

        def run(self, inputs):
            return {"y": (inputs["ids"] + inputs["kind"]).astype(np.float32)}

    report = verify(Embedding(), reference)
    assert report.passed
    drawn = seen[-3]  # then "runs" and "narrow"
    assert drawn["ids"].max() == 511 and drawn["kind"].max() == 1
