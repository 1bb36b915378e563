"""LLVM's code of plain loops computes what the loops say."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tvm import relax, tirx

from gtco.codegen.generalize import outline
from gtco.codegen.llvm import NO_ALIAS, SIGNS, compile_functions
from gtco.codegen.load import load
from gtco.codegen.outlines import Outline
from gtco.support.errors import BuildError
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.emit.lines import program_lines
from gtco.tensor.relax import bridge as relax_bridge
from gtco.tensor.stage import TensorType
from tests.kernels import runnable, targets

# Each was wrong on at least one target while LLVM 22's loop vectorizer was on.
WRAPPED = [((3, 8, 1), (5, 4, 2)), ((3, 8, 3), (5, 8, 2)), ((3, 8, 5), (5, 4, 1))]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(("shape", "repeats"), WRAPPED)
def test_a_masked_counter_wraps(
    target: str, shape: tuple[int, ...], repeats: tuple[int, ...]
) -> None:
    """``y[i, j, k] = x[i % 3, j & 7, k % n]`` (see gtco.codegen.llvm.OPTIONS)."""
    output = tuple(n * r for n, r in zip(shape, repeats, strict=True))
    builder = relax.BlockBuilder()
    parameter = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [parameter]):
        with builder.dataflow():
            tiled = builder.emit_output(builder.emit(relax.op.tile(parameter, list(repeats))))
        builder.emit_func_output(tiled)
    function, _, tasks = relax_bridge.lower_module(
        builder.get(), "tile", [TensorType(shape)], [0], TensorType(output)
    )
    library = load([function], runnable(target))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    y = np.zeros(output, np.float32)
    pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), None)
    library.tile(*pointers, ctypes.c_int64(0), ctypes.c_int64(tasks))
    np.testing.assert_array_equal(y, np.tile(x, repeats))


@pytest.mark.parametrize("mixed", [False, True])
def test_what_shares_memory_is_said_of_no_function_or_of_all(mixed: bool) -> None:
    """TVM gives all functions of a module the ``noalias`` of the last one; see alike()."""
    one = TensorType((8,))

    def body(em: Emitter, args: KernelArguments) -> None:
        em.store_vector(args.output, [0], em.load_vector(args.inputs["x"], [0]))

    first, last = (kernel(name, {"x": one}, one, 0, 8, body) for name in ("first", "last"))
    if mixed:
        first = first.without_attr(NO_ALIAS)
    text = compile_functions([first, last], runnable("x86-64-v3")).inspect_source("ll")
    heads = [line for line in text.splitlines() if line.startswith("define")]
    for name in ("first", "last"):
        (head,) = (head for head in heads if f"@{name}(" in head)
        assert ("noalias" in head) != mixed, head


def test_loaded_kernels_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, one = runnable("x86-64-v3"), TensorType((8,))

    def body(em: Emitter, args: KernelArguments) -> None:
        em.store_vector(args.output, [0], em.load_vector(args.inputs["x"], [0]))

    function = kernel("copy", {"x": one}, one, 0, 8, body)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), None)
    load([function], machine).copy(*pointers, ctypes.c_int64(0), ctypes.c_int64(1))
    np.testing.assert_array_equal(x, y)
    assert not list(tmp_path.iterdir())
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such flag >&2; exit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("gtco.codegen.load.c_compiler", lambda: str(compiler))
    with pytest.raises(BuildError, match=r"exit status 3.*\n.*no such flag"):
        load([function], machine)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody knows how a child ends
    try:
        with pytest.raises(BuildError, match=r"the C compiler failed.*\n.*no such flag"):
            load([function], machine)
    finally:
        signal.signal(signal.SIGCHLD, before)
    compiler.unlink()
    with pytest.raises(BuildError, match="cannot link kernels"):
        load([function], machine)
    assert not list(tmp_path.iterdir())


def test_instructions_that_gather_signs_are_found(tmp_path: Path) -> None:
    """With any register, and no others."""

    def found(*lines: str) -> bool:
        command = ["as", "--64", "-o", "code.o", "-"]
        text = "".join(f"{line}\n" for line in lines)
        subprocess.run(command, input=text, text=True, cwd=tmp_path, check=True)
        return SIGNS.search((tmp_path / "code.o").read_bytes()) is not None

    for name in ("vmovmskps", "vmovmskpd", "vpmovmskb"):
        for vector in (f"%{kind}mm{n}" for kind in "xy" for n in range(16)):
            for to in ("%eax", "%ebp", "%r8d", "%r15d"):
                assert found(f"{name} {vector}, {to}")
    sums = [f"vaddps %zmm{n}, %zmm{n}, %zmm{n}" for n in range(32)]
    assert not found(*sums, "vmovaps %ymm9, %ymm1", "vpmovd2m %xmm17, %k0", "kmovb %k0, %eax")


@pytest.mark.parametrize("linker", ["", "/bin/false", "its own"])
def test_what_the_linker_alone_cannot_do_the_compiler_does(
    linker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel calls a function of the compiler's own library, which the linker does not know."""
    machine, one = runnable("x86-64-v3"), TensorType((1,))

    def body(em: Emitter, args: KernelArguments) -> None:
        x = em.load(args.inputs["x"], [0])
        em.store(args.output, [0], tirx.call_extern("float32", "__powisf2", x, 3))

    function = kernel("cube", {"x": one}, one, 0, 8, body)
    if linker != "its own":
        monkeypatch.setattr("gtco.codegen.load.linker_of", lambda _: linker)
    x, y = np.float32([1.5]), np.zeros(1, np.float32)
    pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), None)
    load([function], machine).cube(*pointers, ctypes.c_int64(0), ctypes.c_int64(1))
    assert y[0] == 1.5**3


@pytest.mark.parametrize("name", targets())
def test_a_rolled_loop_is_not_written_out(name: str) -> None:
    """LLVM would make six copies of the body; the values are the same."""
    machine, count = runnable(name), 6
    lanes = machine.lanes
    type_ = TensorType((count * lanes,))

    def body(rolled: bool) -> Callable[[Emitter, KernelArguments], None]:
        def emit(em: Emitter, args: KernelArguments) -> None:
            with em.loop(count, "block", rolled=rolled) as block:
                x = em.let(em.load_vector(args.inputs["x"], [block * lanes]))
                y = x
                for n in range(15):
                    y = em.let(y * x + em.splat(float(n)))
                em.store_vector(args.output, [block * lanes], y)

        return emit

    made = [kernel("k", {"x": type_}, type_, 0, lanes, body(rolled)) for rolled in (True, False)]
    texts = [compile_functions([f], machine).inspect_source("asm") for f in made]
    rolled, plain = (text.count("\tvfmadd") for text in texts)
    assert rolled == 15 and plain == count * rolled
    x = np.random.default_rng(1).uniform(-1, 1, type_.sizes).astype(np.float32)
    results = []
    for function in made:
        y = np.zeros(type_.sizes, np.float32)
        pointers = (ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), None)
        load([function], machine).k(*pointers, ctypes.c_int64(0), ctypes.c_int64(1))
        results.append(y)
    np.testing.assert_array_equal(*results)
    assert results[0].any()
    lines = [[str(line) for line in program_lines(function, 1)] for function in made]
    assert lines[0] == lines[1] and "for block in 6" in lines[0][0]


def test_rolled_loops_of_several_sizes_are_one_kernel() -> None:
    machine = runnable("x86-64-v3")

    def made(count: int, rolled: bool = True) -> Outline:
        type_ = TensorType((count * 8,))

        def body(em: Emitter, args: KernelArguments) -> None:
            with em.loop(count, "block", rolled=rolled) as block:
                value = em.load_vector(args.inputs["x"], [block * 8])
                em.store_vector(args.output, [block * 8], value * value)

        return outline(kernel("k", {"x": type_}, type_, 0, machine.lanes, body))

    assert made(6).key == made(7).key != made(7, rolled=False).key
    assert made(6).numbers != made(7).numbers
