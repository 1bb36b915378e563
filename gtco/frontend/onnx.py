"""ONNX -> Relax: read, check, simplify, translate, with an error that says what to do at every
step.

The order: read without the weights' data, take the large initializers out (``weights.strip``), run
onnx's checker on the skeleton, give symbolic dimensions their values, write out loops and the
operators of ONNX Runtime (``expansion``), simplify in a child process, list every unsupported
operator, and only then let TVM's importer translate.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google.protobuf.message
import numpy
import onnx
import onnx.inliner
from onnx import helper

from gtco.frontend.expansion import EXPANDED, adopt, expand
from gtco.frontend.imported import ImportedModel
from gtco.frontend.messages import MAX_ELEMENTS, check_functions, check_text, nodes
from gtco.frontend.schema_functions import write_out
from gtco.frontend.simplify import simplify as run_onnxsim
from gtco.frontend.weights import strip
from gtco.support.errors import ModelError, ShapeError, UnsupportedError
from gtco.tensor.stage import ITEM_BYTES, TensorType

_DTYPES = frozenset(
    getattr(onnx.TensorProto, {"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper()))
    for name in ITEM_BYTES
)
_STANDARD = ("", "ai.onnx")
# Operators of ONNX Runtime's own domain that TVM's importer reads with that domain's meaning.
_MICROSOFT = ("Gelu", "FastGelu", "BiasGelu", "SkipLayerNormalization")


def load_onnx(
    source: str | Path | bytes | onnx.ModelProto,
    *,
    shapes: Mapping[str, int] | None = None,
    simplify: bool = True,
    simplify_timeout: float = 120,
) -> ImportedModel:
    """The model as Relax, with every dimension a number.

    ``shapes`` gives symbolic dimensions their values, by name (``{"batch": 1}``) or, for one
    without a name, by input and axis (``{"image.0": 1}``). Raises ModelError (unreadable, invalid,
    data missing, TVM cannot translate it), ShapeError (symbolic dimensions without a value, unknown
    names in ``shapes``) and UnsupportedError (every unsupported operator).
    """
    model, path = _read(source)
    check_text(model)
    if model.functions:
        check_functions(model)
        model = onnx.inliner.inline_local_functions(model)
    skeleton, weights = strip(model, path)
    del model
    return import_skeleton(
        skeleton, weights, shapes=shapes, simplify=simplify, simplify_timeout=simplify_timeout
    )


def import_skeleton(
    skeleton: onnx.ModelProto,
    weights: Mapping[str, numpy.ndarray],
    *,
    shapes: Mapping[str, int] | None = None,
    simplify: bool = True,
    simplify_timeout: float = 120,
) -> ImportedModel:
    """The rest of ``load_onnx``, from a model whose large weights are graph inputs (``weights`` by
    name). Changes it."""
    adopt(skeleton)
    _check(skeleton)
    _set_shapes(skeleton, weights, dict(shapes or {}))
    notes: list[str] = []
    try:
        skeleton = expand(skeleton)
    except UnsupportedError:
        _refuse_unsupported(skeleton)  # what has no rule at all comes first, in one list
        raise
    skeleton = write_out(skeleton, _supported())
    if simplify:
        skeleton, note = run_onnxsim(skeleton, simplify_timeout)
        notes += [note] if note else []
    _refuse_unsupported(skeleton)
    module, labels = _translate(skeleton)
    inside = _initializers(skeleton)
    names = [value.name for value in skeleton.graph.input if value.name not in inside]
    parameters = {p.name: name for p, name in zip(module["main"].params, names, strict=True)}
    return ImportedModel(
        module=module,
        inputs={
            v.name: _type(v)
            for v in skeleton.graph.input
            if v.name in names and v.name not in weights
        },
        outputs=tuple(value.name for value in skeleton.graph.output),
        weights={name: weights[name] for name in names if name in weights},
        parameters=parameters,
        opset=_opset(skeleton),
        producer=f"{skeleton.producer_name} {skeleton.producer_version}".strip(),
        notes=tuple(notes),
        names=labels,
    )


def _initializers(model: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in _STANDARD), 1)


def _read(source: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """The message, without external data, and the model's file, which that data lies beside."""
    if isinstance(source, onnx.ModelProto):
        return source, None
    path: Path | None = None
    label = "the bytes given"
    if isinstance(source, str | Path):
        path = Path(source)
        label = f"'{path}'"
        try:
            source = path.read_bytes()
        except ValueError as error:  # a zero byte in the name
            raise ModelError(f"cannot read {label!r}: {error}") from error
        except OSError as error:
            raise ModelError(f"cannot read {label}: {error.strerror or error}") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(source)
    except google.protobuf.message.DecodeError as error:
        raise ModelError(
            f"{label} is not an ONNX model, or is cut short ({len(source)} bytes do not parse): "
            "export it again, or check that the copy or download was complete"
        ) from error
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError(f"{label} is not an ONNX model: it holds no graph ({len(source)} bytes)")
    return model, path


def _check(model: onnx.ModelProto) -> None:
    if not model.graph.output:
        raise ModelError("the model has no outputs: there is nothing to compile")
    names = [value.name for value in model.graph.output]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(
            f"the model lists outputs more than once: {', '.join(map(repr, twice))}. Outputs are "
            "told apart by their names: remove the repetition, or give the second out by an "
            "Identity of another name"
        )
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        # Operators of other domains have no schema there; they get the message that lists all
        # unsupported ones.
        if "No Op registered for" in str(error) or "No opset import for domain" in str(error):
            _refuse_unsupported(model)
        raise ModelError(f"the model fails ONNX's checker: {str(error).strip()}") from error


def _set_shapes(model: onnx.ModelProto, weights: Mapping[str, Any], shapes: dict[str, int]) -> None:
    """Write numbers into the inputs' symbolic dimensions; intermediate shapes are dropped, the
    importer infers them."""
    known: dict[str, list[str]] = {}
    inside = _initializers(model)
    for value in model.graph.input:
        if value.name in weights or value.name in inside:
            continue
        if not value.type.HasField("tensor_type"):
            raise UnsupportedError(
                f"input '{value.name}' is no tensor ({value.type.WhichOneof('value')}); gtco "
                "compiles models of tensors alone"
            )
        if value.type.tensor_type.elem_type not in _DTYPES:
            number = value.type.tensor_type.elem_type
            spelt = {n: name for name, n in onnx.TensorProto.DataType.items()}
            dtype = spelt.get(number, f"number {number}")
            raise UnsupportedError(
                f"input '{value.name}' has elements of type {dtype.lower()}, which gtco has not; "
                f"it has {', '.join(ITEM_BYTES)}"
            )
        if not value.type.tensor_type.HasField("shape"):
            raise ShapeError(
                f"input '{value.name}' has no shape at all, not even a rank: export the model with "
                "shapes"
            )
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                if dim.dim_value > 0:
                    continue
                if dim.dim_value < 0:
                    raise ModelError(
                        f"input '{value.name}' is damaged: axis {axis} has size {dim.dim_value}. "
                        "Export the model again"
                    )
                raise ShapeError(
                    f"input '{value.name}' is empty: axis {axis} has size {dim.dim_value}. Export "
                    "the model with sizes of 1 or more"
                )
            name = dim.dim_param or f"{value.name}.{axis}"
            known.setdefault(name, []).append(f"{value.name} axis {axis}")
            size = shapes.get(name, shapes.get(f"{value.name}.{axis}"))
            if size is not None:
                if size < 1:
                    raise ShapeError(f"--shape {name}={size}: a size is 1 or more")
                dim.dim_value = size
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if math.prod(sizes) > MAX_ELEMENTS:
            raise ShapeError(
                f"input '{value.name}' would have {math.prod(sizes):.1e} elements "
                f"({sizes}): give smaller sizes, or export the model again"
            )
    unknown = [name for name in shapes if name not in known and not _is_axis(name, known)]
    if unknown:
        raise ShapeError(
            f"the model has no symbolic dimension named {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(map(repr, known)) or 'none'}"
        )
    missing = {name: where for name, where in known.items() if _unset(model, name)}
    if missing:
        listed = "; ".join(f"'{name}' ({', '.join(where)})" for name, where in missing.items())
        flags = " ".join(
            f"--shape {name}={'1' if 'batch' in name.lower() else 'SIZE'}" for name in missing
        )
        raise ShapeError(
            f"symbolic dimensions without a value: {listed}. Give each a size: {flags} "
            f"(in Python: shapes={{{', '.join(f'{name!r}: ...' for name in missing)}}})"
        )
    if known:
        del model.graph.value_info[:]
        for value in model.graph.output:
            if value.type.HasField("tensor_type"):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param:
                        size = shapes.get(dim.dim_param)
                        dim.ClearField("dim_param")
                        if size is not None:
                            dim.dim_value = size


def _is_axis(name: str, known: Mapping[str, list[str]]) -> bool:
    tensor, _, axis = name.rpartition(".")
    return any(f"{tensor} axis {axis}" in where for where in known.values())


def _unset(model: onnx.ModelProto, name: str) -> bool:
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if name in (dim.dim_param or None, f"{value.name}.{axis}") and not dim.dim_value:
                return True
    return False


def _type(value: onnx.ValueInfoProto) -> TensorType:
    tensor = value.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return TensorType(tuple(dim.dim_value for dim in tensor.shape.dim), str(dtype))


def _supported() -> set[str]:
    """The standard operators that TVM's importer or ours reads."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    from gtco.frontend.onnx_importer import OVERRIDES

    return {*_get_convert_map(), *OVERRIDES}


# Imported, but the size of their outputs depends on values: no artifact can plan for that.
_DATA_DEPENDENT = {"NonZero", "Unique"}


def _refuse_unsupported(model: onnx.ModelProto) -> None:
    """One UnsupportedError that lists each operator gtco cannot compile, its count and its
    nodes."""
    supported = _supported()
    found: dict[str, list[str]] = {}
    for node in nodes(model.graph):
        standard = node.domain in _STANDARD
        known = (
            (standard and node.op_type in supported - _DATA_DEPENDENT)
            or (node.domain == "com.microsoft" and node.op_type in _MICROSOFT)
            or ("" if standard else node.domain, node.op_type) in EXPANDED
        )
        if not known:
            label = (
                f"{node.domain}::{node.op_type}" if node.domain not in _STANDARD else node.op_type
            )
            found.setdefault(label, []).append(
                node.name or (node.output[0] if node.output else "(unnamed)")
            )
    if found:
        lines = [
            f"  {label} ({len(nodes)}): {', '.join(nodes[:5])}{', ...' if len(nodes) > 5 else ''}"
            for label, nodes in sorted(found.items())
        ]
        advice = (
            "Replace them in the model, or cut the graph before them (onnx.utils.extract_model)"
        )
        if any(label.startswith("com.microsoft.nchwc::") for label in found):
            advice = (
                "Operators of com.microsoft.nchwc hold weights in the order of one machine: let "
                "ONNX Runtime save its optimized model with ORT_ENABLE_EXTENDED, not "
                "ORT_ENABLE_ALL. "
                f"Others: {advice[0].lower()}{advice[1:]}"
            )
        raise UnsupportedError(
            "the model uses operators that gtco does not support:\n"
            + "\n".join(lines)
            + f"\n{advice}"
        )


def _translate(model: onnx.ModelProto) -> tuple[Any, dict[str, str]]:
    """The Relax module, and the node's name by Relax variable. Parameters are the graph's inputs in
    order. Raises ModelError naming the node."""
    from gtco.frontend.onnx_importer import Importer, Refused

    for node in model.graph.node:
        node.name = node.name or (node.output[0] if node.output else "")
    importer = Importer()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importer.from_onnx(model.graph, _opset(model)), importer.labels
    except Refused as reason:
        raise UnsupportedError(f"{importer.node}: {reason}") from reason
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ModelError(
            f"{importer.node} cannot be translated: {message}. Check the operator's inputs and the "
            "shapes given with --shape"
        ) from error
