"""CUDA C++ -> machine code and PTX by NVRTC, of the pip packages that the extra ``cuda`` names:
neither a toolkit nor a GPU is needed, nor any header of the vendor's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gtco.tensor.cuda
from gtco.support.errors import BuildError, installing

INSTALL = f"{installing('cuda')} (no GPU and no CUDA toolkit are needed to compile)"
DEVICE = Path(gtco.tensor.cuda.__file__).parent / "device"  # our headers: "gtco/gemm.cuh"
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",  # constexpr functions need no __device__
    "--ptxas-options=--verbose",
    "--diag-suppress=177",  # a name that a lambda was given and does not use is no news
    f"-I{DEVICE}",
)
_USED = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")
_COMMENT = re.compile(rb"^[ \t]*//.*\n|^[ \t]*\n|^\t+", re.MULTILINE)
_LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Image:
    """The machine code of one kernel for one architecture, with the functions that it calls.

    ``cubin`` is an ELF file; ``registers`` of a thread; ``shared`` static shared memory of a block,
    ``local`` memory that a thread keeps beside its registers and ``spills``, the stores and loads
    that registers were too few for, in bytes; ``log`` is what the compiler said. ``ptx``: what the
    machine code was made of, where that was asked for, which drivers compile for newer GPUs.
    """

    cubin: bytes
    log: str
    registers: int
    shared: int
    local: int
    spills: int
    ptx: bytes = b""


def compile_cuda(source: str, arch: str, ptx: bool = False) -> Image:
    """The machine code of a translation unit with one kernel, and where ``ptx`` that beside it;
    ``arch`` such as ``sm_80``.

    Raises :class:`BuildError` where NVRTC is missing, and with the compiler's first errors where it
    refuses the source.
    """
    nvrtc = library()
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    program = _asked(nvrtc, "nvrtcCreateProgram", source.encode(), b"kernel.cu", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _text(nvrtc, program)
        if int(status):
            raise BuildError(f"NVRTC refuses the kernel for {arch}: {_errors(log) or status.name}")
        cubin = bytes(_asked(nvrtc, "nvrtcGetCUBINSize", program))
        _asked(nvrtc, "nvrtcGetCUBIN", program, cubin)
        text = b""
        if ptx:
            text = bytes(_asked(nvrtc, "nvrtcGetPTXSize", program))
            _asked(nvrtc, "nvrtcGetPTX", program, text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    used, static = _USED.search(log), _STATIC.search(log)
    local = [tuple(map(int, found)) for found in _LOCAL.findall(log)]  # bytes of each function
    return Image(
        cubin,
        log,
        int(used.group(1)) if used else 0,
        int(static.group(1)) if static else 0,
        max((frame for frame, _, _ in local), default=0),
        sum(stores + loads for _, stores, loads in local),
        bare(text),
    )


def bare(ptx: bytes) -> bytes:
    """PTX without lines of comment, indentation, and the zero at its end."""
    return _COMMENT.sub(b"", ptx.rstrip(b"\0"))


@cache
def library() -> Any:
    """The bindings of NVRTC, once they are known to work. Raises :class:`BuildError` that says what
    to install.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BuildError(f"compiling for a GPU needs NVRTC ({error}): {INSTALL}") from error
    try:
        major, minor = _asked(nvrtc, "nvrtcVersion")
    except RuntimeError as error:  # the bindings are there, the library is not
        reason = str(error).strip().partition("\n")[0]
        raise BuildError(f"NVRTC cannot be loaded ({reason}): {INSTALL}") from error
    if major < 13:
        raise BuildError(
            f"NVRTC {major}.{minor} is installed, and gtco needs one of CUDA 13: {INSTALL}"
        )
    return nvrtc


@cache
def version() -> str:
    """NVRTC's version, as "13.0"; raises as :func:`library` does."""
    return "{}.{}".format(*_asked(library(), "nvrtcVersion"))


def _asked(nvrtc: Any, name: str, *arguments: Any) -> Any:
    """What a function of NVRTC gives; its failure is a :class:`BuildError` with its name."""
    status, *values = getattr(nvrtc, name)(*arguments)
    if int(status):
        raise BuildError(f"{name} fails with {status.name}")
    return values[0] if len(values) == 1 else values


def _text(nvrtc: Any, program: Any) -> str:
    # NVRTC writes into this object. Python shares bytes of length 0 and 1, so it is longer.
    log = bytes(max(2, _asked(nvrtc, "nvrtcGetProgramLogSize", program)))
    _asked(nvrtc, "nvrtcGetProgramLog", program, log)
    return log.rstrip(b"\0 \n").decode(errors="replace")


def _errors(log: str) -> str:
    """The first few errors of a compiler's log."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"\b(error|fatal)\b", line)]
    return "; ".join(lines[:3])[:600]
