"""A library never dies of an illegal instruction. An artifact asks the CPU at open for everything
that LLVM may use for its target, and the emitted code is compared with that list.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gtco.codegen.llvm import (
    _object,
    instruction_sets,
    llvm_target,
    object_code,
    without_narrow_vectors,
)
from gtco.machine.target import TARGETS, TILES, detect
from gtco.runtime.writing.table import normalize_features
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.sketch import RULES, family, sketches
from gtco.tensor.space import Program, Sketch, build, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.instructions import instructions, outside, undefined
from tests.sketch.test_depthwise import conv as depthwise
from tests.sketch.test_pool import pooling
from tests.sketch.test_resize import resizing

T = TensorType
UNIT = {"ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"}
MACHINES = {**TARGETS, "native": detect()}


def chain(types: dict[str, TensorType], *rows: tuple[str, str, str, TensorType, Any]) -> Stage:
    """A stage of operators given as (kind, inputs, output, type, attributes)."""
    operators = [Operator(k, tuple(i.split()), o, t, make_attrs(**a)) for k, i, o, t, a in rows]
    known = {**types, **{o.output: o.type for o in operators}}
    return make_stage(operators, known, [n for n in types if n.startswith("w")])


def single(kind: str, *types: TensorType, out: TensorType, **attrs: Any) -> Stage:
    named = {f"x{i}": t for i, t in enumerate(types)}
    return chain(named, (kind, " ".join(named), "y", out, attrs))


def every_stage() -> list[Stage]:
    """One or more stages for every sketch rule. For the fallback, operators for which newer
    instruction sets have instructions: half floats, bytes, 64-bit products, shifts, conversions,
    gathers.
    """
    x, h, d = T((6, 40)), T((6, 40), "float16"), T((6, 40), "float64")
    i8, i16, i64, u8 = (T((6, 40), n) for n in ("int8", "int16", "int64", "uint8"))
    heads = T((1, 2, 17, 16))
    dense = {"x": T((1, 29, 24)), "w": T((24, 72)), "w2": T((72,))}
    image, weight = T((1, 8, 9, 16)), T((40, 16, 3, 3))
    attrs = {"strides": (1, 1), "dilation": (1, 1), "layout": "NHWC"}
    tile, around = T((1, 29, 72)), (1, 1, 1, 1)
    one, types = depthwise(40, (9, 11))
    stages = [
        chain(
            dense,
            ("matmul", "x w", "c", tile, {}),
            ("add", "c w2", "b", tile, {}),
            ("gelu", "b", "y", tile, {}),
        ),
        single("matmul", T((7, 33)), T((33, 5)), out=T((7, 5))),
        single("matmul", T((7, 33), "bfloat16"), T((33, 35), "bfloat16"), out=T((7, 35))),
        chain(
            {"x": T((29, 24), "bfloat16"), "w": T((24, 72), "bfloat16")},
            ("matmul", "x w", "c", T((29, 72)), {}),
            ("cast", "c", "y", T((29, 72), "bfloat16"), {}),
        ),
        chain(
            {"x": T((29, 23), "uint8"), "w": T((23, 72), "int8"), "w2": T((72,), "int32")},
            ("matmul", "x w", "c", T((29, 72), "int32"), {}),
            ("add", "c w2", "d", T((29, 72), "int32"), {}),
            ("cast", "d", "f", T((29, 72)), {}),
            ("round", "f", "r", T((29, 72)), {}),
            ("cast", "r", "y", T((29, 72), "uint8"), {}),
        ),
        single("matmul", x, T((40, 1)), out=T((6, 1))),
        chain(
            {"x": T((1, 257, 256)), "w": T((256, 192))},
            ("matmul", "x w", "y", T((1, 257, 192)), {}),
        ),
        single(
            "conv2d",
            image,
            T((40, 8, 3, 3)),
            out=T((1, 8, 9, 40)),
            padding=around,
            groups=2,
            **attrs,
        ),
        single("conv2d", image, weight, out=T((1, 8, 9, 40)), padding=around, groups=1, **attrs),
        chain(
            {"x": image, "w": weight},
            ("conv2d", "x w", "y", T((1, 8, 9, 40)), dict(padding=around, groups=1, **attrs)),
        ),
        single("attention", heads, heads, heads, T((17, 17)), out=heads, scale=0.25),
        single("attention", *[T(heads.shape, "bfloat16")] * 3, out=heads, scale=0.25),
        make_stage([one], {**types, "c": one.type}, []),
        single("layer_norm", x, T((40,)), T((40,)), out=x, epsilon=1e-5),
        chain(  # across rows, whose elements are not neighbours
            {"x": T((1, 24, 70)), "w": T((24,)), "w2": T((24,))},
            ("permute", "x", "p", T((1, 70, 24)), {"axes": (0, 2, 1)}),
            ("layer_norm", "p w w2", "n", T((1, 70, 24)), {"epsilon": 1e-5}),
            ("permute", "n", "y", T((1, 24, 70)), {"axes": (0, 2, 1)}),
        ),
        single("softmax", x, out=x, axis=1),
        single("cumsum", x, out=x, axis=1, exclusive=False, reverse=False),
        single("cumsum", x, out=x, axis=0, exclusive=True, reverse=True),
        single("moments", T((1, 5, 49, 100)), out=T((1, 5, 2, 100))),
        single("merged_moments", T((1, 7, 2, 70)), out=T((1, 2, 70)), groups=7, epsilon=1e-5),
        single("topk", x, out=T((6, 3), "int64"), k=3, largest=1),
        single("topk", T((6, 900)), out=T((6, 900), "int64"), k=900, largest=0),
        single("scatter", x, T((5,), "uint8"), T((5, 40)), out=x, rows=6, reduction="add"),
        single("scatter", x, T((5,), "int64"), T((5, 40)), out=x, rows=6, reduction="update"),
        pooling("max_pool2d", 40, (9, 9), (3, 3), (2, 2), around),
        pooling("avg_pool2d", 40, (9, 9), (3, 3), (2, 2), around),
        resizing((5, 7), (10, 14)),
        *(
            single(
                "grid_sample",
                T((2, 5, 7, 40)),
                T((2, 4, 6, 2)),
                out=T((2, 4, 6, 40)),
                method=method,
                padding="zeros",
                align_corners=False,
                layout="NHWC",
            )
            for method in ("nearest", "linear")
        ),
        resizing((5, 7), (10, 14), "nearest", layout="NCHW"),
        chain(
            {"x": x, "s": T((40,))},
            ("add", "x s", "a", x, {}),
            ("permute", "a", "y", T((40, 6)), {"axes": (1, 0)}),
        ),
    ]
    for kind in ("silu", "erf", "exp", "log", "round"):
        stages.append(single(kind, x, out=x))
    for narrow in (i8, u8, h, d, i64):
        stages += [
            single("multiply", narrow, narrow, out=narrow),
            single("cast", narrow, out=x),
            single("cast", x, out=narrow),
            single("matmul", narrow, T((40, 9), narrow.dtype), out=T((6, 9), narrow.dtype)),
            single("gather", narrow, T((5,), "int64"), out=T((6, 5), narrow.dtype), axis=1),
        ]
    for whole in (i8, i16, i64):
        for kind in ("right_shift", "floor_divide"):
            stages.append(single(kind, whole, whole, out=whole))
    return stages


def builds(sketch: Sketch, prefix: str, last: bool = True) -> list[Any]:
    """The functions of the sketch's first config and of its last, and of the first of every kind of
    micro-kernel.
    """
    every = list(configs(sketch))
    kinds = {str(c.by_name.get("tile")).rpartition(":")[0]: c for c in reversed(every)}
    chosen = dict.fromkeys((every[0], *every[-1:] * last, *kinds.values()))
    programs = [build(sketch, config, f"{prefix}_{n}") for n, config in enumerate(chosen)]
    return [program.function for program in programs if isinstance(program, Program)]


@pytest.mark.parametrize("name", MACHINES)
def test_llvm_may_use_what_is_checked_at_open(name: str) -> None:
    machine = MACHINES[name]
    assert instruction_sets(llvm_target(machine)) == set(machine.features)
    assert set(normalize_features(machine.features)) == set(machine.features)


# One machine of each set of instructions; the test above holds every machine to its own set.
OF_A_SET = {frozenset(MACHINES[name].features): name for name in reversed(MACHINES)}
# Sets that others extend. In the larger ones the fallback's loops are the same but for a few
# instructions, and take half of the time.
PLAIN = {"x86-64-v3", "x86-64-v4"}


@pytest.mark.parametrize("name", sorted(OF_A_SET.values()))
def test_every_instruction_is_of_the_list(name: str) -> None:
    machine = MACHINES[name]
    functions: list[Any] = []
    families = set()
    for number, stage in enumerate(every_stage()):
        for sketch in sketches(stage, machine):
            if sketch.name == "fallback" and name not in PLAIN:
                continue
            made = builds(sketch, f"k{number}_{sketch.name}", name in PLAIN)
            families |= {sketch.name} if made else set()
            functions += made
    wanted = {family(rule) for rule in RULES} - (set() if name in PLAIN else {"fallback"})
    lacking = wanted - families
    assert not lacking, f"no stage of every_stage() is for {lacking}: add one for a new rule"
    lines = instructions(object_code(functions, machine))
    assert len(lines) > 1000
    assert not (wrong := outside(lines, machine.features)), "\n".join(wrong)
    wide = {line for line in lines if "%zmm" in line and line.startswith("vfm")}
    assert bool(wide) == (machine.lanes == 16)


@pytest.mark.parametrize("name", ["x86-64-v4", "sapphirerapids"])
def test_every_kernel_is_code_without_narrow_vectors_too(name: str) -> None:
    """It is what a kernel becomes whose code LLVM 22 may make wrong. It calls nothing that other
    code would not.
    """
    machine = MACHINES[name]
    without = without_narrow_vectors(machine)
    assert without != machine
    for number, stage in enumerate(every_stage()):
        for sketch in sketches(stage, machine):
            if sketch.name == "fallback":
                continue
            made = builds(sketch, f"k{number}_{sketch.name}", False)
            names, wide = (undefined(_object(made, m)) for m in (machine, without))
            assert wide <= names, (stage.label, sketch.name)


def test_products_stay_in_whole_vectors() -> None:
    """LLVM prefers 256 bits on these CPUs, but a kernel of 16 lanes must multiply in zmm."""
    x = T((64, 64))
    servers = ("sapphirerapids", "emeraldrapids", "graniterapids")
    for name in ("x86-64-v4", "skylake-avx512", "icelake-server", *servers):
        sketch = sketches(single("matmul", x, x, out=x), TARGETS[name])[0]
        lines = instructions(object_code(builds(sketch, "product"), TARGETS[name]))
        products = [line for line in lines if line.startswith("vfmadd")]
        assert products and all("%zmm" in line for line in products), name


@pytest.mark.parametrize("name", MACHINES)
def test_pairs_are_multiplied_where_the_machine_can(name: str) -> None:
    """Kernels have VDPBF16PS if their target asks for it at open, and no others do. The same holds
    for VCVTNEPS2BF16 if the result is rounded.
    """
    machine = MACHINES[name]
    x, wide = T((64, 64), "bfloat16"), T((64, 64))
    stages = {
        "vdpbf16ps": single("matmul", x, x, out=wide),
        "vcvtneps2bf16": single("cast", wide, out=x),
    }
    for instruction, stage in stages.items():
        kernels = builds(sketches(stage, machine)[0], "kernel")
        found = any(instruction in line for line in instructions(object_code(kernels, machine)))
        assert found == ("avx512bf16" in machine.features), instruction


@pytest.mark.parametrize("name", MACHINES)
def test_bytes_are_multiplied_where_the_machine_can(name: str) -> None:
    """Kernels have VPDPBUSD in the machine's whole vectors if their target asks for it at open, and
    no others do.
    """
    machine = MACHINES[name]
    types = {"x": T((64, 64), "uint8"), "w": T((64, 64), "int8")}
    stage = chain(types, ("matmul", "x w", "y", T((64, 64), "int32"), {}))
    lines = instructions(object_code(builds(sketches(stage, machine)[0], "kernel"), machine))
    used = [line for line in lines if "vpdpbusd" in line]
    assert bool(used) == bool({"avx512vnni", "avxvnni"} & {*machine.features})
    register = "%zmm" if machine.lanes == 16 else "%ymm"
    assert all(register in line for line in used)


@pytest.mark.parametrize("name", MACHINES)
def test_tiles_are_multiplied_where_the_machine_can(name: str) -> None:
    """Kernels have the instructions of the tile unit if their target has one, and no others do."""
    machine = MACHINES[name]
    x, w = T((40, 64), "bfloat16"), T((64, 40), "bfloat16")
    kernels = builds(sketches(single("matmul", x, w, out=T((40, 40))), machine)[0], "kernel")
    lines = instructions(object_code(kernels, machine))
    used = {line.split()[0] for line in lines} & UNIT
    assert used == (UNIT if {*TILES} <= {*machine.features} else set())


SAMPLES = {
    "sse3": "haddps %xmm1,%xmm0",
    "ssse3": "pshufb %xmm1,%xmm0",
    "sse4.1": "pmulld %xmm1,%xmm0",
    "sse4.2": "pcmpgtq %xmm1,%xmm0",
    "popcnt": "popcnt %rax,%rbx",
    "avx": "vaddps %ymm1,%ymm2,%ymm3",
    "avx2": "vpaddd %ymm1,%ymm2,%ymm3",
    "fma": "vfmadd231ps %ymm1,%ymm2,%ymm3",
    "f16c": "vcvtph2ps %xmm1,%ymm2",
    "bmi": "andn %rax,%rbx,%rcx",
    "bmi2": "shlx %rax,%rbx,%rcx",
    "lzcnt": "lzcnt %rax,%rbx",
    "movbe": "movbe (%rax),%rbx",
    "avx512f": "vaddps %zmm1,%zmm2,%zmm3",
    "avx512bw": "vpaddb %zmm1,%zmm2,%zmm3",
    "avx512cd": "vplzcntd %zmm1,%zmm2",
    "avx512dq": "vpmullq %zmm1,%zmm2,%zmm3",
    "avx512vl": "vaddps %ymm17,%ymm2,%ymm3",
    "avx512vnni": "vpdpbusd %zmm1,%zmm2,%zmm3",
    "avx512bf16": "vdpbf16ps %zmm1,%zmm2,%zmm3",
    "avx512vbmi": "vpermb %zmm1,%zmm2,%zmm3",
    "avx512vbmi2": "vpshldvd %zmm1,%zmm2,%zmm3",
    "avx512ifma": "vpmadd52luq %zmm1,%zmm2,%zmm3",
    "avx512bitalg": "vpopcntb %zmm1,%zmm2",
    "avx512vpopcntdq": "vpopcntd %zmm1,%zmm2",
    "avx512fp16": "vaddph %zmm1,%zmm2,%zmm3",
    "amx-tile": "tileloadd (%rax,%rcx,1),%tmm0",
    "amx-bf16": "tdpbf16ps %tmm1,%tmm2,%tmm3",
    "amx-int8": "tdpbssd %tmm1,%tmm2,%tmm3",
    "gfni": "vgf2p8mulb %ymm1,%ymm2,%ymm3",
    "avxvnni": "{vex} vpdpbusd %ymm1,%ymm2,%ymm3",
    "prfchw": "prefetchw (%rax)",
    "sha": "sha1nexte %xmm1,%xmm0",
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_check_sees_what_it_forbids(name: str) -> None:
    features = TARGETS[name].features
    wrong = " ".join(outside(SAMPLES.values(), features))
    for feature, sample in SAMPLES.items():
        assert (sample in wrong) == (feature not in features), feature


def test_what_llvm_would_do_unasked() -> None:
    """The fault that the list prevents: given only the CPU's name, LLVM uses instructions that
    nobody checked.
    """

    def body(em: Emitter, args: KernelArguments) -> None:
        with em.loop(4, "i") as i, em.vector(16) as lane:
            at = [i * 16 + lane]
            em.store(args.output, at, em.load(args.inputs["x"], at) * em.load(args.inputs["x"], at))

    half = T((64,), "float16")
    function = kernel("product", {"x": half}, half, 0, 16, body)
    machine = TARGETS["sapphirerapids"]
    asked = instructions(object_code([function], machine))
    loose = replace(machine, features=(*machine.features, "avx512fp16"))
    assert not outside(asked, machine.features)
    assert outside(instructions(object_code([function], loose)), machine.features)
