"""Small models compiled and run for one thread, and for many more threads than there are cores.
Kernels are cut for this number, and as many threads share the tasks.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import gtco
from tests.end_to_end.test_verify import BATCH, TOKENS, WIDTH, encoder

RNG = np.random.default_rng()


def convolutions() -> onnx.ModelProto:
    """Convolution, pooling, depthwise convolution and a mean, with sizes that no tile divides."""
    values = {
        "wide": RNG.standard_normal((10, 3, 3, 3)),
        "deep": RNG.standard_normal((10, 1, 3, 3)),
        "scale": RNG.standard_normal((13, 15)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "wide"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("Conv", ["c", "deep"], ["d"], pads=[1, 1, 1, 1], group=10),
        helper.make_node("Mul", ["d", "scale"], ["e"]),
        helper.make_node("Softmax", ["e"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "convolutions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 15, 17))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 10, 13, 15))],
        [numpy_helper.from_array(v.astype(np.float32) / 3, name) for name, v in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MODELS = {"encoder": encoder(mask=None), "convolutions": convolutions()}
SHAPES = {"encoder": (BATCH, TOKENS, WIDTH), "convolutions": (1, 3, 15, 17)}


@pytest.mark.parametrize("threads", [1, 3, 64, 192])
@pytest.mark.parametrize("name", MODELS)
def test_right_for_any_number_of_threads(name: str, threads: int) -> None:
    """Within 1e-4 of ONNX Runtime, and the same in every run, whichever thread takes which task."""
    model = MODELS[name]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with gtco.compile_model(model, threads=threads) as compiled:
        assert compiled.threads == threads
        for _ in range(3):
            x = RNG.standard_normal(SHAPES[name]).astype(np.float32)
            got = compiled(x)
            np.testing.assert_allclose(got, *session.run(None, {"x": x}), rtol=1e-4, atol=1e-4)
            for _ in range(5):
                np.testing.assert_array_equal(compiled(x), got)
