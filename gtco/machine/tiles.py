"""The tile unit of Intel CPUs (AMX): whether this machine has one that a process may use.

CPUID alone does not tell. The kernel gives a process the tiles only on request, and some
hypervisors show AMX and let its instructions fault. So a child process asks, and executes them.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

FLAGS = ("amx_tile", "amx_bf16", "amx_int8", "amx_fp16")  # spelled as in /proc/cpuinfo
SECONDS = 20.0  # a child needs less than a tenth of a second; a machine may be busy
REFUSED = 3  # exit status of the child if the kernel refuses

# ldtilecfg [rdi]; tilezero tmm0; tilerelease; xor eax, eax; ret
CODE = bytes.fromhex("c4e27849 07 c4e27b49 c0 c4e27849 c0 31c0 c3".replace(" ", ""))
REQUEST = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
# Asks, and calls the code with a configuration of eight tiles of 16 rows of 64 bytes.
CHILD = f"""\
import ctypes, mmap, sys
refused, code = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
if ctypes.CDLL(None).syscall{REQUEST}:
    sys.exit(refused)
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
config = bytes([1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8)
place = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(place)(config)
"""


@dataclass(frozen=True)
class Tiles:
    """The tile unit. ``kinds``: its instruction sets, in LLVM's spelling; empty if there is none
    that works. ``reason``: then, why.
    """

    kinds: tuple[str, ...] = ()
    reason: str = ""


def tiles(flags: Collection[str]) -> Tiles:
    """What this machine's tile unit can do; ``flags`` are those of the CPU, as Linux spells them.
    The first call takes a tenth of a second if CPUID shows a unit.
    """
    shown = tuple(flag.replace("_", "-") for flag in FLAGS if flag in flags)
    if "amx-tile" not in shown:
        return Tiles(reason="no tiles: the CPU, or the hypervisor under it, shows no AMX")
    reason = _fault()
    return Tiles(reason=reason) if reason else Tiles(shown)


@lru_cache(maxsize=1)
def _fault() -> str:
    """The answer of :func:`probe` for tile instructions, which is asked for once in a process."""
    return probe(CODE)


def allowed() -> bool:
    """Asks the kernel for the tiles, for all threads of this process and of its later children."""
    return ctypes.CDLL(None).syscall(*REQUEST) == 0


def probe(code: bytes) -> str:
    """Why tile instructions do not work here; empty if they do. A child process executes ``code``,
    a C function of one pointer, to a tile configuration.
    """
    command = [sys.executable or "python3", "-I", "-S", "-c", CHILD, str(REFUSED), code.hex()]
    try:
        status = subprocess.run(command, capture_output=True, timeout=SECONDS).returncode
    except (OSError, subprocess.TimeoutExpired):
        return "no tiles: the process that should try them could not run"
    if status == 0:
        return ""
    if status == REFUSED:
        return "no tiles: the CPU has AMX, and the kernel refuses it (Linux 5.16 or newer gives it)"
    if status == -signal.SIGILL:
        return "no tiles: CPUID shows AMX, and its instructions fault; the hypervisor disables them"
    return f"no tiles: the process that tried them ended with status {status}"
