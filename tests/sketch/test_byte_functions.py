"""Functions of a byte in every kind of stage that can have them, against the reference: looked up
in a table where vectors of bytes can be (AVX512-VBMI), byte by byte elsewhere.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from gtco.codegen.llvm import compile_functions
from gtco.tensor import space
from gtco.tensor.sketch import sketches
from gtco.tensor.space import Program
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    some_kernels_of,
)

MACHINES = ("x86-64-v3", "x86-64-v4", "icelake-server", "znver4")
CONSTANTS = {"s": 0.037, "z": 100.0, "h": 21.0, "l": 1e-6, "u": 7.0}
CHAINS = {
    "none": (),
    "gelu": (("gelu", (), ()),),
    "a fourth, and clip": (
        ("multiply", (), (0.25,)),
        ("leaky_relu", (("alpha", 0.1),), ()),
        ("clip", (("max", 0.8), ("min", -0.5)), ()),
    ),
}


def function(source: str, output: str, shape: tuple[int, ...], chain: str, dtype: str) -> Operator:
    low = 0.0 if dtype == "uint8" else -128.0
    return Operator(
        "byte_function",
        (source, *CONSTANTS),
        output,
        TensorType(shape, dtype),
        make_attrs(functions=CHAINS[chain], min=low, max=low + 255),
    )


def staged(operators: list[Operator], **given: TensorType) -> Stage:
    types = {name: TensorType(()) for name in CONSTANTS} | given
    return make_stage(operators, types, [])


def check(stage: Stage, name: str) -> None:
    machine = runnable(name)
    inputs = random_inputs(stage, fresh_seed())
    for position, tensor in enumerate(i.name for i in stage.inputs):
        if tensor in CONSTANTS:
            inputs[position] = np.array(CONSTANTS[tensor], np.float32)
    wanted = reference(stage, inputs).astype(int)
    found = sketches(stage, machine)
    assert found
    for _, built in some_kernels_of(found, machine):
        away = np.abs(built(*inputs, unaligned=True).astype(int) - wanted)
        # a step where a value lies in the middle of two, which is at most some bytes of 256
        assert away.max() <= 1 and (away > 0).mean() < 0.03


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtypes", [("uint8", "uint8"), ("int8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("shape", [(3, 37), (64, 128), (5, 7, 3)])
def test_alone(name: str, chain: str, dtypes: tuple[str, str], shape: tuple[int, ...]) -> None:
    given, made = dtypes
    check(staged([function("q", "y", shape, chain, made)], q=TensorType(shape, given)), name)


@pytest.mark.parametrize("name", MACHINES)
def test_behind_a_permutation(name: str) -> None:
    moved = Operator(
        "permute", ("q",), "p", TensorType((3, 41, 35), "uint8"), make_attrs(axes=(1, 0, 2))
    )
    operators = [moved, function("p", "y", (3, 41, 35), "gelu", "uint8")]
    check(staged(operators, q=TensorType((41, 3, 35), "uint8")), name)


@pytest.mark.parametrize("name", MACHINES)
def test_behind_a_product(name: str) -> None:
    shape = (45, 72)
    operators = [
        Operator("matmul", ("a", "b"), "p", TensorType(shape)),
        Operator(
            "quantize",
            ("p", "h", "l", "z"),
            "q",
            TensorType(shape, "uint8"),
            make_attrs(min=0.0, max=255.0),
        ),
        function("q", "y", shape, "gelu", "uint8"),
    ]
    check(staged(operators, a=TensorType((45, 24)), b=TensorType((24, 72))), name)


@pytest.mark.parametrize("name", ["icelake-server", "znver4"])
def test_a_vector_is_looked_up_by_one_instruction_for_128_bytes(name: str) -> None:
    machine = runnable(name)
    operators = [function("q", "y", (4096,), "gelu", "uint8")]
    sketch = sketches(staged(operators, q=TensorType((4096,), "uint8")), machine)[0]
    program = space.build(sketch, first_config(sketch), "k")
    assert isinstance(program, Program)
    text = compile_functions([program.function], machine).inspect_source("asm")
    assert re.search(r"\tvperm[it]2b", text)
