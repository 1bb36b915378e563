"""The evaluator that decides in float64: it is right on ONNX's own tests, exact in comparison with
ONNX Runtime, and bounded in time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest

from gtco.verification.float64.evaluator import LOOPS, OURS, Evaluator, Limits
from gtco.verification.float64.judge import OPERANDS
from gtco.verification.float64.operators import Arithmetic
from gtco.verification.judge import Unjudged
from tests.end_to_end.nodes.cases import NodeCase, cases
from tests.end_to_end.nodes.runner import widened

AMPLE = (60.0, 2**30)
EXACT = Arithmetic(np.float64)

# The evaluator does not compute training, casts and quantizing to floats of less than 16 bits,
# results of Loop from scalars, places of maxima, cubic and volumetric sampling, and the Scan of
# opset 8.
REFUSED = (
    "_training_mode _to_FLOAT8 _to_FLOAT4 gridsample_bicubic gridsample_vol maxpool_with_argmax "
    "test_scan_sum test_quantizelinear_e4m3fn test_quantizelinear_e5m2 test_quantizelinear_float4"
).split()
OTHER_SHAPES = ("test_range_",)
# An element in the middle of two steps, which float32 does not hit exactly.
TIES = ("test_dynamicquantizelinear", "test_dynamicquantizelinear_expanded")


def evaluated(
    model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], rules: Arithmetic = EXACT
) -> list[np.ndarray]:
    return Evaluator(model, Limits(*AMPLE)).run(inputs, rules)


def wrong(case: NodeCase) -> str:
    model = onnx.inliner.inline_local_functions(case.model)
    sequences = not all(isinstance(wanted, np.ndarray) for wanted in case.outputs)
    try:
        found = evaluated(model, case.inputs)
    except Unjudged as why:
        expected = sequences or any(part in case.name for part in REFUSED)
        return "" if expected else f"refused: {why}"
    for got, wanted in zip(found, case.outputs, strict=True):
        if not isinstance(wanted, np.ndarray):
            continue  # a sequence
        if got.shape != wanted.shape:
            return "" if case.name.startswith(OTHER_SHAPES) else f"{got.shape}, not {wanted.shape}"
        # expected values of half precision have a few of its roundings
        rtol = 0.02 if wanted.dtype.itemsize == 2 else case.rtol
        # An inverse transform of float32 leaves zeros with the rounding of its largest values.
        atol = 1e-6 if "dft_inverse" in case.name else case.atol
        if case.name in TIES and wanted.dtype == np.uint8:
            atol = 1.0
        if not np.allclose(*map(widened, (got, wanted)), rtol, atol, equal_nan=True):
            return "values"
    return ""


def test_onnxs_own_tests_of_operators():
    known = cases()
    assert len(known) > 1000
    found = {name: why for name, case in known.items() if (why := wrong(case))}
    assert not found


def parsed(text: str, **values: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.checker.check_model(model)
    return model


def beside_onnxruntime(model: onnx.ModelProto, **inputs: np.ndarray) -> None:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for got, wanted in zip(evaluated(model, inputs), session.run(None, inputs), strict=True):
        assert got.dtype == (np.float64 if wanted.dtype.kind == "f" else wanted.dtype)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_what_is_fast_here_is_not_refused_as_slow() -> None:
    assert not LOOPS & {kind.__name__ for kind in OURS}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_until_opset_12_is_of_all_axes_from_one_on(kind, axis):
    """``onnx.reference`` gives it the meaning of opset 13."""
    model = parsed(f"""<ir_version: 7, opset_import: ["": 11]>
        g (float[2,3,5] x) => (float[2,3,5] y) {{ y = {kind}<axis={axis}>(x) }}""")
    x = np.random.default_rng(axis).standard_normal((2, 3, 5)).astype(np.float32)
    beside_onnxruntime(model, x=x)


@pytest.mark.parametrize(
    "attributes",
    [
        "group=2, pads=[1,2,0,1], strides=[2,1]",
        'auto_pad="SAME_UPPER", strides=[2,3]',
        'auto_pad="SAME_LOWER", strides=[1,2]',
        "group=4, dilations=[1,2]",
    ],
)
def test_convolutions(attributes):
    rng = np.random.default_rng(0)
    group = int(attributes[6]) if attributes.startswith("group") else 1
    w = rng.standard_normal((8, 4 // group, 3, 2)).astype(np.float32)
    model = parsed(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[2,4,9,11] x) => (float[n,8,h,w] y, float[a,b,c,d] z) {{
            y = Conv<{attributes}>(x, w, b)
            z = ConvTranspose<{attributes}>(y, w)
        }}""",
        w=w,
        b=rng.standard_normal(8).astype(np.float32),
    )
    beside_onnxruntime(model, x=rng.standard_normal((2, 4, 9, 11)).astype(np.float32))


@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape=[3,2], strides=[2,2], ceil_mode=1, pads=[1,0,1,1]",
        'kernel_shape=[2,3], strides=[2,3], auto_pad="SAME_LOWER"',
        "kernel_shape=[3,3], pads=[1,1,1,1]",
        "kernel_shape=[12,11], strides=[4,2]",  # larger than the image
    ],
)
@pytest.mark.parametrize("opset", [18, 19])
def test_pools(attributes, opset):
    model = parsed(f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[2,3,10,11] x) => (
            float[n,c,h,w] y, float[a,b,d,e] z, float[f,i,j,k] v, float[l,m,o,p] u
        ) {{
            u = LpPool<{attributes}, p=3>(x)
            y = MaxPool<{attributes}>(x)
            z = AveragePool<{attributes}, count_include_pad=1>(x)
            v = AveragePool<{attributes}>(x)
        }}""")
    x = np.random.default_rng(1).standard_normal((2, 3, 10, 11)).astype(np.float32)
    beside_onnxruntime(model, x=x)


@pytest.mark.parametrize("opset", [9, 13, 17])
def test_batch_normalization_with_a_momentum(opset):
    """Up to opset 13, ``onnx.reference`` takes it for training."""
    rng = np.random.default_rng(opset)
    values = {n: rng.uniform(0.5, 2, 3).astype(np.float32) for n in "sbmv"}
    model = parsed(
        f"""<ir_version: 7, opset_import: ["": {opset}]>
        g (float[2,3,5] x) => (float[2,3,5] y) {{
            y = BatchNormalization<momentum=0.9, epsilon=0.01>(x, s, b, m, v) }}""",
        **values,
    )
    beside_onnxruntime(model, x=rng.standard_normal((2, 3, 5)).astype(np.float32))


def test_operators_of_onnx_runtime():
    rng = np.random.default_rng(2)
    values = {n: rng.standard_normal(6).astype(np.float32) for n in ("gamma", "beta", "bias")}
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[2,5,6] x, float[2,5,6] skip) => (float[2,5,6] y, float[2,5,6] z) {
            n, mean, inverse, total = com.microsoft.SkipLayerNormalization(x, skip, gamma, beta)
            a = com.microsoft.BiasGelu(n, bias)
            b = com.microsoft.FastGelu(a)
            c = com.microsoft.QuickGelu(b)
            y = com.microsoft.Gelu(c)
            p = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(x, skip)
            z = com.microsoft.FusedMatMul<transA=1>(p, total)
        }""")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in values.items())
    feeds = {n: rng.standard_normal((2, 5, 6)).astype(np.float32) for n in ("x", "skip")}
    beside_onnxruntime(model, **feeds)


def test_tails_keep_their_digits():
    """1 + erf would cancel, and a logistic by 1 / (1 + exp(-x)) would overflow; the evaluator uses
    neither.
    """
    model = parsed("""<ir_version: 9, opset_import: ["": 20]>
        g (float[3] x) => (float[3] y, float[3] z) { y = Gelu(x) z = Sigmoid(x) }""")
    x = np.array([-4.7, -9.0, -60.0], np.float32)
    gelu, sigmoid = evaluated(model, {"x": x})
    # x Phi(x) and the logistic by mpmath, 50 digits
    np.testing.assert_allclose(gelu[:2], [-6.1138e-6, -1.01583e-18], rtol=1e-4)
    np.testing.assert_allclose(sigmoid, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-14)


def test_casts_between_floats_round_nothing_in_float64():
    model = parsed("""<ir_version: 9, opset_import: ["": 20]>
        g (float[64] x) => (float[64] y) {
            h = Cast<to=10>(x)
            r = Sqrt(h)
            y = Cast<to=1>(r)
        }""")
    x = np.random.default_rng(0).uniform(1, 2, 64).astype(np.float32)
    (y,) = evaluated(model, {"x": x})
    np.testing.assert_allclose(y, np.sqrt(x.astype(np.float64)), rtol=1e-15)


def test_operands_of_products_are_rounded_where_that_is_asked():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 8)).astype(np.float32)
    model = parsed(
        """<ir_version: 9, opset_import: ["": 20]>
        g (float[4,64] x) => (float[4,8] y) { y = MatMul(x, w) }""",
        w=w,
    )
    x = rng.standard_normal((4, 64)).astype(np.float32)
    (exact,) = evaluated(model, {"x": x})
    plain, fp16, bf16 = (
        evaluated(model, {"x": x}, Arithmetic(np.float32, OPERANDS[precision]))[0]
        for precision in ("fp32", "fp16", "bf16")
    )
    off = [np.abs(y - exact).max() for y in (plain, fp16, bf16)]
    assert plain.dtype == np.float32 and 0 < off[0] < 1e-5 < off[1] < 2e-2 < 5 * off[2]
    (large,) = evaluated(model, {"x": x * 1e6}, Arithmetic(np.float32, OPERANDS["fp16"]))
    assert np.isfinite(large).all()  # beyond its range fp16 is wrong, and no rounding excuses that


CHAIN = """<ir_version: 9, opset_import: ["": 20]>
    g (float[1000,1000] x) => (float[1000,1000] y) {{ {nodes} y = Neg(t{last}) }}"""


def test_memory_and_time_are_bounded():
    """A tensor is dropped after its last use: ten tensors of 8 MB never need 40."""
    nodes = " ".join(f"t{n} = Abs({f't{n - 1}' if n else 'x'})" for n in range(10))
    model = parsed(CHAIN.format(nodes=nodes, last=9))
    inputs = {"x": np.ones((1000, 1000), np.float32)}
    (y,) = Evaluator(model, Limits(60, 40_000_000)).run(inputs, EXACT)
    assert (y == -1).all()
    with pytest.raises(Unjudged, match=r"more than 0\.0093 GB of memory"):
        Evaluator(model, Limits(60, 10_000_000)).run(inputs, EXACT)
    with pytest.raises(Unjudged, match="more than 0 s"):
        Evaluator(model, Limits(0, 2**30)).run(inputs, EXACT)


def test_what_cannot_be_computed_is_named():
    def refused(text: str, **values: np.ndarray) -> str:
        model = onnx.parser.parse_model(text)
        with pytest.raises(Unjudged) as why:
            evaluated(model, {"x": np.ones((400, 400), np.float32)})
        return str(why.value)

    head = '<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1, "own": 1]>'
    io = "g (float[400,400] x) => (float[400,400] y)"
    assert "it has no own.Strange" in refused(f"{head} {io} {{ y = own.Strange(x) }}")
    assert "RandomNormalLike is random" in refused(f"{head} {io} {{ y = RandomNormalLike(x) }}")
    looped = refused(f"{head} {io} {{ y = Det(x) z = Neg(y) v = Unique(x) }}")
    assert "would loop over 160000 elements" in looped


def test_gathering_from_many_tokens():
    """As a detector takes the best of its tokens."""
    rng = np.random.default_rng(0)
    given = parsed(
        """<ir_version: 9, opset_import: ["": 17]>
        gather (float[2, 300, 4] x) => (float[2, 7, 3] y) {
            y = GatherElements <axis = 1> (x, places)
        }""",
        places=rng.integers(-300, 300, (2, 7, 3)),
    )
    beside_onnxruntime(given, x=rng.standard_normal((2, 300, 4), np.float32))


@pytest.mark.parametrize("outputs", [["y", "", "c"], ["y", "h", ""], ["y", ""]], ids=str)
def test_an_output_that_is_left_out_is_nobodys_input(outputs):
    """Both are written as "", and a bound that is left out is not the state before it."""
    helper, rng = onnx.helper, np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((1, 20, 3), np.float32),
        "r": rng.standard_normal((1, 20, 5), np.float32),
        "most": np.float32(0.1),
    }
    graph = helper.make_graph(
        [
            helper.make_node("LSTM", ["x", "w", "r"], outputs, hidden_size=5),
            helper.make_node("Clip", ["y", "", "most"], ["z"]),
        ],
        "test",
        [helper.make_tensor_value_info("x", 1, [4, 2, 3])],
        [helper.make_tensor_value_info("z", 1, [4, 1, 2, 5])],
        [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    beside_onnxruntime(model, x=rng.standard_normal((4, 2, 3), np.float32))
