"""A PyTorch module -> a program, through ``torch.export``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from gtco.frontend.dimensions import Shapes
from gtco.frontend.pytorch.calls import first_line, needed_torch
from gtco.support.errors import ModelError, OptionError
from gtco.support.nested import call_arguments, named_tensors
from gtco.support.quiet import quiet

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Exported:
    """A program, the names of its outputs (None: torch's own), and what the model was.

    ``autocast``: the type that torch's autocast computes in where the module was given, "" if it is
    off. The program does not say so: its operators are cast when it becomes ONNX.
    """

    program: torch.export.ExportedProgram
    names: list[str] | None
    kind: str
    autocast: str = ""


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | Mapping[str, Any] | Any = None,
    *,
    shapes: Shapes | None = None,
) -> Exported:
    """The model as a program, for inputs of the shapes and dtypes of ``example_inputs``; an
    ExportedProgram stays as it is. The arguments are those of
    :func:`gtco.frontend.pytorch.load.load_pytorch`. Raises
    OptionError for arguments that do not fit together, and ModelError if torch or onnxscript is
    missing or the export fails.
    """
    torch = needed_torch()
    kind = type(model).__name__
    if isinstance(model, torch.nn.Module):
        if shapes:
            raise OptionError(
                "shapes is for symbolic dimensions, and a module has none: it is compiled for the "
                "shapes of its example_inputs. Give tensors of the sizes you want, or export it "
                "with torch.export.export(..., dynamic_shapes=...) and compile that"
            )
        program, names = _export(torch, model, example_inputs)
        _check_constants(torch, program)
        return Exported(program, names, kind, _autocast(torch))
    if isinstance(model, torch.export.ExportedProgram):
        if example_inputs is not None:
            raise OptionError(
                "example_inputs is for modules, and an ExportedProgram brings its own: leave it "
                "out, and give sizes of dynamic dimensions as shapes"
            )
        _check_constants(torch, model)
        return Exported(model, _output_names(model), kind)
    raise ModelError(f"a model is an nn.Module, an ExportedProgram or ONNX, not {kind}")


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The program that ``torch.export.save`` wrote. torch reads it and trusts the file.

    Raises ModelError if torch is missing or cannot read a program from the file.
    """
    torch = needed_torch()
    try:
        with quiet():
            return torch.export.load(path)
    except Exception as error:
        raise ModelError(
            f"torch {torch.__version__} reads no ExportedProgram from '{path}': "
            f"{first_line(error)}. torch.export.save(torch.export.export(model, args), "
            "'model.pt2') writes one"
        ) from error


def _check_constants(torch: Any, program: Any) -> None:
    """Raises ModelError for a constant without a value. torch.export makes one of a tensor that
    torch.func differentiates by.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor) and is_wrapped(value):
            raise ModelError(
                f"torch.export keeps no value of a tensor that torch.func differentiates by "
                f"('{name}'), so its program is not the model's: write the derivative out, or "
                "leave it outside of the compiled model"
            )


def _autocast(torch: Any) -> str:
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")


def _export(torch: Any, model: Any, example_inputs: Any) -> tuple[Any, list[str] | None]:
    """``torch.export`` of the module in evaluation mode, and the names of its outputs. The module's
    training flags are set back.
    """
    from torch.utils import _pytree as pytree

    args, kwargs = pytree.tree_map(_tensor, call_arguments(example_inputs))
    if not args and not kwargs:
        raise ModelError(
            "a PyTorch module is compiled for the shapes of example_inputs, and there are none: "
            "give tensors of the shapes the model will run with, for example "
            "compile_model(model, (torch.randn(1, 3, 224, 224),)), or a dictionary of keyword "
            "arguments"
        )
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"{type(model).__name__} is on the meta device, where weights have no values: load "
            "them first, as with module.to_empty(device='cpu') and module.load_state_dict(...)"
        )
    training = [module for module in model.modules() if module.training]
    try:
        with quiet(), torch.no_grad():
            model.eval()
            try:
                program = torch.export.export(model, args, kwargs)
                if not _has_plain_outputs(program):
                    return program, _output_names(program)
            except Exception as first:
                # most often these are dataclasses that torch does not know
                try:
                    return _export_tensors(torch, model, args, kwargs)
                except Exception:
                    raise first from None
            return _export_tensors(torch, model, args, kwargs)
    except Exception as error:
        raise ModelError(
            f"torch.export cannot trace {type(model).__name__}: {first_line(error)}. Make its "
            "forward free of control flow that depends on data, and give example_inputs in "
            f"the form in which it is called{_other_ways(error)}"
        ) from error
    finally:
        for module in training:
            module.training = True


def _other_ways(error: Exception) -> str:
    """What else to try, where torch.export took a tensor's values for unknown. It does so with
    those of constants too, such as the grid of patches in Qwen2-VL.
    """
    if "data-dependent" not in str(error):
        return ""
    return (
        ". If they are values of constants alone, torch.onnx.export(model, args, 'model.onnx', "
        "dynamo=False) writes a file with them, and torch.compile(model, backend='gtco') runs "
        "what cannot be traced in Python"
    )


def _export_tensors(
    torch: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[str] | None]:
    """Exports the module with a forward that returns only the tensors of its output.

    torch.export refuses dataclasses that are not registered with it, and the ONNX exporter refuses
    numbers and strings.
    """
    names: list[str] = []

    class Tensors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = list(named_tensors(self.module(*args, **kwargs)))
            names[:] = [name for name, _ in found]
            return tuple(tensor for _, tensor in found)

    try:
        called = inspect.signature(model.forward)
        kinds = {p.kind for p in called.parameters.values()}
        if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            # by keyword, in the given order: the inputs get their names from it
            args, kwargs = (), {**called.bind_partial(*args).arguments, **kwargs}
    except (TypeError, ValueError):
        pass  # a forward without a signature is called with the inputs as given
    program = torch.export.export(Tensors().eval(), args, kwargs)
    return program, _usable(names, program)


def _has_plain_outputs(program: Any) -> bool:
    """True if it returns numbers or strings beside tensors."""
    return any(
        getattr(spec.arg, "value", None) is not None
        for spec in program.graph_signature.output_specs
    )


def _output_names(program: Any) -> list[str] | None:
    """The names of the outputs: the keys of their dictionary or dataclass. None if there are no
    keys, or if they cannot be used.
    """
    from torch.utils import _pytree as pytree

    user = [s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    # a constant has a value and is not an output of the graph
    leaves = [None if hasattr(s.arg, "value") else _Leaf() for s in user]
    try:
        value = pytree.tree_unflatten(leaves, program.call_spec.out_spec)
    except Exception:
        return None  # a user's class that takes only tensors
    return _usable([name for name, _ in named_tensors(value)], program)


class _Leaf:
    """A placeholder for a tensor in the structure of an output."""

    def __dlpack__(self) -> None: ...


def _usable(names: list[str], program: Any) -> list[str] | None:
    """The names, if they are all different and no input has one of them; else None."""
    taken = set(program.graph_signature.user_inputs)
    if len(set(names)) < len(names) or taken & set(names):
        return None
    return None if any(name.isdigit() or not name for name in names) else names


def _tensor(value: Any) -> Any:
    """A tensor or array as a new tensor; any other value as it is.

    If a tensor is given twice, or a module's own tensor is given to it, torch.export makes one
    input of them, and leaves one of the two without effect. torch also refuses arrays with negative
    strides.
    """
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            raise ModelError(
                f"example_inputs holds a tensor of {value.layout} and {value.dtype}: gtco takes "
                "dense tensors of real numbers; convert it with to_dense, view_as_real or "
                "dequantize, and let the module take that"
            )
        return value.detach().clone()
    if not isinstance(value, numpy.ndarray):
        return value
    try:
        return torch.from_numpy(numpy.array(value, order="C"))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"an array of {value.dtype} in example_inputs is not a tensor: {error}"
        ) from error
