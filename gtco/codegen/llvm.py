"""TIR kernels -> ELF objects, through TVM's LLVM backend."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import tvm
from tvm import tirx

from gtco.codegen import round_bfloat16, tiles
from gtco.machine.target import Target

# LLVM 22 (TVM 0.27's) vectorizes loops that index by ``i & mask`` wrongly: it takes the masked
# counter for one that never wraps, as in ``for i in range(16): y[i] = x[i & 3]``. Kernels say
# themselves which loops are vectors, so its loop vectorizer is off.
OPTIONS = ("-vectorize-loops=0",)


# What every x86-64 CPU has, and what LLVM lists beside instruction sets: how a CPU likes its code.
BASELINE = frozenset("64bit 64bit-mode cmov cx8 fxsr mmx nopl sse sse2 x87".split())
TUNING = re.compile(
    "(allow|false-deps|fast|faster|no-bypass-delay|prefer|slow|tuning)-.*"
    "|branchfusion|ermsb|fsrm|idivq-to-divl|macrofusion|sbb-dep-breaking|vzeroupper"
)


def instruction_sets(description: Any) -> frozenset[str]:
    """What LLVM may use beyond plain x86-64 for TVM's ``description`` of a target. A name that
    neither table above knows counts as an instruction set.
    """
    known = tvm.get_global_func("target.llvm_get_cpu_features")(description)
    return frozenset(str(n) for n in known if n not in BASELINE and not TUNING.fullmatch(str(n)))


@cache
def llvm_target(target: Target) -> Any:
    """TVM's description of the target.

    ``mcpu`` stays, since LLVM schedules by it; of the instruction sets that it implies, those that
    an artifact does not ask for at open are taken away, or the code could die of SIGILL where the
    artifact opens. 512-bit vectors are asked for: LLVM prefers 256 bits on some CPUs.
    """
    fields = {
        "kind": "llvm",
        "mcpu": target.mcpu,
        "num-cores": target.cores,
        "cl-opt": list(OPTIONS),
    }
    unasked = instruction_sets(tvm.target.Target(fields)) - set(target.instruction_sets)
    fields["mattr"] = [
        *(f"-{name}" for name in sorted(unasked)),
        *(f"+{name}" for name in target.instruction_sets),
        "-prefer-256-bit" if target.lanes == 16 else "+prefer-256-bit",
    ]
    return tvm.target.Target(fields)


def lower(functions: Sequence[Any], target: Target) -> Any:
    """The kernels lowered to what LLVM's code generator takes: flat buffers, vectors, no packed
    calling convention.
    """
    if round_bfloat16.INSTRUCTION in target.features:
        functions = [round_bfloat16.with_instruction(f) for f in functions]
    functions = [tiles.bound(f, target) for f in functions]
    module = tvm.IRModule({f.attrs["global_symbol"]: f for f in functions})
    passes = [
        tirx.transform.BindTarget(llvm_target(target)),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        tirx.transform.RemoveNoOp(),
        tirx.transform.BF16ComputeLegalize(),  # LLVM's code generator dies of bfloat16
        tirx.transform.BF16StorageLegalize(),
        tirx.transform.LowerIntrin(),
    ]
    with llvm_target(target):
        return tvm.ir.transform.Sequential(passes)(module)


def compile_functions(functions: Sequence[Any], target: Target) -> Any:
    """A TVM runtime module whose ``write_to_file`` and ``inspect_source`` give the object, LLVM IR
    and assembly.
    """
    return tvm.get_global_func("target.build.llvm")(lower(functions, target), llvm_target(target))


def object_code(functions: Sequence[Any], target: Target) -> bytes:
    """An ELF object that holds the kernels as plain C functions named by their symbols."""
    # A file in memory: a worker may be killed at any time and must leave nothing behind.
    with os.fdopen(os.memfd_create("kernels.o"), "rb") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        compile_functions(functions, target).write_to_file(path, "o")
        return file.read()
