"""CUDA kernels and the emulator, compiled as objects for this CPU and kept by their texts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from gtco.tensor import cuda

HERE = Path(__file__).parent / "emulator"
DEVICE = Path(cuda.__file__).parent / "device"
RUNTIME = ("fibres.cpp", "collectives.cpp", "warp_groups.cpp", "mbarriers.cpp", "clocks.cpp",
           "memory.cpp", "figures.cpp", "grid.cpp", "tickets.cpp", "library.cpp")  # fmt: skip
FLAGS = ["-std=c++17", "-g1", "-march=x86-64-v3", "-fPIC", "-fvisibility=hidden",
         "-Wno-unknown-pragmas", "-DGTCO_EMULATE"]  # fmt: skip
INCLUDES = ["-I", str(HERE), "-I", str(DEVICE)]  # kept by their texts, wherever they are
# -fsanitize=thread has the compiler call memory.cpp before each access (libtsan is not linked).
# Variables start as 0xfe bytes: a NaN in float16, about -1e38 in float32, wrong in any case.
KERNEL_FLAGS = ["-O1", "-fsanitize=thread", "-fno-strict-aliasing", "-ffp-contract=fast",
                "-ftrivial-auto-var-init=pattern", "--param=tsan-instrument-func-entry-exit=0",
                "-Werror=uninitialized", "-Werror=frame-larger-than=65536"]  # fmt: skip
# TVM's loops (sketch/fallback/cuda.py) set a sum in their first round; gcc cannot know this.
LOWERED = re.compile(r"^// .*: (one thread|\d+ independent iterations)$", re.MULTILINE)
DEVICE_HEADER = DEVICE / "gtco" / "device.cuh"
KEPT = 3 * 24 * 3600  # seconds that a built file is kept


class Fault(AssertionError):
    """A kernel did something that a GPU would not accept."""


def link(objects: Sequence[Path]) -> Path:
    """A shared object of these objects and the emulator, kept by their texts."""
    runtime, library = _emulator(), _cpp_library()
    every = [str(o) for o in (*objects, runtime, library)]
    # Without the libraries of a program: to search them takes ten times as long as the rest.
    alone = ["-shared", "-nodefaultlibs", "-fno-use-linker-plugin", "-Wl,--no-as-needed"]
    path = _kept([*alone, *every], ".so")
    if not path.exists():
        _make(path, lambda to: ["g++", *alone, "-o", to, *every, "-lgcc"])
    return path


def _emulator() -> Path:
    """The emulator, as one object without symbols for debuggers."""
    parts = [
        compiled_object((HERE / name).read_text(), ["-DGTCO_ARCH=800", "-O2", "-g0"])
        for name in RUNTIME
    ]
    every = [str(part) for part in parts]
    path = _kept(every, ".o")
    if not path.exists():
        _make(path, lambda to: ["ld", "-r", "-o", to, *every])
    return path


def _cpp_library() -> Path:
    """The path of an empty library that bears the C++ library's name. A kernel is linked with this
    one, which is quick. When the kernel is loaded, the system loads the real library by that name.
    """
    path = _kept(["libstdc++.so.6"], ".so")
    if not path.exists():
        name = "-Wl,-soname,libstdc++.so.6"
        _make(path, lambda to: ["g++", "-shared", "-nostdlib", name, "-o", to, "-xc++", os.devnull])
    return path


def kernel_object(source: str, arch: int, renamed: str = "") -> Path:
    """Kernels whose every access is seen; the one named ``renamed`` becomes gtco_kernel_..."""
    seen = {f: f"gtco_{f}" for f in ("memcpy", "memset", "memmove")}  # by memory.cpp
    if renamed:
        seen[renamed] = f"gtco_kernel_{renamed}"
    flags = [*KERNEL_FLAGS, *(["-Wno-maybe-uninitialized"] if LOWERED.search(source) else [])]
    return compiled_object(source, [f"-DGTCO_ARCH={arch}", *flags], seen)


def compiled_object(
    source: str, flags: list[str], names: Mapping[str, str] = MappingProxyType({})
) -> Path:
    included: dict[Path, str] = {}
    _include(source, included)
    path = _kept([source, *FLAGS, *flags, *names, *included.values()], ".o")
    if not path.exists():
        text = path.with_suffix(".cpp")
        text.write_text(source)
        first = source.partition('#include "')[0]
        # A kernel's text begins with this header, unless it has definitions for it.
        if names and DEVICE_HEADER in included and "#define" not in first:
            flags = [*flags, "-include", str(_precompiled(flags))]
        renames = [f"--redefine-sym={old}={new}" for old, new in names.items()]
        _make(
            path,
            lambda to: ["g++", *FLAGS, *INCLUDES, *flags, "-c", str(text), "-o", to],
            lambda to: ["objcopy", *renames, to],
        )
    return path


def _precompiled(flags: list[str]) -> Path:
    """The header of every kernel, compiled for these flags: g++ takes a quarter less of its time
    for a kernel. Where g++ cannot use what lies beside it, it reads the text.
    """
    source = '#include "gtco/device.cuh"\n'
    included: dict[Path, str] = {}
    _include(source, included)
    path = _kept(["header", source, *FLAGS, *flags, *included.values()], ".h")
    compiled = Path(f"{path}.gch")
    if not compiled.exists():
        path.write_text(source)
        header = ["-x", "c++-header", str(path)]
        _make(compiled, lambda to: ["g++", *FLAGS, *INCLUDES, *flags, *header, "-o", to])
    return path


def _include(text: str, found: dict[Path, str]) -> None:
    """Adds to ``found`` the headers of ours that a text includes, and the headers that these
    include.
    """
    for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE):
        path = next((p for p in (HERE / name, DEVICE / name, DEVICE / "gtco" / name)
                     if p.is_file()), None)  # fmt: skip
        if path and path not in found:
            found[path] = path.read_text()
            _include(found[path], found)


def _make(path: Path, *commands: Callable[[str], list[str]]) -> None:
    """Runs each ``command(file)`` and then moves the file into place in one step, because tests run
    side by side.
    """
    made = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    for command in commands:
        done = subprocess.run(command(str(made)), capture_output=True, text=True)
        if done.returncode:
            raise Fault(f"{' '.join(command(path.name))}\n{done.stderr}")
    made.rename(path)


def _kept(texts: Sequence[str], ending: str) -> Path:
    """Where what is made of these texts is kept."""
    return _cache() / f"{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:24]}{ending}"


@functools.cache
def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"gtco-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was here before
            if file.stat().st_mtime < time.time() - KEPT:
                file.unlink()
    return folder
