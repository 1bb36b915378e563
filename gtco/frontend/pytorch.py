"""PyTorch -> Relax, through ``torch.export`` and torch's own ONNX exporter (the dynamo one).

TVM's ``from_exported_program`` is not used. Measured with TVM 0.27 and torch 2.13, it translates
the plain models of ``models/``. Of eight Hugging Face models it fails on DETR (``floor_divide`` of
float by int) and, without decomposition, on every attention with a boolean mask, on SigLIP
(``conv2d.padding``) and on BEiT (``fill_``). The ONNX exporter translates all eight, and one path
is easier to keep right. Weights stay in torch's memory: only a skeleton of some kilobytes becomes
ONNX.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from gtco.frontend.dimensions import Shapes
from gtco.frontend.imported import ImportedModel
from gtco.frontend.onnx import import_skeleton
from gtco.frontend.program_writes import notes_of_writes
from gtco.frontend.torch_mistakes import refuse_mistakes
from gtco.frontend.torch_resize import keep_sizes
from gtco.frontend.torch_translations import translations
from gtco.frontend.weights import LARGE
from gtco.support.errors import ModelError, OptionError, installing
from gtco.support.nested import call_arguments, named_tensors

if TYPE_CHECKING:
    import onnx
    import torch

_OPSET = 20


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
    ExportedProgram stays as it is. The arguments are those of :func:`load_pytorch`. Raises
    OptionError for arguments that do not fit together, and ModelError if torch or onnxscript is
    missing or the export fails.
    """
    torch = _torch()
    kind = type(model).__name__
    if isinstance(model, torch.nn.Module):
        if shapes:
            raise OptionError(
                "shapes is for symbolic dimensions, and a module has none: it is compiled for the "
                "shapes of its example_inputs. Give tensors of the sizes you want, or export it "
                "with torch.export.export(..., dynamic_shapes=...) and compile that"
            )
        return Exported(*_export(torch, model, example_inputs), kind, _autocast(torch))
    if isinstance(model, torch.export.ExportedProgram):
        if example_inputs is not None:
            raise OptionError(
                "example_inputs is for modules, and an ExportedProgram brings its own: leave it "
                "out, and give sizes of dynamic dimensions as shapes"
            )
        return Exported(model, _output_names(model), kind)
    raise ModelError(f"a model is an nn.Module, an ExportedProgram or ONNX, not {kind}")


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
      ExportedProgram has its own, and so has what :func:`export` made. Arguments that are no
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


def onnx_skeleton(exported: Exported) -> tuple[onnx.ModelProto, dict[str, numpy.ndarray]]:
    """The program as ONNX by torch's exporter, and its large weights by name, which are inputs
    there. Raises ModelError, and UnsupportedError for what the exporter gets wrong.
    """
    torch = _torch()
    program: Any = exported.program
    refuse_mistakes(program)
    try:
        on = bool(exported.autocast)
        cast = getattr(torch, exported.autocast) if on else None
        with _quiet(), torch.no_grad(), torch.autocast("cpu", cast, enabled=on):
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=_OPSET,
                verbose=False,
                optimize=True,
                output_names=exported.names,
                custom_translation_table=translations(torch),
            )
        _restore_input_names(onnx_program.model, program.graph_signature.user_inputs)
        skeleton, weights = _strip(onnx_program.model)
    except ImportError as error:
        raise ModelError(f"exporting needs {error.name}: {installing('torch')}") from error
    except Exception as error:
        raise ModelError(
            f"{exported.kind} cannot be exported to ONNX: {_reason(error)}. Export it "
            "yourself with torch.onnx.export and give gtco the file"
        ) from error
    keep_sizes(skeleton)
    _name_dimensions(skeleton.graph, _dimension_names(program))
    return skeleton, weights


def load_program(path: Path) -> torch.export.ExportedProgram:
    """The program that ``torch.export.save`` wrote. torch reads it and trusts the file.

    Raises ModelError if torch is missing or cannot read a program from the file.
    """
    torch = _torch()
    try:
        with _quiet():
            return torch.export.load(path)
    except Exception as error:
        raise ModelError(
            f"torch {torch.__version__} reads no ExportedProgram from '{path}': "
            f"{_first_line(error)}. torch.export.save(torch.export.export(model, args), "
            "'model.pt2') writes one"
        ) from error


def _torch() -> Any:
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
        with _quiet(), torch.no_grad():
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
            f"torch.export cannot trace {type(model).__name__}: {_first_line(error)}. Make its "
            "forward free of control flow that depends on data, and give example_inputs in "
            "the form in which it is called"
        ) from error
    finally:
        for module in training:
            module.training = True


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
    # a constant has a value and is no output of the graph
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
            f"an array of {value.dtype} in example_inputs is no tensor: {error}"
        ) from error


def _restore_input_names(model: Any, names: Sequence[Any]) -> None:
    """Renames inputs such as ``x_orig`` to ``x``. The exporter writes ``x_orig`` if an input is an
    output too, and gives the name ``x`` to the output; the output becomes ``x_out``.
    """
    taken = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    for value in model.graph.inputs:
        name = value.name.removesuffix("_orig")
        if name == value.name or name not in names or value.name in names:
            continue
        for output in model.graph.outputs:
            if output.name == name:
                output.name = f"{name}_out"
                while output.name in taken:
                    output.name += "_out"
                taken.add(output.name)
        value.name = name


def _strip(model: Any) -> tuple[Any, dict[str, numpy.ndarray]]:
    """The exporter's model (onnx_ir) as ONNX without its large weights, and these weights as numpy
    views of torch's memory.
    """
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


def dimensions_of_program(program: Any) -> dict[str, list[tuple[str, int]]]:
    """The inputs and axes of each dynamic dimension of an ExportedProgram, by the name that
    ``shapes`` has for it.
    """
    names = _dimension_names(program)
    found: dict[str, list[tuple[str, int]]] = {}
    for tensor, axis, symbol, _ in _dynamic_axes(program):
        found.setdefault(names[symbol], []).append((tensor, axis))
    return found


def _dynamic_axes(program: Any) -> Iterator[tuple[str, int, str, Any]]:
    """The input, the axis, the symbol, and torch's node for it."""
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            symbol = getattr(getattr(size, "node", None), "expr", None)
            if symbol is not None and symbol.is_Symbol:
                yield node.name, axis, str(symbol), size.node


def _dimension_names(program: Any) -> dict[str, str]:
    """The names for the symbols of the inputs' dynamic dimensions (``s77``): the user's own names
    (``Dim("batch")``), else the first input and axis (``x.0``). A saved program has lost the user's
    names.
    """
    found: dict[str, str] = {}
    for tensor, axis, symbol, node in _dynamic_axes(program):
        if symbol in found:
            continue
        sources = getattr(node.shape_env, "var_to_sources", {}).get(node.expr, ())
        given = getattr(node.shape_env, "source_name_to_debug_name", {})
        named = [given[source.name] for source in sources if source.name in given]
        free = named and named[0] not in found.values()
        found[symbol] = named[0] if free else f"{tensor}.{axis}"
    return found


def _name_dimensions(graph: Any, names: Mapping[str, str]) -> None:
    """Puts these names for the symbols in the graph's tensors, also in expressions (``2*s77``)."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), dim.dim_param)


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None and "\n" in str(error) else error
    return next(
        (line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__
    )


def _reason(error: BaseException) -> str:
    """The error of torch's exporter, and its first cause: torch names a node and refers to a stack
    trace, and only the first cause says what is wrong with it.
    """
    said, first = _first_line(error), error
    while first.__cause__ is not None:
        first = first.__cause__
    said = said.removesuffix(".").removesuffix("See the stack trace for more information").strip()
    why = _first_line(first)
    return said.rstrip(".") if why in said or said in why else f"{said.rstrip('.')}: {why}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporters' progress lines, warnings and log records; errors still raise."""
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)  # torch logs the traceback of an error that it then raises
        try:
            yield
        finally:
            logging.disable(disabled)
