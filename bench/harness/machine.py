"""The machine and the versions that a result was measured with, for the JSON beside every table."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gtco.support.version import installed

PACKAGES = (
    "apache-tvm",
    "apache-tvm-ffi",
    "numpy",
    "onnx",
    "onnxsim",
    "onnxruntime",
    "openvino",
    "torch",
)


def describe(threads: int) -> dict[str, Any]:
    """CPU model, cores this process may use, kernel, Python, package versions (None: not
    installed), threads, date (UTC).
    """
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The kernel's name of the CPU; family and model are added if the name is only a brand."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    name = fields.get("model name", platform.machine())
    return (
        f"{name} (family {fields['cpu family']}, model {fields['model']})"
        if "cpu family" in fields
        else name
    )


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
