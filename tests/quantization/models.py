"""Small models without training, and ONNX Runtime in place of gtco's compiler: as exact, and sooner
ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from gtco.frontend.onnx import OnnxSource
from gtco.frontend.weights import whole
from gtco.quantization.quantize import quantize_model
from gtco.quantization.report import QuantizedModel
from gtco.support.options import Quantization

# Two blocks around attention, between a patch embedding and a classifier. One tensor has three
# readers, one product's weights come through Transpose, and two products share theirs.
BLOCK = """<ir_version: 9, opset_import: ["" : 17]>
block (float[N,3,8,8] image) => (float[N,10] logits)
<int64[3] flat = {0, 16, -1}> {
    p = Conv <strides = [4, 4], kernel_shape = [4, 4]> (image, stem_weight, stem_bias)
    f = Reshape(p, tokens)
    x = Transpose <perm = [0, 2, 1]> (f)
    n = LayerNormalization <axis = -1> (x, gain, shift)
    q = MatMul(n, wq)
    k = MatMul(n, wk)
    v = MatMul(n, wv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul(q, kt)
    a = Softmax(s)
    c = MatMul(a, v)
    wt = Transpose <perm = [1, 0]> (wo)
    o = MatMul(c, wt)
    r = Add(x, o)
    h = MatMul(r, w1)
    hb = Add(h, b1)
    g = Relu(hb)
    m = MatMul(g, w2)
    y = Add(r, m)
    m2 = MatMul(y, w1)
    g2 = Relu(m2)
    m3 = MatMul(g2, w2)
    y2 = Add(y, m3)
    z = ReduceMean <axes = [1], keepdims = 0> (y2)
    logits = Gemm <transB = 1> (z, head_weight, head_bias)
}"""
SIZES = {
    "stem_weight": (24, 3, 4, 4),
    "stem_bias": (24,),
    "gain": (24,),
    "shift": (24,),
    "wq": (24, 24),
    "wk": (24, 24),
    "wv": (24, 24),
    "wo": (24, 24),
    "w1": (24, 40),
    "b1": (40,),
    "w2": (40, 24),
    "head_weight": (10, 24),
    "head_bias": (10,),
}


def block(outlier: float = 1.0) -> onnx.ModelProto:
    """``BLOCK`` with drawn weights. ``outlier``: by what one channel behind the norm is larger."""
    rng = np.random.default_rng(5)
    text = BLOCK.replace("int64[3] flat = {0, 16, -1}", "int64[3] tokens = {0, 24, 4}")
    model = onnx.parser.parse_model(text)
    for name, shape in SIZES.items():
        value = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        if name == "gain":
            value = np.ones(shape, np.float32)
            value[7] = outlier
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for node in model.graph.node:
        node.name = f"/{node.output[0]}/{node.op_type}"
    return model


def images(count: int = 48, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 3, 8, 8)).astype(np.float32)


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by ONNX Runtime, without its own rewrites."""
    return Evaluated(model).run(feeds)


@dataclass(frozen=True)
class Evaluated:
    model: onnx.ModelProto

    def __post_init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        made = onnx.shape_inference.infer_shapes(self.model)
        for value in made.graph.output:  # ONNX Runtime wants types of outputs, not shapes
            value.type.tensor_type.ClearField("shape")
        session = onnxruntime.InferenceSession(
            made.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        object.__setattr__(self, "session", session)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [value.name for value in self.model.graph.output]
        return dict(zip(names, self.session.run(names, dict(feeds)), strict=True))  # type: ignore[attr-defined]


@contextmanager
def evaluator(
    model: OnnxSource, shapes: Mapping[str, tuple[int, ...]], say: Callable[[str], None]
) -> Iterator[Evaluated]:
    """What quantizing takes for a compiler."""
    say("evaluated")
    yield Evaluated(whole(model.skeleton, model.weights))


def quantized(model: Any, data: Any, inputs: Any = None, **settings: Any) -> QuantizedModel:
    """``gtco.quantize`` by ONNX Runtime."""
    chosen = Quantization(**settings)
    return quantize_model(model, data, chosen, evaluator, lambda *_: None, inputs)
