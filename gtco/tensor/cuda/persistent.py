"""One kernel for a whole model: the functions of its stages, and the walk through its steps
(device/gtco/persistent.cuh), in one translation unit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gtco.tensor.cuda.arguments import ACTIVATION
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.cuda.source import BLOCK, BOUNDS, launch_bounds

MOST_POINTERS, MOST_TENSORS = 24, 64  # device/gtco/persistent_tables.cuh
RESERVED = 256  # bytes of shared memory ahead of the stages': GTCO_RESERVED of device.cuh
_KERNEL = re.compile(
    rf'extern "C" __global__ void {BOUNDS} (?P<symbol>\w+)\(\n'
    r"(?P<parameters>.*?)\) \{\n"
    rf"  {re.escape(BLOCK)}\n",
    re.DOTALL,
)
_PARAMETER = re.compile(
    rf"^ *((?:const )?\w+)\* (?:(?:__restrict__|{ACTIVATION}) )?\w+,?$", re.MULTILINE
)
_INCLUDE = re.compile(r'^#include "gtco/.*"\n', re.MULTILINE)


def persistent_program(symbol: str, kernels: Mapping[str, CudaProgram]) -> CudaProgram:
    """The kernel that does all steps of a model. ``kernels`` are the model's kernels, by symbol; a
    step's ``kernel`` is its number among them.

    The text of each kernel becomes a function of its block's number, otherwise unchanged. It is
    compiled once more, with other barriers (``GTCO_PERSISTENT`` in device.cuh). A block has as many
    threads and as much shared memory as the stage with the most.
    """
    includes: dict[str, None] = {}
    functions: list[str] = []
    cases: list[str] = []
    for number, (name, program) in enumerate(kernels.items()):
        includes |= dict.fromkeys(_INCLUDE.findall(program.source))
        functions.append(_function(name, program))
        run = f"[](int block) {{ {name}_block(block); }}"
        cases.append(
            f"      case {number}: return gtco::each_block<{program.threads}>(blocks, {run});"
        )
    threads = max(-(-program.threads // 32) * 32 for program in kernels.values())
    source = "\n".join(
        [
            "#define GTCO_PERSISTENT",
            "".join([*includes, '#include "gtco/persistent.cuh"\n']),
            *functions,
            f'extern "C" __global__ void {launch_bounds(threads, 1)} {symbol}(',
            "    const gtco::Step* steps, int count, const gtco::Pointer* pointers,",
            "    const __grid_constant__ gtco::Tensors tensors, gtco::Barrier* barrier) {",
            "  const auto kernels = [](int kernel, int blocks) {",
            "    switch (kernel) {",
            *cases,
            "    }",
            "  };",
            "  gtco::walk(steps, count, pointers, tensors, barrier, kernels);",
            "}",
            "",
        ]
    )
    shared = RESERVED + max(program.shared for program in kernels.values())
    return CudaProgram(source, (1, 1, 1), threads, shared)


def _function(symbol: str, program: CudaProgram) -> str:
    """The kernel as a function of its block's number, and one that finds its buffers itself.

    The second one is called for each block. With the loop over blocks in it, the values that are
    the same for all blocks would take registers: if the stages are not functions, ViT-Ti's kernel
    for sm_80 takes 239 instead of 138. A stage whose warp groups multiply is not a function,
    because ptxas would put barriers between the products behind a call.
    """
    found = _KERNEL.search(program.source)
    assert found and found["symbol"] == symbol, "tensor/cuda/source.py prints kernels like this"
    types = _PARAMETER.findall(found["parameters"])
    assert len(types) == found["parameters"].count("\n") + 1
    text = _INCLUDE.sub("", program.source).lstrip("\n")
    head = f"__device__ __forceinline__ void {symbol}(\n    const int block,\n"
    text = text.replace(found[0], f"{head}{found['parameters']}) {{\n")
    inlined = "__forceinline__" if "gtco::WarpGroups" in program.source else "__noinline__"
    buffers = ", ".join(f"gtco::buffer<{kind}>({n})" for n, kind in enumerate(types))
    return "\n".join(
        [
            text.rstrip("\n"),
            f"static __device__ {inlined} void {symbol}_block(int block) {{",
            f"  {symbol}(block, {buffers});",
            "}",
            "",
        ]
    )
