"""TIR kernels -> ELF objects, through TVM's LLVM backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx

from gtco.target import Target

# LLVM 22 (TVM 0.27's) vectorizes loops that index by ``i & mask`` wrongly: it takes the masked
# counter for one that never wraps, as in ``for i in range(16): y[i] = x[i & 3]``. Kernels say
# themselves which loops are vectors, so its loop vectorizer is off.
OPTIONS = ("-vectorize-loops=0",)


def llvm_target(target: Target) -> Any:
    """TVM's description of the target. 512-bit vectors are asked for: LLVM prefers 256 bits on some
    CPUs.
    """
    attrs = (
        [f"+{name}" for name in ("prefer-256-bit",)] if target.lanes < 16 else ["-prefer-256-bit"]
    )
    return tvm.target.Target(
        {
            "kind": "llvm",
            "mcpu": target.mcpu,
            "mattr": attrs,
            "num-cores": target.cores,
            "cl-opt": list(OPTIONS),
        }
    )


def lower(functions: Sequence[Any], target: Target) -> Any:
    """The kernels lowered to what LLVM's code generator takes: flat buffers, vectors, no packed
    calling convention.
    """
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
