"""ONNX -> Relax: read, check, simplify, translate. The error of every step says what to do.

The order:

- read the model without the weights' data, and take the large initializers out (``weights.strip``);
- give symbolic dimensions their sizes;
- run onnx's checker on the skeleton;
- widen integers of 4 bits (``narrow``), and check the scales of quantized operators (``scales``);
- write out loops and the operators of ONNX Runtime (``expansion``);
- simplify in a child process;
- list every unsupported operator;
- let TVM's importer translate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import google.protobuf.message
import numpy
import onnx
from onnx import helper

from gtco.frontend import formats, quantized
from gtco.frontend.bfloat16_products import all_in_bfloat16
from gtco.frontend.dimensions import Shapes, infer_outputs, inputs_of, open_axes, set_sizes
from gtco.frontend.expansion import adopt, expand, needs_expansion
from gtco.frontend.identity import identity
from gtco.frontend.imported import ImportedModel
from gtco.frontend.model_check import (
    STANDARD,
    check_initializers,
    check_model,
    check_opset,
    check_outputs,
    check_sparse,
    refuse_unsupported,
    require_type,
    supported_operators,
)
from gtco.frontend.narrow import widen_integers
from gtco.frontend.nbits import unpack
from gtco.frontend.node_check import check_splits
from gtco.frontend.scales import check_scales
from gtco.frontend.schema_functions import write_out
from gtco.frontend.simplify import simplify as run_onnxsim
from gtco.frontend.unknown_outputs import simplified
from gtco.frontend.weights import files_of, strip
from gtco.support.errors import ModelError, UnsupportedError
from gtco.support.later import Later
from gtco.support.onnx_float32 import widen
from gtco.support.onnx_functions import inlined
from gtco.support.onnx_messages import check_functions, check_text
from gtco.support.onnx_order import in_order
from gtco.support.quiet import quiet
from gtco.tensor.stage import TensorType


@dataclass(frozen=True)
class OnnxSource:
    """A model as it was read: the message without its large weights, which are inputs there, and
    these by name. ``files``: those with the data of weights that are not in the message.
    """

    skeleton: onnx.ModelProto
    weights: Mapping[str, numpy.ndarray | Later]
    identity: str
    files: frozenset[Path] = frozenset()


Source: TypeAlias = str | Path | bytes | onnx.ModelProto | OnnxSource


def read_onnx(source: Source) -> OnnxSource:
    """Reads the model, of which :func:`load_onnx` may then make several. Raises ModelError."""
    if isinstance(source, OnnxSource):
        return source
    model, path = read_message(source)
    known = identity(model)
    check_text(model)
    check_functions(model)
    skeleton, weights = strip(in_order(inlined(model)), path)
    return OnnxSource(skeleton, weights, known, files_of(weights))


def dimensions_of(source: Source) -> dict[str, list[tuple[str, int]]]:
    """The inputs and axes of each dimension without a size, by the dimension's name. Raises as
    :func:`read_onnx` does.
    """
    read = read_onnx(source)
    found: dict[str, list[tuple[str, int]]] = {}
    for axis in open_axes(_inputs(read.skeleton, read.weights), symbols=False):
        found.setdefault(axis.name, []).append((axis.input, axis.axis))
    return found


def load_onnx(
    source: Source,
    *,
    shapes: Shapes | None = None,
    simplify: bool = True,
    simplify_timeout: float = 120,
    float16: bool = True,
) -> ImportedModel:
    """The model as Relax, with every dimension a number.

    ``shapes`` gives sizes (:mod:`gtco.frontend.dimensions` has the rules) to:

    - a symbolic dimension, by name (``{"batch": 1}``);
    - a dimension without a name, by input and axis (``{"image.0": 1}``);
    - an input, as its whole shape (``{"image": (1, 3, 96, 96)}``).

    bfloat16 in the file, and without ``float16`` also float16, is computed in float32
    (:mod:`gtco.support.onnx_float32`).
    Raises ModelError (unreadable, invalid, data missing, TVM cannot translate it), ShapeError
    (sizes that are missing or do not fit) and UnsupportedError (every unsupported operator).
    """
    if isinstance(source, OnnxSource):
        skeleton = onnx.ModelProto()
        skeleton.CopyFrom(source.skeleton)  # the import changes it
    else:
        source = read_onnx(source)
        skeleton = source.skeleton
    imported = import_skeleton(
        skeleton,
        source.weights,
        shapes=shapes,
        simplify=simplify,
        simplify_timeout=simplify_timeout,
        float16=float16,
    )
    return replace(imported, identity=source.identity)


def import_skeleton(
    skeleton: onnx.ModelProto,
    weights: Mapping[str, numpy.ndarray | Later],
    *,
    shapes: Shapes | None,
    simplify: bool,
    simplify_timeout: float,
    float16: bool,
    symbols: bool = False,
) -> ImportedModel:
    """The rest of ``load_onnx``, for a model whose large weights are graph inputs (``weights`` by
    name). Changes the model. ``symbols``: see :func:`gtco.frontend.dimensions.set_sizes`.
    """
    adopt(skeleton)
    check_outputs(skeleton)
    check_opset(skeleton)
    check_sparse(skeleton)
    sizes = set_sizes(_inputs(skeleton, weights), shapes or {}, symbols=symbols)
    if sizes is not None:
        del skeleton.graph.value_info[:]  # it may have other sizes
    check_splits(skeleton)
    unknown = infer_outputs(skeleton, sizes)
    check_model(skeleton)
    notes = [said] if (said := quantized.note(skeleton)) else []
    skeleton, weights = widen_integers(*unpack(skeleton, weights))
    check_scales(skeleton, weights)
    widened, unsimplified = False, False

    def onnxsim(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
        return run_onnxsim(model, simplify_timeout)

    given, bfloat16 = skeleton, False
    skeleton, weights, narrow = widen(given, weights, onnx.TensorProto.BFLOAT16)
    if narrow:
        bfloat16, said_of_products = all_in_bfloat16(given)
        notes += said_of_products
    if not float16:
        skeleton, weights, widened = widen(skeleton, weights)
    try:
        skeleton = _written_out(skeleton)
    except (ModelError, UnsupportedError):
        if simplify:
            # onnxsim removes unused operators, and folds more than sizes and counts
            skeleton = simplified(skeleton, unknown, onnxsim)[0]
        undecided: list[str] = []
        skeleton = _written_out(skeleton, undecided)
        more = len(undecided) - 3
        notes += [*undecided[:3], *([f"{more} other Ifs are like these"] if more > 0 else [])]
    if simplify:
        skeleton, note = simplified(skeleton, unknown, onnxsim)
        unsimplified = bool(note)
        notes += [note] if note else []
    refuse_unsupported(skeleton)
    check_initializers(skeleton)
    module, labels = _translate(skeleton, unknown)
    names = [value.name for value in inputs_of(skeleton.graph)]
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
        unsimplified=unsimplified,
        names=labels,
        operators={node.name: node.op_type for node in skeleton.graph.node},
        float16=widened,
        bfloat16=bfloat16,
    )


def _written_out(
    model: onnx.ModelProto, undecided: list[str] | None = None
) -> onnx.ModelProto:
    """The model in operators that the importer reads, as far as there are rules. ONNX's own
    definitions may hold loops and conditions (LinearAttention, AffineGrid), so the rules are
    applied again. ``undecided``: see :func:`gtco.frontend.expansion.expand`.
    """
    while True:
        try:
            model = expand(model, undecided)
        except (ModelError, UnsupportedError):
            refuse_unsupported(model)  # operators without any rule come first, in one list
            raise
        model = write_out(model, supported_operators())
        if not needs_expansion(model):
            return model


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 1)


def read_message(
    source: str | Path | bytes | onnx.ModelProto,
) -> tuple[onnx.ModelProto, Path | None]:
    """The message without its external data, and the model's file. The external data is beside that
    file. Raises ModelError.
    """
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
        if said := formats.advice(path):
            raise ModelError(f"{label} is not an ONNX model: {said}") from error
        raise ModelError(
            f"{label} is not an ONNX model, or is cut short ({len(source)} bytes do not parse): "
            "export it again, or check that the copy or download was complete"
        ) from error
    if not model.HasField("graph") or not model.ir_version:
        if said := formats.advice(path):
            raise ModelError(f"{label} is not an ONNX model: {said}")
        raise ModelError(f"{label} is not an ONNX model: it holds no graph ({len(source)} bytes)")
    return model, path


def not_a_tensor(what: str, value: onnx.ValueInfoProto) -> UnsupportedError:
    """The error for an input or output that is not a tensor. ``what`` is "input" or "output"."""
    kind = value.type.WhichOneof("value")
    found = "of no type" if kind in (None, "tensor_type") else kind
    return UnsupportedError(
        f"{what} '{value.name}' is not a tensor ({found}); gtco compiles only models of tensors"
    )


def _inputs(model: onnx.ModelProto, weights: Mapping[str, Any]) -> list[onnx.ValueInfoProto]:
    """The inputs at run time. Raises UnsupportedError unless each is a tensor of a type that gtco
    supports.
    """
    inputs = [value for value in inputs_of(model.graph) if value.name not in weights]
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise not_a_tensor("input", value)
        require_type(f"input '{value.name}'", value.type.tensor_type.elem_type)
    return inputs


def _type(value: onnx.ValueInfoProto) -> TensorType:
    tensor = value.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return TensorType(tuple(dim.dim_value for dim in tensor.shape.dim), str(dtype))


def _translate(model: onnx.ModelProto, unknown: set[str]) -> tuple[Any, dict[str, str]]:
    """The Relax module, and the nodes' names by Relax variable. The parameters are the graph's
    inputs in order. ``unknown``: the outputs whose types the file does not have.
    """
    from tvm import relax

    from gtco.frontend.onnx_importer import Importer

    for node in model.graph.node:
        node.name = node.name or (node.output[0] if node.output else "")
    importer = Importer(model.opset_import)
    with quiet():
        module = importer.from_onnx(model.graph, _opset(model))
    made = module["main"].ret_ty
    single = len(model.graph.output) == 1
    for value, kind in zip(model.graph.output, [made] if single else made.fields, strict=True):
        if not isinstance(kind, relax.TensorType | relax.ShapeType):
            raise UnsupportedError(
                f"output '{value.name}' is not a tensor but a sequence of tensors; gtco returns "
                "only tensors: make its elements outputs instead (SequenceAt, ConcatFromSequence)"
            )
        said = str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        dtype = "int64" if isinstance(kind, relax.ShapeType) else str(kind.dtype)
        if said != dtype and value.name not in unknown:
            raise ModelError(
                f"the file declares output '{value.name}' as {said}, but its nodes compute "
                f"{dtype}: correct the declaration, or end with a Cast"
            )
    return module, importer.labels
