"""Files that later runs use again because making them takes long: exports and quantized models.
Beside each lies a note of what made it, ``FILE.made``; a file without one is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from gtco.support.version import __version__, installed

About = Mapping[str, object]


def exporters() -> About:
    """What an export depends on."""
    packages = {name: installed(name) for name in ("torch", "onnx", "transformers")}
    return {"gtco": __version__, **packages}


def digest(file: Path) -> str:
    """Of a file's contents."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def current(file: Path, about: About) -> bool:
    """True if the file is there and was made as ``about`` says."""
    try:
        return file.exists() and json.loads(_note(file).read_text()) == about
    except (OSError, ValueError):
        return False


def note(file: Path, about: About) -> None:
    """Notes what has made the file."""
    _note(file).write_text(json.dumps(about))


def _note(file: Path) -> Path:
    return file.with_name(f"{file.name}.made")
