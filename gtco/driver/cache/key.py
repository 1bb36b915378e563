"""The key of a library in the cache: everything that decides what a compile makes.

- the model with its weights, and the names and shapes of its inputs and outputs;
- the options, and the name of the file, which is in the library and its header;
- gtco's own files, byte by byte, and the versions of what it compiles with;
- the target and its measured rates, and the CPU if something is measured on it;
- the records that are followed, and a language model of the user's own.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.driver.backend import backend_of
from gtco.machine.target import Machine, cpu_identity
from gtco.runtime.writing.cross import compiler_for
from gtco.search.records.records import Records
from gtco.support.options import CompileOptions, Tune
from gtco.support.sizes import Range
from gtco.support.version import installed

if TYPE_CHECKING:
    from gtco.search.calibration.rates import RateTable

FORMAT = 1  # format of the entries; raise it when their contents change
# These change nothing in the library: how many processes work, what is written beside it, and what
# is checked afterwards. The contents of a file of records count, not its name.
# Which machines measured is in the target.
NO_MATTER = ("workers", "dump", "verify", "verify_layers", "cache", "records", "farm", "farm_kind")
OWN = Path(__file__).resolve().parents[2]  # the folder of gtco
PACKAGES = (
    "apache-tvm apache-tvm-ffi numpy ml_dtypes onnx onnxsim networkx torch onnxscript onnx-ir "
    "xgboost-cpu nvidia-cuda-nvrtc"
).split()


def library_key(
    names: Sequence[str],
    digests: Sequence[str],
    options: CompileOptions,
    machine: Machine,
    rates: RateTable | None,
    records: Records | None,
    effort: Tune | None,
) -> str:
    """The key of what a compile makes of models with these digests: one model's variants, or all
    the models that are measured together. ``names``: of the files.
    """
    chosen = {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in NO_MATTER
    }
    decides = {
        "format": FORMAT,
        "names": list(names),
        "models": list(digests),
        "options": {**chosen, "tune": None if effort is None else asdict(effort)},
        "gtco": own_digest(),
        "versions": versions(),
        "python": list(sys.version_info[:2]),
        "compiler": compiler_version(compiler_for(backend_of(machine).isa)),
        "target": machine.to_json(),
        "cpu": cpu_identity() if effort is not None else {},
        "rates": repr((rates.measured, rates.launch, rates.handed, rates.kept)) if rates else "",
        "memory": repr(rates.target) if rates else "",
        "weights": weights_digest(effort),
        "records": "" if records is None else records_digest(records),
    }
    text = json.dumps(decides, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """A value of an option as JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Range):
        return f"{value} {value.symbol} {value.made}"
    if hasattr(value, "__index__"):
        return int(value)
    return list(value)


@cache
def own_digest() -> str:
    """Of gtco's own files, which say more than its version while it is developed."""
    digest = hashlib.sha256()
    for path in own_files():
        digest.update(f"{path.relative_to(OWN)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def own_files() -> list[Path]:
    """The files of gtco, without what Python makes of them."""
    found = (path for path in OWN.rglob("*") if "__pycache__" not in path.parts)
    return sorted(path for path in found if path.is_file())


@cache
def versions() -> dict[str, str]:
    """The installed packages that have a part in a compile."""
    return {package: installed(package) or "" for package in PACKAGES}


@cache
def compiler_version(compiler: str) -> str:
    """The C compiler's path, and what it says of itself."""
    done = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, errors="replace", check=False
    )
    return f"{compiler}\n{done.stdout}"


def weights_digest(effort: Tune | None) -> str:
    """Of the language model that an effort names, which may change under one name. Whoever reads it
    later says what is wrong with a file that cannot be read.
    """
    try:
        found = Path(effort.weights).read_bytes() if effort and effort.weights else b""
    except OSError:
        found = b""
    return hashlib.sha256(found).hexdigest()


def records_digest(records: Records) -> str:
    digest = hashlib.sha256()
    for record in records.all():
        digest.update(json.dumps(asdict(record), sort_keys=True).encode())
    return digest.hexdigest()
