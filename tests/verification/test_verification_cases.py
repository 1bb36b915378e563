"""What verification tries: inputs by case, masks and indices by what the graph says of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from gtco.verification import Role, cases, onnx_roles, verify
from tests.verification.test_verification import TensorSpec


def test_cases_are_what_they_say_and_repeat():
    specs = (TensorSpec("x", "float32", (3, 5)), TensorSpec("ids", "int64", (400,)))
    seen, again = cases(specs, seed=1), cases(specs, seed=1)
    assert list(seen) == ["random", "large", "zeros", "constant", "spike"]
    for case, inputs in seen.items():
        assert inputs["x"].dtype == np.float32 and inputs["ids"].dtype == np.int64
        np.testing.assert_array_equal(inputs["x"], again[case]["x"])
        np.testing.assert_array_equal(inputs["ids"], again[case]["ids"])
    np.testing.assert_allclose(seen["large"]["x"], seen["random"]["x"] * 30, rtol=1e-6)
    assert (seen["spike"]["x"] != 0).sum() == 1 and not seen["zeros"]["x"].any()
    assert list(cases(specs[1:])) == ["random"]


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


def graph(text: str, **initializers: list[int]) -> onnx.GraphProto:
    result = onnx.parser.parse_graph(text)
    for name, dims in initializers.items():
        result.initializer.add(name=name, dims=dims, data_type=TensorProto.FLOAT)
    return result


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
            table=[50, 4],
            positions=[9, 4],
            one=[],
            low=[],
        )
    )
    assert roles["x"] == Role() and roles["pixels"] == Role()
    assert roles["ids"] == Role(index=True, bound=50)
    assert roles["pick"] == Role(index=True, bound=4)
    assert roles["places"] == Role(index=True)  # shifted: the bound is found by trying
    assert roles["keep"].mask == "binary" and roles["soft"].mask == "binary"
    assert roles["bias"].mask == "additive" and roles["threshold"].mask == "binary"
    assert "table" not in roles


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
    assert seen[-1]["ids"].max() == 511 and seen[-1]["kind"].max() == 1
