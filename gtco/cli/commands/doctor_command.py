"""``gtco doctor``: shows the machine as gtco sees it, the versions, what is missing and how to get
it.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from typing import Any

from gtco.cli.console import say, show
from gtco.cli.inspection import measured_peak
from gtco.cli.tables import Table
from gtco.machine.cores import allowed_cores, cpu_quota
from gtco.machine.isa import AARCH64, ISAS
from gtco.machine.target import Target, cpu_flags, cpu_name, detect
from gtco.machine.tiles import tiles
from gtco.runtime.gpu.driver import described, open_driver
from gtco.support.errors import GtcoError
from gtco.support.version import __version__, installed

# with the version that setup.py pins; a test holds the two together
NEEDED = {
    "apache-tvm": "0.27.0.post1",
    "apache-tvm-ffi": "0.1.14.post1",
    "numpy": "",
    "ml_dtypes": "",
    "onnx": "",
    "onnxsim": "",
    "networkx": "",
}
OPTIONAL = {
    "onnxruntime": "gtco compile --verify and gtco bench",
    "torch": "compiling PyTorch models",
    "onnxscript": "compiling PyTorch models, beside torch",
    "openvino": "gtco bench --peers openvino",
    "xgboost-cpu": "gtco tune, to learn from what it measures",
    "jinja2": "gtco report, to put the page together",
    "vl-convert-python": "gtco report, to draw charts",
    "fast-sugiyama": "gtco report, to lay out the graph (Python 3.11 or later)",
    "ray": "gtco tune --farm and gtco farm",
    "shtab": "gtco completion",
}
SAME = {"xgboost-cpu": "xgboost"}  # another wheel of it


@dataclass(frozen=True)
class Check:
    """One line of the report.

    - ``fix``: how to get what is missing
    - ``needed``: True if gtco cannot compile without it
    - ``state``: the line's first word if nothing is missing
    """

    name: str
    found: str
    fix: str = ""
    needed: bool = True
    state: str = "ok"

    @property
    def ok(self) -> bool:
        return not self.fix

    @property
    def mark(self) -> str:
        if self.ok:
            return self.state
        return "missing" if self.needed else "absent"


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="the machine as gtco sees it, and what is missing"
    )
    parser.add_argument(
        "--no-peak", dest="peak", action="store_false", help="do not measure the machine's peak"
    )
    return parser


def main(options: argparse.Namespace) -> int:
    checks = [
        python_check(),
        *machine_checks(options.peak),
        *cross_checks(),
        *gpu_checks(),
        *package_checks(),
        compiler_check(),
        cache_check(),
    ]
    table = Table(f"gtco {__version__}")
    table.column("")
    table.column("")
    table.column("", least=30)
    for check in checks:
        table.row(check.mark, check.name, check.found)
    show(table)
    for check in checks:
        if not check.ok:
            say(f"{check.name}: {check.fix}")
    missing = [check for check in checks if check.needed and not check.ok]
    say(
        "gtco cannot compile here until the problems above are fixed."
        if missing
        else "gtco can compile here."
    )
    return 1 if missing else 0


def python_check() -> Check:
    return Check(
        "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )


def machine_checks(measure: bool) -> list[Check]:
    """CPU, instruction set, cores, memory levels, the table of rates and the measured peaks."""
    from gtco.tensor.intrinsics.table import kinds

    try:
        target = detect()
    except GtcoError as error:
        return [Check("CPU", cpu_name(), str(error))]
    levels = ", ".join(
        f"{m.name} {m.capacity >> 10} KiB" for m in target.memory if m.capacity < 1 << 40
    )
    quota = cpu_quota()
    cores = f"{allowed_cores()} threads by default, of {len(os.sched_getaffinity(0))} CPUs allowed"
    if quota is not None:
        cores += f" and a cgroup quota of {quota:g}"
    checks = [
        Check("CPU", f"{cpu_name()} (code for {target.mcpu})"),
        Check("instructions", " ".join(target.features)),
        Check("cores", cores),
        Check("caches", levels),
        Check("bf16", bfloat16_products(target)),
        Check("int8", int8_products(target)),
        tiles_check(),
        rates_check(target),
    ]
    if measure:
        peak, reason = measured_peak(allowed_cores(), "float32")
        if peak is None:
            checks.append(Check("peak", "not measured", reason or "unknown reason", needed=False))
        else:
            checks.append(
                Check(
                    "peak",
                    f"fp32 {peak}; by the table's constants {target.peak * target.cores / 1e9:.0f}",
                )
            )
        if kinds(target, "bfloat16")[0].in_tiles:
            peak, reason = measured_peak(allowed_cores(), "bfloat16")
            found = f"bf16 {peak}" if peak else reason or "unknown reason"
            checks.append(Check("peak in tiles", found))
        if kinds(target, "int8"):
            peak, reason = measured_peak(allowed_cores(), "int8")
            found = f"int8 {peak}" if peak else reason or "unknown reason"
            checks.append(Check("peak of integers", found))
    return checks


def gpu_checks() -> list[Check]:
    """Whether code for GPUs can be made here, and which GPUs this machine has to run it."""
    from gtco.codegen import nvrtc
    from gtco.machine.gpu import ARCHITECTURES

    try:
        known = f"{nvrtc.version()} (code for {', '.join(ARCHITECTURES)})"
        compiler = Check("NVRTC", known)
    except GtcoError as error:
        compiler = Check("NVRTC", "not installed", str(error), needed=False)
    able = compiler.ok and all(check.ok for check in package_checks() if check.needed)
    return [compiler, gpus_check(able)]


def gpus_check(compiles: bool = True) -> Check:
    """The GPUs of this machine with their architectures, as the driver names them. ``compiles``:
    True if code for them can be made here.
    """
    try:
        driver, count = open_driver()
    except OSError:
        able = "be compiled here, not run" if compiles else "be neither compiled nor run here"
        found = f"no driver (libcuda.so.1): models for GPUs can {able}"
        return Check("GPUs", found, state="none")
    except GtcoError as error:
        return Check("GPUs", str(error), state="none")
    found = ", ".join(_gpu(driver, index) for index in range(count))
    if not found:
        return Check("GPUs", "the driver finds none", state="none")
    return Check("GPUs", found)


def _gpu(driver: Any, index: int) -> str:
    try:
        return str(described(driver, index))
    except GtcoError as error:
        return str(error)


def bfloat16_products(target: Target) -> str:
    """How products of bfloat16 (``--precision bf16``) are computed here."""
    from gtco.report.words import INSTRUCTIONS
    from gtco.tensor.intrinsics.table import kinds

    best = kinds(target, "bfloat16")[0]
    if best.in_tiles:
        return "multiplied in tiles (TDPBF16PS)"
    if best.products > 1:
        how = INSTRUCTIONS[best.name].rpartition(" ")[2]
        count = {2: "in pairs", 4: "four at a time"}[best.products]
        return f"multiplied {count} ({how})"
    return "widened to fp32, which multiplies: half of the weights' bytes, and no faster arithmetic"


def int8_products(target: Target) -> str:
    """How products of quantized tensors are computed here."""
    from gtco.report.words import INSTRUCTIONS
    from gtco.tensor.intrinsics.table import kinds

    for best in kinds(target, "int8"):
        how = INSTRUCTIONS[best.name].rpartition(" ")[2]
        if best.in_tiles:
            return f"multiplied in tiles ({how}), added in int32"
        count = {4: "four", 8: "eight"}[best.products]
        return f"multiplied {count} at a time ({how}), added in int32"
    wanted = "neither AVX512-VNNI nor AVX-VNNI"
    if target.isa is AARCH64:
        wanted = "neither dotprod nor i8mm"
    return f"computed in fp32, as there is {wanted}"


def cross_checks() -> list[Check]:
    """For each other instruction set, whether libraries for it are linked and verified here."""
    from gtco.runtime.writing.cross import compiler_for, emulator_of

    checks = []
    for isa in ISAS.values():
        if isa.here:
            continue
        try:
            compiler = compiler_for(isa)
        except GtcoError:
            fix = f"no cross compiler; Debian, Ubuntu: apt install {isa.package}"
            checks.append(Check(isa.name, fix, state="none"))
            continue
        emulator = emulator_of(isa)
        verified = f"verified by {emulator}" if emulator else f"not verified: no {isa.emulator}"
        checks.append(Check(isa.name, f"libraries are linked by {compiler}, and {verified}"))
    return checks


def tiles_check() -> Check:
    """Whether this machine has a tile unit (AMX) that works."""
    found = tiles(cpu_flags())
    if not found.kinds:
        return Check("tiles", found.reason, state="none")
    formats = [name for name in ("bf16", "int8") if f"amx-{name}" in found.kinds]
    multiplied = f"products of {' and '.join(formats)}" if formats else "none of its products"
    return Check("tiles", f"{' '.join(found.kinds)}; gtco multiplies {multiplied} in them")


def rates_check(target: Target) -> Check:
    """Whether this machine's micro-kernels have been measured, in circumstances that have not
    changed since.
    """
    from gtco.support.environment import cache_folder

    try:
        from gtco.search.calibration.profile import BUSY, MOST_TIMES, cached_rates

        measured = cached_rates(target)
    except ImportError as error:
        return Check("kernel rates", "not known", f"not known: {error}", needed=False)
    if measured and measured.others >= BUSY:
        return Check(
            "kernel rates",
            f"measured while other processes had {measured.others:.0%} of the CPUs: "
            + (
                "the next compile in which they have less than half of that measures again"
                if measured.times < MOST_TIMES
                else f"they had as much in {measured.times} measurements, and the best is kept; "
                f"delete the file in {cache_folder()} to measure again"
            ),
        )
    if measured:
        return Check("kernel rates", f"measured, kept in {cache_folder()}")
    unknown = "not measured yet: the first compile for this machine does"
    return Check("kernel rates", unknown, state="not yet")


def package_checks() -> list[Check]:
    checks = [
        _package(name, pin, f"pip install {name}{'==' + pin if pin else ''}", True)
        for name, pin in NEEDED.items()
    ]
    return checks + [
        _package(name, "", f"pip install {name} (for {use})", False)
        for name, use in OPTIONAL.items()
    ]


def _package(name: str, pin: str, fix: str, needed: bool) -> Check:
    found = installed(name)
    if found is None:
        if name in SAME:
            return _package(SAME[name], pin, fix, needed)
        return Check(name, "not installed", fix, needed)
    if pin and found != pin:
        return Check(
            name,
            f"{found}, but gtco needs {pin}: other pairs of TVM and tvm-ffi crash",
            fix,
            needed,
        )
    return Check(name, found, needed=needed)


def cache_check() -> Check:
    """The cache of compiled libraries: its place, how many it has, their bytes, and the bound."""
    from gtco.driver.cache.library_cache import LibraryCache
    from gtco.support.environment import cache_bytes, cache_folder

    name = "library cache"
    try:
        limit = cache_bytes()
    except GtcoError as error:
        return Check(name, "not used", str(error), needed=False)
    folder = cache_folder() / "libraries"
    if not limit:
        return Check(name, "off, by GTCO_CACHE_GB=0", state="none")
    bound = f"at most {limit / 1e9:g} GB"
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fix = f"{there} cannot be written: set GTCO_CACHE to a folder that can be, or compile again"
        return Check(name, f"{folder}: cannot be written", fix, needed=False)
    if there != folder:
        return Check(name, f"{folder}: not made yet, {bound}")
    try:
        sizes = LibraryCache(folder, limit).sizes()
    except OSError as error:
        fix = f"{error}: set GTCO_CACHE to a folder that can be read"
        return Check(name, f"{folder}: cannot be read", fix, needed=False)
    kept = f"{len(sizes)} {'library' if len(sizes) == 1 else 'libraries'}"
    return Check(name, f"{folder}: {kept}, {sum(sizes.values()) / 1e9:.2f} GB, {bound}")


def compiler_check() -> Check:
    """The C compiler that links the artifact."""
    from gtco.support.environment import c_compiler

    try:
        path = c_compiler()
    except GtcoError as error:
        return Check("C compiler", "none", str(error))
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True)
    except OSError as error:
        return Check("C compiler", path, f"{path} cannot be run: {error}")
    if shown.returncode != 0:
        return Check("C compiler", path, f"{path} --version fails: {shown.stderr.strip()}")
    version = re.search(r"\d+\.\d+(\.\d+)?", shown.stdout)
    return Check("C compiler", f"{path} {version.group() if version else ''}".strip())
