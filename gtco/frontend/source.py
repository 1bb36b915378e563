"""What a model is given as: an ONNX file or message, a torch module, or a program that torch
exported. No model is read here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gtco.support.errors import ModelError

PROGRAM = ".pt2"  # what torch.export.save writes
_ONNX = ("ModelProto", "OnnxSource")  # a message, and one that is read already


def is_onnx(model: Any) -> bool:
    if isinstance(model, str | os.PathLike):
        return Path(model).suffix != PROGRAM
    if isinstance(model, bytes | bytearray):
        return True
    if type(model).__module__.partition(".")[0] == "onnx" or type(model).__name__ in _ONNX:
        return True
    if is_program(model) or callable(getattr(model, "parameters", None)):
        return False
    raise ModelError(
        f"cannot compile a {type(model).__name__}: give an ONNX file's path, bytes or ModelProto, "
        "a torch nn.Module with example_inputs, or a torch ExportedProgram"
    )


def is_program(model: Any) -> bool:
    """True for a program that torch exported, or the path of one."""
    if isinstance(model, str | os.PathLike):
        return Path(model).suffix == PROGRAM
    return type(model).__name__ == "ExportedProgram"


def source_of(model: Any) -> Any:
    """The model, with every path as a ``Path`` and all bytes as ``bytes``. What ``gtco.quantize``
    and ``gtco.quantize_weights`` give has its ONNX model inside.
    """
    if type(model).__name__ in ("QuantizedModel", "QuantizedWeights"):
        return model.source
    if isinstance(model, str | os.PathLike):
        return Path(model)
    return bytes(model) if isinstance(model, bytearray) else model


def check_source(model: Any) -> None:
    """Raises :class:`ModelError` if a model that is a file cannot be opened."""
    if isinstance(model, Path):
        try:
            model.open("rb").close()
        except (OSError, ValueError) as error:  # no path has a zero byte
            said = getattr(error, "strerror", None) or error
            raise ModelError(f"cannot read {str(model)!r}: {said}") from error
