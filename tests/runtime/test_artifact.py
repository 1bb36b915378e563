"""What is written: the library's dependencies and exports, its header, and nothing at all if
writing fails.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.module import load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing import linking
from gtco.runtime.writing.elf_object import symbols
from gtco.runtime.writing.linking import EXPORTS, write_artifact
from gtco.runtime.writing.table import known_features, normalize_features
from gtco.support.errors import BuildError, ShapeError
from tests.runtime.test_models import (
    KERNELS,
    check,
    compile_kernels,
    example_inputs,
    kernels,
    small,
    small_artifact,
)

REPOSITORY = Path(__file__).parents[2]


def readelf(path: Path, *flags: str) -> str:
    command = ["readelf", "-W", *flags, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_needs_libc_and_libm_alone(small: Path) -> None:
    needed = [
        line.split("[")[1].rstrip("]")
        for line in readelf(small, "-d").splitlines()
        if "NEEDED" in line
    ]
    assert needed and set(needed) <= {"libc.so.6", "libm.so.6"}


def test_exports_the_interface_and_nothing_else(small: Path) -> None:
    lines = readelf(small, "--dyn-syms").splitlines()
    defined = {
        f[7] for f in map(str.split, lines) if len(f) == 8 and f[6].isdigit() and f[3] != "SECTION"
    }
    assert defined == set(EXPORTS)


def test_code_that_nobody_calls_is_left_out(tmp_path: Path) -> None:
    """TVM gives each object functions that convert float16, in a section of their own."""
    unused = """
__attribute__((weak, section(".text.tvm.fp16.conv"))) float __extendhfsf2(short x) { return x; }
"""
    code = compile_kernels(KERNELS + unused, tmp_path)
    assert "__extendhfsf2" in symbols(code)[0]
    library = write_artifact(small_artifact(code), tmp_path / "small.so")
    assert not {"__extendhfsf2"} & symbols(library.read_bytes())[0]
    assert "gtco_call_ended" in symbols(library.read_bytes())[0]  # names are there


def test_has_no_executable_stack(small: Path) -> None:
    stack = next(line for line in readelf(small, "-l").splitlines() if "GNU_STACK" in line)
    assert " RWE " not in stack and " RW " in stack


def test_runtime_uses_baseline_instructions_only(small: Path, tmp_path: Path) -> None:
    """Code that runs before the CPU is checked must run on an old CPU: it uses no ymm or zmm
    register.
    """
    dump = subprocess.run(
        ["objdump", "-d", str(small)], capture_output=True, text=True, check=True
    ).stdout
    assert "gtco_open" in dump and "%ymm" not in dump and "%zmm" not in dump


def test_header_names_the_tensors_and_compiles_alone(small: Path, tmp_path: Path) -> None:
    header = small.with_suffix(".h")
    assert "x: float32[96, 40]" in header.read_text() and "total: float32[40]" in header.read_text()
    for compiler, flag in (("gcc", "-xc"), ("gcc", "-xc++")):
        if flag == "-xc++" and shutil.which("g++") is None:
            continue
        subprocess.run(
            [compiler, flag, "-Wall", "-Werror", "-fsyntax-only", str(header)], check=True
        )


def test_c_example_runs(small: Path, tmp_path: Path) -> None:
    program = tmp_path / "run"
    command = [
        "make",
        "-s",
        "-C",
        str(REPOSITORY / "examples/c"),
        f"MODEL={small}",
        f"OUT={program}",
    ]
    subprocess.run(command, check=True)
    result = subprocess.run(
        [program], capture_output=True, text=True, check=True, env={"GTCO_NUM_THREADS": "3"}
    )
    assert result.stdout.splitlines() == [
        "input x: float32[96, 40], 15360 bytes",
        "input mask: int8[96], 96 bytes",
        "output y: float32[96, 40], 15360 bytes",
        "output total: float32[40], 160 bytes",
        "3 steps on 3 threads",
        "y = 0 0 0 0 0 ...",
        "total = 0 0 0 0 0 ...",
    ]


def test_names_and_kernels_may_be_spelt_anyhow(tmp_path: Path, kernels: bytes) -> None:
    """Names that would end the header's comment, open another, continue a line, or end a C string.
    The header compiles with every warning as an error, also with trigraphs.
    """
    base = small_artifact(kernels)
    names = ('x "é"??/\n *\\\n/ #error a', "*\r/ /* // \u202e\0??/")
    inputs = tuple(
        TensorSpec(name, spec.dtype, spec.shape)
        for name, spec in zip(names, base.inputs, strict=True)
    )
    path = write_artifact(
        small_artifact(kernels, inputs=inputs, name="*/ 7\\"), tmp_path / "a */ b\\.so"
    )
    with load(path) as model:
        assert tuple(spec.name for spec in model.inputs) == names
        check(model(*example_inputs()), *example_inputs())
    header = path.with_suffix(".h")
    assert header.read_text().isascii()
    for standard in ("c99", "gnu17"):
        flags = ["-Wall", "-Wextra", "-pedantic", "-Werror", f"-std={standard}", "-fsyntax-only"]
        subprocess.run(["gcc", "-xc", *flags, str(header)], check=True)


def test_equal_artifacts_are_equal_files(tmp_path: Path, kernels: bytes) -> None:
    first, second = (write_artifact(small_artifact(kernels), tmp_path / f"{n}/m.so") for n in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_weights_beside_the_library(tmp_path: Path, kernels: bytes) -> None:
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so", weights_inside_limit=100)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names[:2] == ["m.h", "m.so"] and len(names) == 3
    assert re.fullmatch(r"m\.so\.weights-[0-9a-f]{16}", names[2])
    with load(path) as model:
        check(model(*example_inputs()), *example_inputs())
    write_artifact(small_artifact(kernels), path)
    # the old file is of no use
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.h", "m.so"]


def test_no_compiler(tmp_path: Path, kernels: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt install gcc"):
        write_artifact(small_artifact(kernels), tmp_path / "m.so")
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(BuildError, match="'no-such-cc' is not found"):
        write_artifact(small_artifact(kernels), tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_kernel_is_named(tmp_path: Path, kernels: bytes) -> None:
    base = small_artifact(kernels)
    steps = (*base.steps, Step("missing_kernel", (BufferRef("output", 0),)))
    with pytest.raises(BuildError, match="missing_kernel"):
        write_artifact(small_artifact(kernels, steps=steps), tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": (Step("total", (BufferRef("input", 2),)),)}, "input 2, which does not exist"),
        ({"steps": (Step("total", (BufferRef("arena", 32),)),)}, "not a multiple of 64"),
        ({"steps": (Step("total", (), 0),)}, "0 tasks"),
        (
            {
                "steps": (
                    Step("total", ()),
                    Step("total", (BufferRef("output", 0), BufferRef("output", 1))),
                )
            },
            "with 0 and",
        ),
        ({"steps": ()}, "no step writes output 0"),
        ({"weights": ((0, np.zeros(100)), (64, np.zeros(1)))}, "overlap"),
        ({"cpu_features": ("avx1024",)}, "avx1024"),
        ({"metadata": {"steps": []}}, "may not set steps"),
        ({"metadata": {"time": float("inf")}}, "not JSON"),
    ],
)
def test_bad_plans(
    kernels: bytes, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        write_artifact(small_artifact(kernels, **changes), tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def test_symbolic_shapes_and_wrong_suffix(kernels: bytes, tmp_path: Path) -> None:
    inputs = (TensorSpec("x", "float32", ("batch", 40)), TensorSpec("mask", "int8", (96,)))
    with pytest.raises(ShapeError, match="batch"):
        write_artifact(small_artifact(kernels, inputs=inputs), tmp_path / "m.so")
    with pytest.raises(BuildError, match=r"m\.bin\.so"):
        write_artifact(small_artifact(kernels), tmp_path / "m.bin")


def test_feature_names() -> None:
    assert normalize_features(["+avx512_bf16", "AVX2", "sse4_1", "amx_tile"]) == (
        "amx-tile",
        "avx2",
        "avx512bf16",
        "sse4.1",
    )
    assert {"avx512f", "avx512vnni", "fma", "f16c", "bmi2"} <= known_features()


def test_a_full_disk_leaves_the_old_model(tmp_path: Path, kernels: bytes) -> None:
    """A real failure: the process may write no file above 1 MB (RLIMIT_FSIZE), and the weights are
    2 MB.
    """
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so")
    before = path.read_bytes()
    (tmp_path / "kernels.bin").write_bytes(kernels)
    script = textwrap.dedent(f"""
        import resource, sys
        from pathlib import Path
        import numpy as np
        from gtco.support.errors import BuildError
        from gtco.runtime.writing.linking import write_artifact
        from tests.runtime.test_models import small_artifact
        kernels = Path({str(tmp_path)!r}, "kernels.bin").read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for size in (1 << 21, (1 << 20) - 64):  # the weights' file fails; then the compiler does
            model = small_artifact(kernels, weights=((0, np.ones(size, np.uint8)),))
            try:
                write_artifact(model, {str(path)!r})
            except BuildError as error:
                print(error)
    """)
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    messages = result.stdout.splitlines()
    assert len(messages) == 2, result
    for message in messages:
        assert "File too large" in message and "ulimit -f" in message
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.bin", "m.h", "m.so"]


def test_no_space_when_the_files_are_renamed(
    tmp_path: Path,
    kernels: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(linking.os, "replace", full)
    with pytest.raises(BuildError, match=r"No space left on device.*MB are free"):
        write_artifact(small_artifact(kernels), tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(
    tmp_path: Path, kernels: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(linking, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_artifact(small_artifact(kernels), tmp_path / "m.so")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path, kernels: bytes) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot write"):
        write_artifact(small_artifact(kernels), tmp_path / "file" / "m.so")


def test_weights_are_streamed(tmp_path: Path, kernels: bytes) -> None:
    """Writing 256 MB of weights makes no copy of them in this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = np.ones(256 << 18, np.float32)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = write_artifact(small_artifact(kernels, weights=((0, weights),)), tmp_path / "m.so")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - max(before, held) < 64 << 10  # KiB
    assert path.stat().st_size > weights.nbytes and stat.S_IXUSR & path.stat().st_mode
