"""PyTorch -> Relax, through ``torch.export`` and torch's own ONNX exporter (the dynamo one).

TVM's ``from_exported_program`` is not used. Measured with TVM 0.27 and torch 2.13, it translates
the plain models of ``models/``. Of eight Hugging Face models it fails on DETR (``floor_divide`` of
float by int) and, without decomposition, on every attention with a boolean mask, on SigLIP
(``conv2d.padding``) and on BEiT (``fill_``). The ONNX exporter translates all eight, and one path
is easier to keep right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gtco.frontend.dimensions import Shapes
from gtco.frontend.imported import ImportedModel
from gtco.frontend.onnx import import_skeleton
from gtco.frontend.pytorch.export import Exported, export
from gtco.frontend.pytorch.program_writes import notes_of_writes
from gtco.frontend.pytorch.skeleton import onnx_skeleton

if TYPE_CHECKING:
    import torch


def load_pytorch(
    model: torch.nn.Module | torch.export.ExportedProgram | Exported,
    example_inputs: Sequence[Any] | Mapping[str, Any] | Any = None,
    *,
    shapes: Shapes | None = None,
    simplify: bool = True,
    simplify_timeout: float = 120,
    float16: bool = True,
) -> ImportedModel:
    """The model as Relax, for inputs of the shapes and dtypes of ``example_inputs``.

    - ``example_inputs`` is a tensor, a sequence of tensors, or a mapping of keyword arguments. An
      ExportedProgram has its own, and so has what :func:`export` made. Arguments that are not
      tensors become part of the model.
    - ``shapes`` gives the dynamic dimensions of an ExportedProgram their values.
    - bfloat16 in the model, and without ``float16`` also float16, is computed in float32.

    A module in training mode is exported in evaluation mode and then set back. Outputs in
    dictionaries or dataclasses get the names of their keys; None, numbers and strings among them
    are left out. Notes say which of its own tensors and inputs the module changes, which a library
    does not do. Raises as :func:`export` does.
    """
    exported = (
        model if isinstance(model, Exported) else export(model, example_inputs, shapes=shapes)
    )
    notes = notes_of_writes(exported.program)
    skeleton, weights = onnx_skeleton(exported)
    imported = import_skeleton(
        skeleton,
        weights,
        shapes=shapes,
        simplify=simplify,
        simplify_timeout=simplify_timeout,
        float16=float16,
        symbols=True,
    )
    return replace(imported, notes=(*notes, *imported.notes))
