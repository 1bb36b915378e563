"""TIR kernels -> ELF objects, through TVM's LLVM backend."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import tvm
from tvm import tirx

from gtco.codegen import lookup, rolled, round_bfloat16, tiles
from gtco.machine.isa import X86_64, Isa
from gtco.machine.target import Target

# Kernels say themselves what is a vector, so LLVM's vectorizers are off. That of loops makes wrong
# code in LLVM 22 (TVM 0.27's): it takes a masked counter for one that never wraps, as in
# ``for i in range(16): y[i] = x[i & 3]``. That of scalars makes what SIGNS is about.
OPTIONS = ("-vectorize-loops=0", "-vectorize-slp=0")
# VMOVMSKPS, VMOVMSKPD and VPMOVMSKB. LLVM 22 folds AVX-512's instructions for the same into them,
# but also where the vector is in a register that they cannot name, so that they read another, and
# where the mask has a further reader (LLVM's pull requests 191760 and 198220). Code that has one is
# compiled again without AVX-512's vectors of less than 512 bits, of which they are made.
SIGNS = re.compile(
    rb"(\xc5|\xc4[\x01\x21\x41\x61\x81\xa1\xc1\xe1])[\x78-\x7f\xf8-\xff][\x50\xd7][\xc0-\xff]",
    re.DOTALL,
)
# Level 3 writes out loops of few iterations up to 300 instructions, level 2 up to 150. Kernels say
# themselves what has to be written out, and at level 2 they are as fast and a quarter smaller.
LEVEL = 2
NO_ALIAS = "tirx.noalias"  # the attribute of functions whose parameters do not share memory


def instruction_sets(description: Any, isa: Isa = X86_64) -> frozenset[str]:
    """What LLVM may use beyond the baseline of ``isa`` for TVM's ``description`` of a target."""
    known = tvm.get_global_func("target.llvm_get_cpu_features")(description)
    return isa.instruction_sets(map(str, known))


@cache
def llvm_target(target: Target) -> Any:
    """TVM's description of the target.

    ``mcpu`` stays, since LLVM schedules by it; of the instruction sets that it implies, those that
    an artifact does not ask for at open are taken away, or the code could die of SIGILL where the
    artifact opens. 512-bit vectors are asked for: LLVM prefers 256 bits on some x86-64 CPUs.
    """
    isa = target.isa
    fields = {
        "kind": "llvm",
        "mcpu": target.mcpu,
        "num-cores": target.cores,
        "cl-opt": list(OPTIONS),
        "opt-level": LEVEL,
    }
    if isa.triple:
        fields["mtriple"] = isa.triple
    unasked = instruction_sets(tvm.target.Target(fields), isa) - set(target.instruction_sets)
    width = ["-prefer-256-bit" if target.lanes == 16 else "+prefer-256-bit"]
    fields["mattr"] = [
        *(f"-{name}" for name in sorted(unasked)),
        *(f"+{name}" for name in target.instruction_sets),
        *(width if isa is X86_64 else ()),
    ]
    return tvm.target.Target(fields)


def alike(functions: Sequence[Any]) -> Sequence[Any]:
    """The functions, all with ``tirx.noalias`` or none with it. TVM 0.27 gives every function of a
    module what the last one says, and a function whose buffers share memory computes wrong values
    with it.
    """
    if len({has_no_alias(f) for f in functions}) < 2:
        return functions
    return [f.without_attr(NO_ALIAS) if has_no_alias(f) else f for f in functions]


def has_no_alias(function: Any) -> bool:
    """True if no two parameters of the function share memory, by its attribute."""
    return bool(function.attrs.get(NO_ALIAS))


def lower(functions: Sequence[Any], target: Target) -> Any:
    """The kernels lowered to what LLVM's code generator takes: flat buffers, vectors, no packed
    calling convention.
    """
    if round_bfloat16.has_instruction(llvm_target(target)):
        functions = [round_bfloat16.with_instruction(f) for f in functions]
    if lookup.has_instruction(llvm_target(target)):
        functions = [lookup.bound(f) for f in functions]
    functions = [rolled.bound(tiles.bound(f, target)) for f in functions]
    module = tvm.IRModule({f.attrs["global_symbol"]: f for f in alike(functions)})
    passes = [
        tirx.transform.BindTarget(llvm_target(target)),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
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
    code = _object(functions, target)
    wide = without_narrow_vectors(target)
    return _object(functions, wide) if wide != target and SIGNS.search(code) else code


def without_narrow_vectors(target: Target) -> Target:
    """The target, with AVX-512's vectors of 512 bits alone if it has AVX-512."""
    kept = tuple(name for name in target.features if name != round_bfloat16.NARROW)
    return replace(target, features=kept)


def _object(functions: Sequence[Any], target: Target) -> bytes:
    # A file in memory: a worker may be killed at any time and must leave nothing behind.
    with os.fdopen(os.memfd_create("kernels.o"), "rb") as file:
        path = f"/proc/self/fd/{file.fileno()}"
        compile_functions(functions, target).write_to_file(path, "o")
        return file.read()
