"""PyTorch -> Relax, by way of ``torch.export`` and torch's own ONNX exporter (the dynamo one).

Why not TVM's ``from_exported_program``: measured with TVM 0.27 and torch 2.13 it translates the
plain models of ``models/``, but of eight Hugging Face models it fails on DETR (``floor_divide`` of
float by int) and, without decomposition, on every attention with a boolean mask, on SigLIP
(``conv2d.padding``) and on BEiT (``fill_``); the ONNX exporter takes all eight, and then there is
one path to keep right. Weights stay where torch has them: only a skeleton of some kilobytes becomes
ONNX.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from gtco.errors import ModelError
from gtco.frontend.imported import ImportedModel
from gtco.frontend.onnx import import_skeleton
from gtco.frontend.weights import LARGE

if TYPE_CHECKING:
    import torch

_OPSET = 20


def load_pytorch(
    model: torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | Mapping[str, Any] | Any = (),
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    simplify: bool = True,
    simplify_timeout: float = 120,
) -> ImportedModel:
    """The model as Relax, for inputs of the shapes and dtypes of ``example_inputs``.

    ``example_inputs`` is a tensor, a sequence of them, or a mapping of keyword arguments; an
    ExportedProgram brings its own. A module in training mode is exported in evaluation mode and set
    back. Raises ModelError where torch or onnxscript is missing or the export fails.
    """
    torch = _torch()
    program: Any = model
    if isinstance(model, torch.nn.Module):
        program = _export(torch, model, example_inputs)
    elif not isinstance(model, torch.export.ExportedProgram):
        raise ModelError(
            f"a model is an nn.Module, an ExportedProgram or ONNX, not {type(model).__name__}"
        )
    names = {
        key: list(value)
        for key, value in (("input_names", input_names), ("output_names", output_names))
        if value
    }
    try:
        with _quiet(), torch.no_grad():
            onnx_program = torch.onnx.export(
                program, dynamo=True, opset_version=_OPSET, verbose=False, optimize=True, **names
            )
        skeleton, weights = _strip(onnx_program.model)
    except ImportError as error:
        raise ModelError(f"exporting needs {error.name}: pip install 'gtco[torch]'") from error
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be exported to ONNX: {_first_line(error)}. Export it "
            "yourself with "
            "torch.onnx.export and give gtco the file"
        ) from error
    return import_skeleton(skeleton, weights, simplify=simplify, simplify_timeout=simplify_timeout)


def _torch() -> Any:
    try:
        import onnxscript  # noqa: F401
        import torch
        import torch.export
        import torch.onnx
    except ImportError as error:
        raise ModelError(
            f"compiling a PyTorch model needs {error.name}, which is not installed: "
            "pip install 'gtco[torch]'"
        ) from error
    return torch


def _export(torch: Any, model: Any, example_inputs: Any) -> Any:
    """``torch.export`` of the module in evaluation mode; its training flags are set back."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = {key: _tensor(torch, value) for key, value in example_inputs.items()}
    elif isinstance(example_inputs, torch.Tensor | numpy.ndarray):
        args = (_tensor(torch, example_inputs),)
    else:
        args = tuple(_tensor(torch, value) for value in example_inputs)
    if not args and not kwargs:
        raise ModelError(
            "example_inputs is empty: give tensors of the shapes the model will run with, for "
            "example "
            "torch.randn(1, 3, 224, 224)"
        )
    training = [module for module in model.modules() if module.training]
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(model.eval(), args, kwargs)
    except Exception as error:
        raise ModelError(
            f"torch.export cannot trace {type(model).__name__}: {_first_line(error)}. Make its "
            "forward free of "
            "control flow that depends on data"
        ) from error
    finally:
        for module in training:
            module.training = True


def _tensor(torch: Any, value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value


def _strip(model: Any) -> tuple[Any, dict[str, numpy.ndarray]]:
    """The exporter's model (onnx_ir) as ONNX without its large weights, and those as numpy views of
    torch's memory."""
    import onnx_ir

    weights: dict[str, numpy.ndarray] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < LARGE or not tensor.dtype.is_floating_point():
            continue
        weights[name] = tensor.numpy()
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    return onnx_ir.to_proto(model), weights


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None and "\n" in str(error) else error
    return next(
        (line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the exporters' progress lines, warnings and log records; errors still raise."""
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
