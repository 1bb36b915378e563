"""Models of one node each. Their inputs and attributes are drawn at random and seldom fit the
operator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.defs
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from gtco.frontend.expansion import EXPANDED
from gtco.frontend.model_check import MICROSOFT, supported_operators

NAME = "spoilt"  # the name of the node
SHAPES = ((), (3,), (2, 3), (2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5))
TYPES = (
    *[TensorProto.FLOAT] * 3,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.BOOL,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.INT8,
    TensorProto.UINT8,
)
VALUES = {
    AttributeProto.INT: (-3, -1, 0, 1, 2, 7, 10**9),
    AttributeProto.FLOAT: (-1.0, 0.0, 0.5, math.nan, 1e30),
    AttributeProto.STRING: ("", "nonsense", "constant", "ij,jk->ik", "NOTSET"),
}
# Attributes of operators that have no schema in ONNX.
OTHERS = {
    **dict.fromkeys(("num_heads", "groups", "activation", "axis", "transA"), AttributeProto.INT),
    **dict.fromkeys(("channels_last", "opset", "K", "N", "bits", "block_size"), AttributeProto.INT),
    **dict.fromkeys(("epsilon", "alpha", "scale"), AttributeProto.FLOAT),
    **dict.fromkeys(
        ("axes", "kernel_shape", "strides", "pads", "qkv_hidden_sizes"), AttributeProto.INTS
    ),
}


def operators() -> list[tuple[str, str]]:
    """(domain, operator) of everything that the importer translates or writes out."""
    microsoft = {("com.microsoft", name) for name in MICROSOFT}
    return sorted({("", name) for name in supported_operators()} | microsoft | set(EXPANDED))


def draw(domain: str, operator: str, seed: int) -> onnx.ModelProto:
    rng = random.Random(f"{domain}.{operator}.{seed}")
    opset = rng.choice([o for o in (11, 13, 17, 20, 22, 24) if _has(domain, operator, o)] or [24])
    least, most, attributes, required, outputs = 1, 6, OTHERS, set[str](), rng.randint(1, 4)
    if _has(domain, operator, opset):
        schema = onnx.defs.get_schema(operator, opset, domain)
        least, most = schema.min_input, min(schema.max_input, max(schema.min_input, 5))
        attributes = {name: kind.type for name, kind in schema.attributes.items()}
        required = {name for name, kind in schema.attributes.items() if kind.required}
        outputs = rng.randint(max(1, schema.min_output), max(1, min(schema.max_output, 4)))
    shape, dtype = rng.choice(SHAPES), rng.choice(TYPES)
    names, inputs, constants = [], [], []
    for place in range(rng.randint(least, most)):
        shape = rng.choice(SHAPES) if rng.random() < 0.5 else shape
        dtype = rng.choice(TYPES) if rng.random() < 0.5 else dtype
        if rng.random() < 0.1:
            names.append("")
            continue
        names.append(f"i{place}")
        if place and rng.random() < 0.5:
            values = [rng.choice((-2, 0, 1, 2, 3, 5)) for _ in range(math.prod(shape))]
            array = np.array(values).reshape(shape)
            typed = array.astype(helper.tensor_dtype_to_np_dtype(dtype))
            constants.append(numpy_helper.from_array(typed, names[-1]))
        else:
            inputs.append(helper.make_tensor_value_info(names[-1], dtype, shape))
    node = helper.make_node(
        operator, names, [f"o{i}" for i in range(outputs)], name=NAME, domain=domain
    )
    for name, kind in attributes.items():
        if name in required or rng.random() < 0.4:
            node.attribute.extend(_attribute(rng, name, kind))
    given = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = helper.make_graph([node], "g", inputs, given, constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def _has(domain: str, operator: str, opset: int) -> bool:
    return bool(onnx.defs.has(operator, opset, domain))


def _attribute(rng: random.Random, name: str, kind: int) -> Iterator[onnx.AttributeProto]:
    """One value of this kind, or sometimes of another kind; none for kinds that hold graphs or
    types.
    """
    kind = rng.choice(list(VALUES)) if rng.random() < 0.05 else kind
    if kind in VALUES:
        yield helper.make_attribute(name, rng.choice(VALUES[kind]))
    elif kind == AttributeProto.INTS:
        yield helper.make_attribute(name, [rng.choice((-1, 0, 1, 2, 5))] * rng.randint(1, 4))
    elif kind == AttributeProto.FLOATS:
        yield helper.make_attribute(name, [rng.choice((-1.0, 0.5))] * rng.randint(1, 3))
    elif kind == AttributeProto.TENSOR:
        yield helper.make_attribute(name, helper.make_tensor("t", TensorProto.FLOAT, [2], [1, 2]))
