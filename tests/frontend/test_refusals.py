"""The errors for nodes that cannot be translated: they are in our words, whatever TVM says."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gtco.frontend.expansion import EXPANDED
from gtco.frontend.node_check import Node
from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import GtcoError, InternalError, ModelError, UnsupportedError, describe
from tests.frontend import wrong_nodes

FOREIGN = re.compile(r"tvm|relax|check failed|/project/|\.cc\b|traceback|tensorcopy|\.py\b", re.I)


def refusal(model: onnx.ModelProto) -> str | None:
    """The error's text; None if the model is accepted. Anything but a GtcoError is raised."""
    try:
        lower(load_onnx(model, simplify=False))
    except InternalError:
        raise
    except GtcoError as error:
        return str(error)
    return None


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 120), marks=pytest.mark.scheduled)]
)
def test_every_operator_with_wrong_ranks_types_and_attributes(
    seeds: range, capfd: pytest.CaptureFixture[str]
) -> None:
    """The node is accepted, if ONNX's rules allow it, or refused in words that name it."""
    operators = wrong_nodes.operators()
    assert len(operators) > 150
    refused = 0
    for domain, operator in operators:
        for seed in seeds:
            model = wrong_nodes.draw(domain, operator, seed)
            said = refusal(model)
            if said is None:
                continue
            refused += 1
            assert not FOREIGN.search(said), f"{operator} {seed}: {said}"
            assert wrong_nodes.NAME in said or "output 'o0'" in said, f"{operator} {seed}: {said}"
            # The error for a written-out operator names the node and the inner operator that fails.
            if (domain, operator) not in EXPANDED and "output 'o0'" not in said:
                plain = said.lower().replace("_", "")
                assert operator.lower() in plain, f"{operator} {seed}: {said}"
    assert refused > len(operators) * len(seeds) / 2
    assert capfd.readouterr() == ("", "")


def model(node: onnx.NodeProto, **inputs: tuple[int, tuple[int, ...]]) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, dtype, shape) for n, (dtype, shape) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def test_a_node_that_breaks_a_rule_is_described() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="c", pads=[1, 1])
    with pytest.raises(ModelError) as caught:
        load_onnx(model(node, x=(FLOAT, (2, 3)), w=(FLOAT, (3,))))
    said = str(caught.value)
    assert "node 'c' (Conv) breaks a rule of ONNX: Input tensor must have at least" in said
    assert "inputs: x float32[2, 3], w float32[3]; attributes: pads=[1, 1]" in said


@pytest.mark.parametrize(
    ("node", "inputs", "said"),
    [
        (
            helper.make_node("TopK", ["x", "k"], ["v", "i"], name="t"),
            {"x": (FLOAT, (3, 4)), "k": (INT64, (1,))},
            r"node 't' \(TopK\) .*its input 'k' is known only at run time: make it a constant",
        ),
        (
            helper.make_node("MaxPool", ["x"], ["v", "i"], name="p", kernel_shape=[2, 2]),
            {"x": (FLOAT, (1, 3, 4, 4))},
            r"'p' \(MaxPool\) .*not all of its 2 outputs are supported: 'v' \(Y\), 'i' \(Indices\)",
        ),
        (
            helper.make_node("DequantizeLinear", ["x", "s"], ["y"], name="d", axis=0, block_size=3),
            {"x": (TensorProto.INT8, (7, 3)), "s": (FLOAT, (2, 3))},
            r"node 'd' .*its blocks of 3 do not divide its input \[7, 3\] along axis 0",
        ),
        (
            helper.make_node("SplitToSequence", ["x"], ["y"], name="s"),
            {"x": (FLOAT, (4, 3))},
            r"output 'y' is not a tensor but a sequence",
        ),
    ],
)
def test_what_is_not_supported_is_said(
    node: onnx.NodeProto, inputs: dict[str, tuple[int, tuple[int, ...]]], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        load_onnx(model(node, **inputs), simplify=False)


@pytest.mark.parametrize("declared", ["float16", "int64", "bool"])
def test_an_output_of_another_type_than_its_nodes_compute(declared: str) -> None:
    """ONNX Runtime refuses such a file too."""
    text = f"g (float[2] x) => ({declared}[2] y) {{ y = Relu(x) }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    with pytest.raises(ModelError, match=f"'y' as {declared}, but its nodes compute float32"):
        load_onnx(model, simplify=False)


def test_groups_beyond_the_channels_are_refused_before_anything_is_made_of_them() -> None:
    """Ten thousand million groups once took all memory of the machine."""
    names, flags = ["x", "g", "b"], {"groups": 10**10, "activation": 0, "epsilon": 1e-5}
    node = helper.make_node("GroupNorm", names, ["y"], name="n", domain="com.microsoft", **flags)
    spoilt = model(node, x=(FLOAT, (1, 4, 4, 8)), g=(FLOAT, (8,)), b=(FLOAT, (8,)))
    spoilt.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(
        UnsupportedError, match=r"node 'n' \(GroupNorm\): 8 channels cannot be split"
    ):
        load_onnx(spoilt, simplify=False)


def test_a_split_with_more_outputs_than_it_says() -> None:
    """ONNX's own shape inference once ended the process."""
    node = helper.make_node("Split", ["x"], ["a", "b", "c"], name="s", num_outputs=2)
    with pytest.raises(ModelError, match=r"node 's' \(Split\) breaks .* it has 3 outputs .*=2"):
        load_onnx(model(node, x=(FLOAT, (4, 3))))


def test_weights_of_a_type_that_gtco_has_not() -> None:
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["f"], name="d", axis=0)
    add = helper.make_node("Add", ["f", "x"], ["y"])
    spoilt = model(add, x=(FLOAT, (2, 2)))
    spoilt.graph.node.insert(0, node)
    narrow = helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [2, 2], [1] * 4)
    spoilt.graph.initializer.append(narrow)
    spoilt.graph.initializer.append(helper.make_tensor("s", FLOAT, [2], [0.5, 0.25]))
    with pytest.raises(UnsupportedError, match=r"'w' \[2, 2\], which node 'd'.* of type float8"):
        load_onnx(spoilt)


def test_a_split_into_one_part_is_the_tensor() -> None:
    node = helper.make_node("Split", ["x"], ["y"], name="s", num_outputs=1)
    graph = lower(load_onnx(model(node, x=(FLOAT, (4, 3))), simplify=False))
    assert str(graph.types["y"]) == "float32[4x3]"


def test_integers_of_a_constant_node_are_of_64_bits() -> None:
    node = helper.make_node("Constant", [], ["y"], name="c", value_ints=[1, 2])
    assert str(lower(load_onnx(model(node), simplify=False)).types["y"]) == "int64[2]"


def test_what_tvm_says_stays_out_of_an_internal_failure() -> None:
    import tvm

    try:
        tvm.runtime.tensor([1, 2]).copyfrom([1, 2, 3])
    except Exception as error:
        said = describe(error)
        assert "raised inside TVM" in said and str(error).splitlines()[-1] not in said
    else:
        pytest.fail("TVM took it")


def test_the_command_line_shows_what_failed_inside_only_where_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from gtco import cli

    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], name="t")
    onnx.save(model(node, x=(FLOAT, (3, 4)), k=(INT64, (1,))), tmp_path / "m.onnx")
    command = ["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.so"), "--no-simplify"]
    assert cli.main(command) == 1
    said = capfd.readouterr().err
    assert "node 't' (TopK) is not supported" in said and not FOREIGN.search(
        said.split("error:")[1]
    )
    with pytest.raises(UnsupportedError) as caught:
        cli.main(["--debug", *command])
    assert caught.value.__cause__ is not None


FIXED = {
    "LayerNormalization": (
        "g (float[2,8] x, float[16] s) => (float[2,8] y) { y = LayerNormalization(x, s) }",
        "'s' has the shape [16], and what it scales [2, 8]",
    ),
    "LayerNormalization, a higher rank": (
        "g (float[2,8] x, float[1,2,8] s) => (float[2,8] y) { y = LayerNormalization(x, s) }",
        "'s' has the shape [1, 2, 8], and what it scales [2, 8]",
    ),
    "Conv": (
        "g (float[1,8,5,5] x, float[4,3,1,1] w) => (float[1,4,5,5] y) { y = Conv(x, w) }",
        "its input has 8 channels, and its weights are for 3",
    ),
    "Einsum": (
        'g (float[8,3] x, float[16] w) => (float[3] y) { y = Einsum<equation="tc,t->c">(x, w) }',
        "'t' of its equation is 8 and 16",
    ),
    "Einsum, a size of 1 between": (
        "g (float[8] x, float[1] v, float[16] w) => (float[t] y) "
        '{ y = Einsum<equation="t,t,t->t">(x, v, w) }',
        "'t' of its equation is 8 and 16",
    ),
    "Gather": (
        "g (float[1,8] x) => (float[1,1] y) <int64[1] i = {8}> { y = Gather<axis=1>(x, i) }",
        "it picks element 8 along axis 1, which has 8",
    ),
    "Pad": (
        "g (float[1,8] x) => (float[1,n] y) <int64[4] p = {0,-5,0,-6}> { y = Pad(x, p) }",
        "its output 'y' would have the size -3 on axis 1: the input is too small",
    ),
    "AveragePool": (
        "g (float[1,3,8,8] x) => (float[1,3,a,b] y) { y = AveragePool<kernel_shape=[9,1]>(x) }",
        None,
    ),
    "MaxPool": (
        "g (float[1,3,8,8] x) => (float[1,3,a,b] y) { y = MaxPool<kernel_shape=[10,1]>(x) }",
        "its output 'y' would have the size -1 on axis 2: the input is too small",
    ),
}


@pytest.mark.parametrize("case", FIXED)
def test_sizes_that_do_not_fit_a_node(case: str) -> None:
    """They come with a size of a dimension that the model itself fixes."""
    (text, wanted), operator = FIXED[case], case.partition(",")[0]
    said = refusal(parsed(text))
    if wanted is None:  # an output of size 0
        assert said is None or operator in said
        return
    assert said is not None and f"({operator}) breaks a rule of ONNX: {wanted}" in said
    assert "check the sizes given with --shape or --dim" in said


def test_a_window_that_just_fits_a_padded_image() -> None:
    assert refusal(
        parsed(
            "g (float[1,1,8,8] x, float[1,1,9,1] w) => (float[1,1,1,8] y) "
            "{ y = Conv<pads=[0,0,1,0]>(x, w) }"
        )
    ) is None


def test_an_input_without_a_shape_is_named() -> None:
    """Slices whose ends follow from an input have none, and the node behind them is refused."""
    whole = helper.make_tensor_type_proto(TensorProto.FLOAT, (4, 6))
    types = {"w": whole, "x": helper.make_tensor_type_proto(TensorProto.FLOAT, None)}
    said = str(Node(helper.make_node("Flatten", ["x"], ["y"]), types).refused())
    assert "the shape of its input 'x' is known only when the model runs (inputs: x" in said
    known = str(Node(helper.make_node("Flatten", ["w"], ["y"]), types | {"x": whole}).refused())
    assert "known only" not in known


def test_opsets_that_do_not_exist_yet_are_refused() -> None:
    model = parsed("f (float[2] x) => (float[2] y) { y = Relu(x) }")
    model.opset_import[0].version = onnx.defs.onnx_opset_version() + 1
    said = refusal(model)
    assert said is not None and "knows no later one" in said
    model.opset_import[0].version -= 1
    assert refusal(model) is None
