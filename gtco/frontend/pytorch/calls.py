"""How torch is called: it must be there, and its errors become a line."""

from __future__ import annotations

from typing import Any

from gtco.support.errors import ModelError, installing


def needed_torch() -> Any:
    try:
        import onnxscript  # noqa: F401
        import torch
        import torch.export
        import torch.onnx
    except ImportError as error:
        raise ModelError(
            f"compiling a PyTorch model needs {error.name}, which is not installed: "
            f"{installing('torch')}"
        ) from error
    return torch


def first_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None and "\n" in str(error) else error
    return next(
        (line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__
    )
