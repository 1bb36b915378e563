"""The sizes that a model leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gtco.frontend.source import check_source, is_onnx, source_of


def open_dimensions(model: Any) -> dict[str, list[tuple[str, int]]]:
    """The symbolic dimensions of an ONNX file, or of an ExportedProgram, as ``shapes`` and ``dims``
    name them, with the inputs and axes that have each of them.
    """
    model = source_of(model)
    check_source(model)
    if is_onnx(model):
        from gtco.frontend.onnx import dimensions_of

        return dimensions_of(model)
    from gtco.frontend.pytorch.dimensions import dimensions_of_program
    from gtco.frontend.pytorch.export import load_program

    return dimensions_of_program(load_program(model) if isinstance(model, Path) else model)
