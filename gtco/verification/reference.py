"""The reference that a compiled model is compared with: ONNX Runtime, PyTorch, or a function."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import VerificationError
from gtco.support.nested import call_arguments, tensors
from gtco.support.onnx_messages import is_utf8
from gtco.verification.bfloat16 import at_the_border, in_float32, rounded
from gtco.verification.float64.judge import OnnxJudge
from gtco.verification.floors import output_floors
from gtco.verification.judge import Judge, TorchJudge
from gtco.verification.roles import Role, onnx_roles

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], Sequence[Array]]
# ONNX Runtime looks here for the external data of a model that is given as bytes.
_EXTERNAL_DATA = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Reference:
    """A model that can be run for comparison.

    - ``run``: gives the outputs in order, for inputs by name;
    - ``roles``: what the graph says of the inputs; None if there is no graph to read;
    - ``examples``: inputs that the user gave, by name;
    - ``otherwise``: runs the same model with other kernels, if there is a second way;
    - ``judge``: runs it in float64;
    - ``floors``: for each output the absolute error that its operator's accuracy allows
      (:mod:`gtco.verification.floors`); none if there is no graph to read.
    """

    name: str
    run: Run
    roles: Mapping[str, Role] | None = None
    examples: Mapping[str, Array] | None = None
    otherwise: Run | None = None
    judge: Judge | None = None
    floors: Sequence[float] = ()


def open_reference(
    reference: Any, stack: ExitStack, names: Sequence[str], example_inputs: Any = None
) -> Reference:
    """The reference, ready to run on the inputs ``names``. ``stack`` holds the objects that must
    stay alive.

    ``example_inputs``: the inputs with which a PyTorch module was compiled, as a mapping of keyword
    arguments, a sequence, or one tensor. Raises ``VerificationError`` if the reference cannot be
    run.
    """
    if isinstance(reference, str | Path | bytes) or hasattr(reference, "SerializeToString"):
        return _onnxruntime(reference, stack)
    if hasattr(reference, "graph_module") and callable(getattr(reference, "module", None)):
        args, kwargs = reference.example_inputs or ((), {})
        return _torch(reference.module(), names, args, kwargs)
    if hasattr(reference, "named_parameters"):
        _evaluation(reference, stack)
        return _torch(reference, names, *call_arguments(example_inputs))
    if callable(reference):
        return Reference("the reference", reference)
    raise VerificationError(
        f"cannot verify against a {type(reference).__name__}: "
        "give an ONNX model or a PyTorch module"
    )


def _onnxruntime(model: Any, stack: ExitStack) -> Reference:
    try:
        import onnxruntime as ort
    except ImportError:
        raise VerificationError("verifying needs ONNX Runtime: pip install onnxruntime") from None
    source = str(model) if isinstance(model, Path) else model
    if isinstance(source, str) and not is_utf8(source):
        raise VerificationError(
            f"the path '{source}' is not UTF-8, and ONNX Runtime takes no other: rename it, or "
            "give the model itself (onnx.load)"
        )

    def session(level: Any, model: Any, folder: str | None = None) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # a refused input is an expected answer here
        options.graph_optimization_level = level
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL_DATA, folder)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    levels = ort.GraphOptimizationLevel
    opened: tuple[str | bytes, str | None]
    try:
        if not isinstance(source, str | bytes):
            source = _serialized(source, stack)
        folder = None if isinstance(source, bytes) else str(Path(source).resolve().parent)
        given = _read(source)
        wide = in_float32(_whole(source, folder)) if at_the_border(given) else None
        opened = wide or source, None
        try:
            usual = session(levels.ORT_ENABLE_ALL, *opened)
        except Exception as error:
            newest = re.search(r"max supported IR version: (\d+)", str(error))
            if newest is not None:
                opened = _of_ir_version(opened[0], int(newest[1])), folder
            else:
                wide = None if wide else in_float32(_whole(source, folder))
                if wide is None:
                    raise
                opened = wide, None
            usual = session(levels.ORT_ENABLE_ALL, *opened)
        inlined = _inlined(opened[0])
    except Exception as error:
        raise VerificationError(
            f"ONNX Runtime {ort.__version__} cannot open the model, so it cannot be verified: "
            f"{str(error).strip().rstrip('.')}. {_advice(str(error))}, or compile without verifying"
        ) from error
    name = "ONNX Runtime" if wide is None else "ONNX Runtime in float32"
    if _has_attention(inlined):
        try:
            written = _attention_written_out(inlined), folder
            usual, opened = session(levels.ORT_ENABLE_ALL, *written), written
        except Exception:
            # onnx cannot write it out (caches), or its types have no kernels (bf16)
            name += " (with its own Attention)"

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        found: Sequence[Array] = usual.run(None, dict(inputs))
        return found

    def otherwise(inputs: Mapping[str, Array]) -> Sequence[Array]:
        other = session(levels.ORT_DISABLE_ALL, *opened)
        found: Sequence[Array] = other.run(None, dict(inputs))
        return found

    return Reference(
        name,
        rounded(given, run) if wide else run,
        onnx_roles(inlined.graph),
        otherwise=rounded(given, otherwise) if wide else otherwise,
        judge=OnnxJudge(lambda: _whole(*opened)),
        floors=output_floors(inlined.graph),
    )


def onnx_reference(model: Path, name: str) -> Reference:
    """What ONNX's graph and float64 say of a model whose outputs ``name`` has computed elsewhere;
    it runs nothing else.
    """

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        raise VerificationError(f"{name} is not asked again")

    graph = _inlined(str(model)).graph
    judge = OnnxJudge(lambda: _whole(str(model), None))
    return Reference(name, run, onnx_roles(graph), judge=judge, floors=output_floors(graph))


def _inlined(source: str | bytes) -> Any:
    """The ModelProto with its local functions written out and its nodes in order. External data
    stays where it is.
    """
    from gtco.support.onnx_functions import inlined
    from gtco.support.onnx_order import in_order

    return in_order(inlined(_read(source)))


def _advice(error: str) -> str:
    """What helps against an error of ONNX Runtime that opens a model."""
    if "Type Error" in error:
        return "Its types break a rule of ONNX: export or convert it again"
    return (
        "Export it for an opset that this version has (onnx.version_converter converts some), "
        "install a newer onnxruntime"
    )


def _whole(source: str | bytes, folder: str | None) -> Any:
    """The same with the external data in it. ``folder`` has the data of a model that was given as
    bytes.
    """
    import onnx.external_data_helper

    model = _inlined(source)
    if folder is None and not isinstance(source, bytes):
        folder = str(Path(source).resolve().parent)
    if folder is not None:
        onnx.external_data_helper.load_external_data_for_model(model, folder)
    return model


def _read(source: str | bytes) -> Any:
    import onnx

    if isinstance(source, bytes):
        return onnx.ModelProto.FromString(source)
    return onnx.load(source, load_external_data=False)


def _of_ir_version(source: str | bytes, version: int) -> bytes:
    """The model as an older version of the format; external data is left where it is.

    Since version 8, versions differ only by the element types and annotations that they have
    (onnx.proto lists them). So a model that uses a new one is refused as before, and the meaning
    never changes.
    """
    model = _read(source)
    model.ir_version = min(model.ir_version, version)
    return bytes(model.SerializeToString())


def _has_attention(model: Any) -> bool:
    standard = ("", "ai.onnx")
    return any(n.op_type == "Attention" and n.domain in standard for n in model.graph.node)


def _attention_written_out(model: Any) -> bytes:
    """The model with each Attention in the simpler operators that ONNX defines it by.

    If finfo.min masks a whole row of scores, ONNX Runtime's own kernel treats the row as one that
    sees nothing, and gives 0. By the definition, and in PyTorch, the row is the mean of V.
    """
    from gtco.support.onnx_functions import written_out

    return bytes(written_out(model, [("", "Attention")]).SerializeToString())


def _serialized(model: Any, stack: ExitStack) -> str | bytes:
    """A ModelProto as bytes, or as a file with external data if it is larger than
    protobuf's 2 GB.
    """
    try:
        return bytes(model.SerializeToString())
    except Exception:  # protobuf's error type differs between its implementations
        import onnx

        path = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="gtco-verify-")), "model.onnx"
        )
        copy = onnx.ModelProto()
        copy.CopyFrom(model)  # saving moves the weights out of the given proto
        onnx.save(copy, path, save_as_external_data=True, location="model.data")
        return str(path)


def _evaluation(module: Any, stack: ExitStack) -> None:
    """Sets evaluation mode until ``stack`` ends; then every part has its old mode again."""
    for part in module.modules():
        stack.callback(setattr, part, "training", part.training)
    module.eval()


def _torch(
    module: Any, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Reference:
    """Calls PyTorch as for the export, with the tensors among the arguments replaced.

    Without examples the inputs are the arguments, in order. A call may write the module's buffers.
    So each call has a copy of them: it starts as the first one did, and the module stays unchanged.
    """
    import torch
    from torch.utils import _pytree as pytree

    known = bool(args or kwargs)
    leaves, tree = pytree.tree_flatten((tuple(args if known else names), dict(kwargs)))
    places = [n for n, leaf in enumerate(leaves) if not known or _is_array(torch, leaf)]
    if len(places) != len(names):
        raise VerificationError(
            f"PyTorch's module takes {len(places)} tensors, the compiled model has the inputs "
            f"{', '.join(names)}: not the same model, or not the example inputs it was compiled "
            "with"
        )
    examples = None
    if known:
        examples = {
            name: leaf if isinstance(leaf := leaves[n], np.ndarray) else _numpy(torch, leaf)
            for name, n in zip(names, places, strict=True)
        }

    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    device = "cpu" if first is None else first.device

    def run(inputs: Mapping[str, Array], change: Any = None) -> Sequence[Array]:
        def changed(tensor: Any) -> Any:
            return change(tensor) if change and tensor.is_floating_point() else tensor

        given = list(leaves)
        for name, place in zip(names, places, strict=True):
            given[place] = changed(_tensor(torch, inputs[name]).to(device))
        arguments, keywords = pytree.tree_unflatten(given, tree)
        with torch.inference_mode():
            own = {name: changed(buffer.clone()) for name, buffer in module.named_buffers()}
            if change:
                own |= {name: changed(value) for name, value in module.named_parameters()}
            result = torch.func.functional_call(module, own, arguments, keywords)
        return [_numpy(torch, tensor) for tensor in tensors(result)]

    return Reference("PyTorch", run, examples=examples, judge=TorchJudge(run))


def _tensor(torch: Any, array: Array) -> Any:
    """A tensor with its own memory. numpy and torch have no common bfloat16."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _numpy(torch: Any, tensor: Any) -> Array:
    """A tensor of any device; a complex one as floats with a last axis of 2, as a library gives it.
    """
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return array
    return np.asarray(tensor)


def _is_array(torch: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)
