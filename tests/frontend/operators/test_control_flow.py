"""If, Loop and Scan, written out, against ONNX Runtime, which runs them unchanged."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.expansion import control_flow, expand
from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError
from tests.few_nodes import by_onnxruntime, compare, model, normal, refused, typed

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
make = helper.make_node


def value(name, dtype=FLOAT, shape=None):
    return helper.make_tensor_value_info(name, dtype, shape)


def body(nodes, inputs, outputs, constants=None):
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    return helper.make_graph(nodes, "body", inputs, outputs, tensors)


def counted(nodes, outputs, constants=None, more=()):
    """A body of (i, go, acc) that never stops by its condition."""
    return body(
        [*nodes, make("Identity", ["go"], ["on"])],
        [value("i", INT64, []), value("go", BOOL, []), value("acc"), *more],
        [value("on", BOOL, []), *(value(name) for name in outputs)],
        constants,
    )


@pytest.mark.parametrize("trips", [1, 2, 5])
@pytest.mark.parametrize("condition", [False, True])
def test_a_loop_of_constant_count(trips, condition):
    """The carried value, the results of all runs, and the number of the run."""
    nodes = [
        make("Cast", ["i"], ["fi"], to=FLOAT),
        make("Mul", ["acc", "factor"], ["m"]),
        make("Add", ["m", "fi"], ["next"]),
        make("ReduceMax", ["next"], ["top"], axes=[1], keepdims=0),
    ]
    inner = counted(nodes, ["next", "top"], {"factor": np.float32(0.5)})
    inputs = ["n", "true" if condition else "", "x"]
    constants = {"n": np.asarray(trips), "true": np.asarray(True)}
    arrays = {"x": normal(1, 2, 3)}
    made = model(
        [make("Loop", inputs, ["y", "tops"], body=inner)], arrays, constants, ["y", "tops"]
    )
    compare(made, arrays)


def test_a_count_that_follows_from_a_shape():
    """Scripted modules are exported in this way: for i in range(x.shape[1]): y += x[:, i] *
    w[i].
    """
    nodes = [
        make("Gather", ["x", "i"], ["xi"], axis=1),
        make("Gather", ["w", "i"], ["wi"], axis=0),
        make("Mul", ["xi", "wi"], ["p"]),
        make("Add", ["acc", "p"], ["next"]),
    ]
    outer = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "one"], ["count"], axis=0),
        make("Loop", ["count", "true", "zero"], ["y"], body=counted(nodes, ["next"])),
    ]
    constants = {"one": np.asarray(1), "true": np.asarray(True), "w": normal(2, 4)}
    constants["zero"] = np.zeros((2, 3), np.float32)
    arrays = {"x": normal(1, 2, 4, 3)}
    graph = compare(model(outer, arrays, constants), arrays)
    kinds = [op.kind for op in graph.operators.values()]
    assert kinds.count("multiply") == 4


def test_a_loop_that_ends_by_its_condition():
    """while size > 10: the condition depends only on sizes, and sizes change."""
    nodes = [
        make("MaxPool", ["acc"], ["next"], kernel_shape=[2, 2], strides=[2, 2]),
        make("Shape", ["next"], ["s"]),
        make("ReduceProd", ["s"], ["size"], keepdims=0),
        make("Greater", ["size", "limit"], ["on"]),
    ]
    inner = body(
        nodes,
        [value("i", INT64, []), value("go", BOOL, []), value("acc")],
        [value("on", BOOL, []), value("next")],
        {"limit": np.asarray(10)},
    )
    arrays = {"x": normal(1, 1, 2, 16, 12)}
    constants = {"true": np.asarray(True)}
    made = model([make("Loop", ["", "true", "x"], ["y"], body=inner)], arrays, constants)
    graph = compare(made, arrays)
    assert [op.kind for op in graph.operators.values()].count("max_pool2d") == 3


def test_loops_within_loops_and_conditions_within_loops():
    """The inner count and the inner condition come from the number of the outer run. Both bodies
    use the same names.
    """
    inner = counted([make("Add", ["acc", "x"], ["next"])], ["next"])
    then = body([make("Neg", ["deep"], ["branch"])], [], [value("branch")])
    other = body([make("Abs", ["deep"], ["branch"])], [], [value("branch")])
    nodes = [
        make("Loop", ["i", "go", "acc"], ["deep"], body=inner),
        make("Less", ["i", "two"], ["early"]),
        make("If", ["early"], ["next"], then_branch=then, else_branch=other),
    ]
    outer = counted(nodes, ["next"], {"two": np.asarray(2)})
    arrays = {"x": normal(1, 2, 3)}
    constants = {"n": np.asarray(4), "true": np.asarray(True)}
    made = model([make("Loop", ["n", "true", "x"], ["y"], body=outer)], arrays, constants)
    graph = compare(made, arrays)
    kinds = [op.kind for op in graph.operators.values()]
    assert kinds.count("add") == 1 + 2 + 3 and kinds.count("abs") == 2


@pytest.mark.parametrize("chosen", [False, True])
def test_a_constant_condition_takes_its_branch(chosen):
    then = body([make("Relu", ["x"], ["a"])], [], [value("a")])
    other = body([make("Add", ["x", "w"], ["b"])], [], [value("b")], {"w": normal(1, 3)})
    node = make("If", ["condition"], ["y"], then_branch=then, else_branch=other)
    arrays = {"x": normal(2, 2, 3)}
    compare(model([node], arrays, {"condition": np.asarray(chosen)}), arrays)


@settings(max_examples=25, deadline=None)
@given(
    axes=st.tuples(st.integers(-2, 1), st.integers(-2, 1)),
    turned=st.tuples(st.booleans(), st.booleans()),
    out_axis=st.integers(-2, 1),
    out_turned=st.booleans(),
)
def test_scan(axes, turned, out_axis, out_turned):
    """state = 0.5 state + a * b for slices a, b; the states are an output."""
    length, width = 4, 3

    def laid(seed, axis):
        return normal(seed, *((length, width) if axis % 2 == 0 else (width, length)))

    inner = body(
        [
            make("Mul", ["state", "half"], ["h"]),
            make("Mul", ["a", "b"], ["p"]),
            make("Add", ["h", "p"], ["next"]),
            make("Identity", ["next"], ["out"]),
        ],
        [value("state", FLOAT, [width]), value("a"), value("b")],
        [value("next", FLOAT, [width]), value("out", FLOAT, [width])],
        {"half": np.float32(0.5)},
    )
    node = make(
        "Scan",
        ["first", "u", "v"],
        ["last", "states"],
        body=inner,
        num_scan_inputs=2,
        scan_input_axes=axes,
        scan_input_directions=[int(t) for t in turned],
        scan_output_axes=[out_axis],
        scan_output_directions=[int(out_turned)],
    )
    arrays = {"first": normal(1, width), "u": laid(2, axes[0]), "v": laid(3, axes[1])}
    compare(model([node], arrays, {}, ["last", "states"]), arrays)


def test_a_definition_of_onnx_that_holds_a_scan():
    """LinearAttention: S += k v^T, y = scale q^T S, one token after the other."""
    arrays = {name: normal(seed, 2, 5, 12) for seed, name in enumerate("qkv")}
    q, k, v = (t.reshape(2, 5, 3, 4).astype(np.float64) for t in arrays.values())
    state = np.cumsum(np.einsum("bthk,bthv->bthkv", k, v), axis=1)
    y = np.einsum("bthk,bthkv->bthv", q, state) / 2
    attrs = {"q_num_heads": 3, "kv_num_heads": 3, "update_rule": "linear"}
    node = make("LinearAttention", ["q", "k", "v"], ["y", "state"], **attrs)
    wanted = [y.reshape(2, 5, 12).astype(np.float32), state[:, -1].astype(np.float32)]
    compare(model([node], arrays, {}, ["y", "state"], opset=27), arrays, wanted)


def test_what_onnxsim_folds_or_removes_is_not_refused():
    """A condition that is computed from more than sizes and counts, and a loop whose result is not
    read.
    """
    arrays = {"x": normal(1, 2, 3), "n": np.asarray(3)}
    branches = [body([make(kind, ["x"], ["a"])], [], [value("a")]) for kind in ("Relu", "Abs")]
    nodes = [
        make("Sigmoid", ["known"], ["sure"]),
        make("Greater", ["sure", "half"], ["c"]),
        make("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
        make(
            "Loop",
            ["n", "", "x"],
            ["unread"],
            body=counted([make("Add", ["acc", "x"], ["next"])], ["next"]),
        ),
    ]
    constants = {"known": np.float32(2), "half": np.float32(0.5)}
    constants = {k: np.asarray(v) for k, v in constants.items()}
    proto = typed(model(nodes, arrays, constants), [arrays["x"]])
    graph = lower(load_onnx(proto))
    assert [op.kind for op in graph.operators.values()][:1] == ["relu"]


def loop_of(count, condition="true", nodes=None, x=(2, 3)):
    nodes = nodes or [make("Add", ["acc", "x"], ["next"])]
    arrays = {"x": normal(1, *x)}
    constants = {"n": np.asarray(count), "true": np.asarray(True)}
    loop = make(
        "Loop", ["n", condition, "x"], ["y"], name="the loop", body=counted(nodes, ["next"])
    )
    return model([loop], arrays, constants), arrays


def test_a_loop_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(control_flow, "MAX_NODES", 100)
    compare(*loop_of(90))
    message = refused(loop_of(10**12)[0], r"node 'the loop' \(Loop\): it runs 1000000000000 times")
    assert "more than 100 nodes" in message


def test_what_only_a_run_decides_is_refused():
    """The error has the node's name and says what to do."""
    arrays = {"x": normal(1, 2, 3), "n": np.asarray(3), "c": np.asarray(True)}
    inner = counted([make("Add", ["acc", "x"], ["next"])], ["next"])
    made = model([make("Loop", ["n", "", "x"], ["y"], body=inner)], arrays)
    refused(made, r"node 'y' \(Loop\): how often it runs is known only when the model runs")
    made = model([make("Loop", ["", "c", "x"], ["y"], body=inner)], arrays)
    refused(made, "whether it runs once more is known only when the model runs")


def branches(then, other, read="c"):
    """``y`` = If(``read``) of two nodes that make ``a``."""
    graphs = [body([node], [], [value("a")]) for node in (then, other)]
    return make("If", [read], ["y"], then_branch=graphs[0], else_branch=graphs[1])


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_condition_that_an_input_decides_chooses_between_results(chosen, shape):
    """An If inside the branch of another, on the same value, and a branch with a weight."""
    inner = branches(make("Relu", ["x"], ["a"]), make("Abs", ["x"], ["a"]))
    inner.output[0] = "b"
    then = body([inner, make("Add", ["b", "w"], ["t"])], [], [value("t")], {"w": normal(2, 3)})
    other = body([make("Neg", ["x"], ["o"])], [], [value("o")])
    arrays = {"x": normal(1, 2, 3), "c": np.full(shape, chosen)}
    proto = model([make("If", ["c"], ["y"], then_branch=then, else_branch=other)], arrays)
    compare(proto, arrays)
    notes = load_onnx(proto).notes
    assert len(notes) == 2 and "both of its branches are computed" in notes[0]


def test_branches_that_give_other_shapes_are_refused():
    arrays = {"x": normal(1, 2, 3), "c": np.asarray(True)}
    node = branches(make("Relu", ["x"], ["a"]), make("Transpose", ["x"], ["a"]))
    refused(model([node], arrays), r"node 'y' \(If\): .* give float32\[2, 3\] and float32\[3, 2\]")


def test_a_branch_that_cannot_run_at_these_sizes_gives_nan():
    """With open sizes ONNX Runtime gives an error where the condition takes it. A type without
    NaN is refused, and so is a model that cannot run at all.
    """
    arrays = {"x": normal(1, 2, 3), "c": np.asarray(True)}
    fits, wrong = make("Relu", ["x"], ["a"]), make("MatMul", ["x", "x"], ["a"])
    proto = model([branches(fits, wrong)], arrays)
    graph = compare(proto, arrays, [np.maximum(arrays["x"], 0)])
    (note,) = load_onnx(proto).notes
    assert "its else_branch does not fit the sizes of the inputs" in note
    found = graph.evaluate({"x": arrays["x"], "c": np.asarray(False)})
    assert np.isnan(found["y"]).all() and found["y"].shape == (2, 3)
    integers = {"x": np.ones((2, 3), np.int32), "c": np.asarray(True)}
    proto = model([branches(make("Abs", ["x"], ["a"]), wrong)], integers)
    refused(proto, "int32, which has no NaN")
    with pytest.raises(ModelError, match="MatMul"):
        load_onnx(typed(model([branches(wrong, wrong)], arrays), [arrays["x"]]), simplify=False)


def test_a_loop_that_never_runs_passes_on_what_it_was_given():
    compare(*loop_of(0))
    nodes = [make("Add", ["acc", "x"], ["next"])]
    inner = counted(nodes, ["next", "next"])
    made = model(
        [make("Loop", ["n", "", "x"], ["y", "all"], body=inner)],
        {"x": normal(1, 2, 3)},
        {"n": np.asarray(0)},
        ["y", "all"],
    )
    refused(made, "it never runs, so its output 'all' has no elements")
    del made.graph.output[1]  # where nobody reads it, it does not matter
    x = normal(5, 2, 3)
    compare(made, {"x": x}, [x])


def test_weights_of_a_body_are_there_once():
    """A body with 4 runs holds a matrix: there is one initializer and not four."""
    nodes = [make("MatMul", ["acc", "w"], ["next"])]
    inner = counted(nodes, ["next"], {"w": normal(2, 3, 3)})
    arrays = {"x": normal(1, 2, 3)}
    loop = make("Loop", ["n", "", "x"], ["y"], body=inner)
    proto = model([loop], arrays, {"n": np.asarray(4)})
    compare(proto, arrays)
    written = expand(proto)
    assert [n.op_type for n in written.graph.node] == ["MatMul"] * 4 + ["Identity"]
    assert [list(t.dims) for t in written.graph.initializer].count([3, 3]) == 1


def test_onnx_reads_what_is_written():
    """The model between the walk and the importer is valid, and onnxsim accepts it."""
    proto, arrays = loop_of(3)
    written = expand(typed(proto, by_onnxruntime(proto, arrays)))
    onnx.checker.check_model(written, full_check=True)
    assert not load_onnx(proto).notes
