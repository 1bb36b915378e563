"""Rules for operators that TVM 0.27's ONNX importer lacks, refuses, or gets wrong without an error.

ONNX's own backend tests showed what to correct or refuse:

- LayerNormalization's second and third output, Pow of two types
- Dropout's mask and training mode, IsInf's two flags, Constant's scalar forms
- BatchNormalization's new statistics, reductions over no axes
- ConvTranspose's ``output_shape``, SpaceToDepth's ``mode``, most of Resize
- tensors without elements

ONNX's tests are of the newest form of an operator. Of older ones: Slice before opset 10, TopK and
Resize of opset 10, Upsample.

Attention, Col2Im, ConvInteger and LpNormalization are gtco's own, and so are quantizing and
dequantizing in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import onnx
import tvm
from tvm import relax

from gtco.frontend.operators.attention import attention
from gtco.frontend.operators.col2im import col2im
from gtco.frontend.operators.cumsum import cumsum
from gtco.frontend.operators.linear_quantization import (
    UnsuitableQuantization,
    conv_integer,
    dequantize_linear,
    matmul_integer,
    quantize_linear,
)
from gtco.frontend.operators.normalization import layer_normalization, skip_layer_normalization
from gtco.frontend.operators.reductions import RULES as REDUCTIONS
from gtco.frontend.operators.resize import FIRST, Axis, Method, resize, resized_axes

Attributes = Mapping[str, Any]
Override = Callable[[Any, Sequence[Any], Attributes], Any]


class Refused(Exception):
    """A use of an operator that would be compiled wrongly; the message says which."""


def _outputs(attrs: Attributes) -> int:
    return int(attrs["tvm_custom"]["num_outputs"])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _shape(tensor: Any) -> list[int]:
    return [int(dim) for dim in tensor.ty.shape]


def _padded(inputs: Sequence[Any], count: int) -> list[Any]:
    """The inputs, ``count`` of them; None for each that is left out."""
    return [inputs[i] if i < len(inputs) else None for i in range(count)]


def _constant(tensor: Any) -> numpy.ndarray | None:
    return tensor.value.numpy() if isinstance(tensor, tvm.ir.expr.GenericConst) else None


def _dropout(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """The input itself, as at inference, and a mask that keeps everything."""
    if len(inputs) > 2 and inputs[2] is not None:
        training = _constant(inputs[2])
        ratio = _constant(inputs[1]) if inputs[1] is not None else numpy.asarray(0.5)
        if training is None or (bool(training) and (ratio is None or float(ratio) != 0.0)):
            raise Refused(
                "training_mode is set: export the model after model.eval(); "
                "torch.nn.functional.dropout wants training=self.training for that"
            )
    if _outputs(attrs) == 1:
        return inputs[0]
    return relax.Tuple([inputs[0], builder.emit(relax.op.ones(_shape(inputs[0]), "bool"))])


def _batch_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """BatchNormalization in training mode too: the share of the new statistics is 1 - momentum, and
    TVM takes momentum.
    """
    if not attrs.get("training_mode", 0) or any(x.ty.dtype != "float32" for x in inputs):
        return None
    made = relax.op.nn.batch_norm(
        *inputs,
        axis=1,
        epsilon=attrs.get("epsilon", 1e-5),
        momentum=1 - attrs.get("momentum", 0.9),
        training=True,
    )
    return relax.Tuple([relax.TupleGetItem(made, n) for n in range(3)])


def _is_inf(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    negative, positive = attrs.get("detect_negative", 1), attrs.get("detect_positive", 1)
    if negative and positive:
        return None
    if not negative and not positive:
        return builder.emit(relax.op.zeros(_shape(inputs[0]), "bool"))
    infinity = relax.const(numpy.inf if positive else -numpy.inf, inputs[0].ty.dtype)
    return builder.emit(relax.op.equal(inputs[0], infinity))


def _constant_node(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    for name, dtype in (
        ("value_float", "float32"),
        ("value_floats", "float32"),
        ("value_int", "int64"),
        ("value_ints", "int64"),
    ):
        if name in attrs:
            return relax.const(numpy.asarray(attrs[name], dtype), dtype)
    return None


def _conv_transpose(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """ConvTranspose, also with an output padding of the stride or more, which TVM refuses. In that
    case TVM computes the whole product, zeros are added after it, and the padding is cut off.
    """
    if "output_shape" in attrs:
        raise Refused(
            "the attribute output_shape is not supported: export with pads and output_padding"
        )
    x, weight, bias = _padded(inputs, 3)
    space = len(_shape(x)) - 2
    strides = [int(s) for s in attrs.get("strides", [1] * space)]
    more = [int(p) for p in attrs.get("output_padding", [0] * space)]
    if all(p < s for p, s in zip(more, strides, strict=True)) or space not in (1, 2):
        return None
    if _text(attrs.get("auto_pad", b"NOTSET")) != "NOTSET":
        raise Refused("auto_pad beside an output_padding of a stride or more: write out its pads")
    convolve = relax.op.nn.conv1d_transpose if space == 1 else relax.op.nn.conv2d_transpose
    dilation = [int(d) for d in attrs.get("dilations", [1] * space)]
    groups = attrs.get("group", 1)
    y = builder.emit(convolve(x, weight, strides=strides, dilation=dilation, groups=groups))
    y = builder.emit(relax.op.nn.pad(y, [0, 0, 0, 0, *(n for p in more for n in (0, p))]))
    pads = [int(p) for p in attrs.get("pads", [0] * (2 * space))]
    ends = [n - p for n, p in zip(_shape(y)[2:], pads[space:], strict=True)]
    y = builder.emit(relax.op.strided_slice(y, list(range(2, 2 + space)), pads[:space], ends))
    if bias is None:
        return y
    return relax.op.add(y, builder.emit(relax.op.reshape(bias, (1, -1, *[1] * space))))


def _celu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """alpha * (exp(x / alpha) - 1) below 0, as Elu is written. (ONNX's definition turns a scalar
    into a vector, and loses the digits of an x near 0.)
    """
    x = inputs[0]
    alpha, zero, one = (
        relax.const(value, str(x.ty.dtype)) for value in (attrs.get("alpha", 1.0), 0.0, 1.0)
    )
    scaled = builder.emit(relax.op.divide(x, alpha))
    rest = relax.op.subtract(one, relax.op.exp(scaled))
    grown = relax.op.subtract(relax.op.nn.relu(scaled), relax.op.nn.relu(rest))
    return relax.op.where(relax.op.greater(x, zero), x, relax.op.multiply(alpha, grown))


def _lp_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Vectors along ``axis`` divided by their norm, the sum of magnitudes for p = 1 and the root of
    the sum of squares for p = 2. A vector of zeros stays one, as in ONNX Runtime.
    """
    x, p = inputs[0], int(attrs.get("p", 2))
    dtype = str(x.ty.dtype)
    powers = relax.op.abs(x) if p == 1 else relax.op.multiply(x, x)
    norm = builder.emit(
        relax.op.sum(builder.emit(powers), [int(attrs.get("axis", -1))], keepdims=True)
    )
    norm = norm if p == 1 else builder.emit(relax.op.sqrt(norm))
    none = builder.emit(relax.op.equal(norm, relax.const(0, dtype)))
    norm = builder.emit(relax.op.where(none, relax.const(1, dtype), norm))
    return relax.op.divide(x, norm)


def _einsum(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Einsum as an operator. TVM's importer writes loops at once, and later passes cannot see the
    contraction in them.
    """
    equation = _text(attrs["equation"])
    return builder.emit(relax.op.einsum(relax.Tuple(list(inputs)), equation.replace(" ", "")))


def _pad(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Pad as an operator. TVM's importer writes loops, which only the fallback can compile."""
    x, pads, value, axes = _padded(inputs, 4)
    mode = _text(attrs.get("mode", b"constant"))
    widths = numpy.asarray(attrs["pads"]) if pads is None else _constant(pads)
    border = numpy.asarray(attrs.get("value", 0.0)) if value is None else _constant(value)
    rank = len(_shape(x))
    which = numpy.arange(rank) if axes is None else _constant(axes)
    if widths is None or which is None:
        raise Refused("its pads or axes are known only at run time: make them constants")
    if border is None or len(widths) != 2 * len(which) or (widths < 0).any():
        return None
    full = [0] * (2 * rank)
    for place, axis in enumerate(which.tolist()):
        full[2 * (axis % rank)] = int(widths[place])
        full[2 * (axis % rank) + 1] = int(widths[place + len(which)])
    mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
    return builder.emit(relax.op.nn.pad(x, full, mode, border.reshape(()).item()))


def _tile(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Tile as an operator, for the same reason as ``_pad``."""
    repeats = _constant(inputs[1]) if len(inputs) == 2 else None
    return None if repeats is None else builder.emit(relax.op.tile(inputs[0], repeats.tolist()))


def _clip(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Clip as an operator, for the same reason as ``_pad``. A bound that is left out or NaN has no
    effect.
    """
    x, low, high = _padded(inputs, 3)
    if low is None and high is None:
        low, high = (attrs.get(name) for name in ("min", "max"))
    for bound, choose in ((low, relax.op.maximum), (high, relax.op.minimum)):
        known = _constant(bound) if isinstance(bound, relax.Expr) else bound
        if bound is None or (known is not None and numpy.isnan(known).all()):
            continue
        if known is not None:
            bound = relax.const(numpy.asarray(known).reshape(()), x.ty.dtype)
        elif "float" in str(x.ty.dtype):
            anything = relax.const(
                -numpy.inf if choose is relax.op.maximum else numpy.inf, x.ty.dtype
            )
            bound = relax.op.where(relax.op.isnan(bound), anything, bound)
        x = builder.emit(choose(x, bound))
    return x


def _expand(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Expand, also with a result without elements, which TVM refuses. An exporter writes a slice of
    no rows in this way.
    """
    wanted = _constant(inputs[1])
    if wanted is None or wanted.all():
        return None
    shape = numpy.broadcast_shapes(tuple(_shape(inputs[0])), tuple(wanted.tolist()))
    return builder.emit(relax.op.zeros(shape, inputs[0].ty.dtype))


def _scatter(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """A scatter. If it writes nothing, the result is the tensor that it would write into."""
    return None if all(_shape(inputs[2])) else inputs[0]


def _gather_elements(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """GatherElements, also of no elements, for which TVM's operator makes no kernel."""
    shape = _shape(inputs[1])
    return None if all(shape) else relax.op.zeros(shape, inputs[0].ty.dtype)


def _slice(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Slice of opsets before 10, whose bounds are attributes. TVM reads the later form alone."""
    if "starts" not in attrs:
        return None
    x, starts, ends = inputs[0], list(attrs["starts"]), list(attrs["ends"])
    if isinstance(x, relax.ShapeExpr):
        values = [int(size) for size in x.values][starts[0] : ends[0]]
        return relax.const(numpy.array(values, "int64"), "int64")
    shape = _shape(x)
    axes = [axis % len(shape) for axis in attrs.get("axes", range(len(starts)))]
    bounds = [slice(*at).indices(shape[axis]) for axis, *at in zip(axes, starts, ends, strict=True)]
    first = [begin for begin, _, _ in bounds]
    last = [max(begin, end) for begin, end, _ in bounds]
    return builder.emit(relax.op.strided_slice(x, axes, first, last))


def _top_k(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """TopK of opset 10, where k became an input: TVM looks for an attribute until opset 11."""
    count = _constant(inputs[1]) if len(inputs) > 1 else None
    if count is None or not {"largest", "sorted"}.isdisjoint(attrs):
        return None
    along = int(attrs.get("axis", -1))
    return relax.op.topk(inputs[0], int(count.item()), along, ret_type="both", dtype="int64")


def _space_to_depth(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    if _text(attrs.get("mode", b"DCR")) != "CRD":
        return None
    n, c, h, w = _shape(inputs[0])
    b = attrs["blocksize"]
    x = builder.emit(relax.op.reshape(inputs[0], (n, c, h // b, b, w // b, b)))
    x = builder.emit(relax.op.permute_dims(x, [0, 1, 3, 5, 2, 4]))
    return builder.emit(relax.op.reshape(x, (n, c * b * b, h // b, w // b)))


def _resize(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """TVM's resize2d if it means the same, and :mod:`gtco.frontend.operators.resize` otherwise."""
    if len(inputs) == 2:  # opset 10 has no region: x and scales
        return _upsample(builder, inputs, attrs)
    x, *rest = _padded(inputs, 4)
    roi, scales, sizes = (None if t is None else _constant(t) for t in rest)
    if scales is not None and not scales.size:
        scales = None
    if scales is None and sizes is None:
        raise Refused("its scales or sizes are known only at run time: make them constants")
    method = Method.of(attrs)
    if unknown := method.unknown():
        raise Refused(f"ONNX has no {unknown}")
    if method.coordinates == "tf_crop_and_resize" and roi is None:
        raise Refused("its region of interest is known only at run time: make it a constant")
    axes = attrs.get("axes")
    policy = _text(attrs.get("keep_aspect_ratio_policy", b"stretch"))
    wanted = resized_axes(_shape(x), roi, scales, sizes, axes, policy)
    if axes is None and policy == "stretch" and _is_resize2d(wanted, method):
        return relax.op.image.resize2d(
            x,
            size=relax.ShapeExpr([wanted[2].out, wanted[3].out]),
            roi=[0.0] * 4,
            layout="NCHW",
            method="nearest_neighbor" if method.mode == "nearest" else method.mode,
            coordinate_transformation_mode=method.coordinates,
            rounding_method=method.nearest_mode,
            cubic_alpha=method.cubic_coeff_a,
            cubic_exclude=0,
            extrapolation_value=0.0,
        )
    return resize(builder, x, wanted, method)


def _upsample(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Upsample, and Resize of opset 10: positions are scaled from the first one."""
    x, given = _padded(inputs, 2)
    scales = numpy.asarray(attrs["scales"]) if given is None else _constant(given)
    if scales is None:
        raise Refused("its scales are known only at run time: make them constants")
    mode = _text(attrs.get("mode", b"nearest"))
    method = Method(mode if mode == "nearest" else "linear", "asymmetric", FIRST)
    return resize(builder, x, resized_axes(_shape(x), None, scales, None, None), method)


def _is_resize2d(axes: Mapping[int, Axis], method: Method) -> bool:
    """True if TVM's operator, and gtco's kernel for it, mean the same: height and width, by whole
    scales. Where no size changes, TVM's would add its neighbours times 0, and a NaN would spread.
    """
    whole = all(abs(a.size * a.scale - a.out) <= 1e-3 for a in axes.values())
    kept = all(axes[i].size == axes[i].out for i in (0, 1) if i in axes)
    return (
        len(axes) == 4
        and any(a.size != a.out for a in axes.values())
        and whole
        and kept
        and not method.antialias
        and not (method.mode == "cubic" and method.exclude_outside)
        and method.coordinates
        in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
    )


def _attention(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    results = attention(builder, _padded(inputs, 7), attrs)
    return results[0] if _outputs(attrs) == 1 else relax.Tuple(list(results[: _outputs(attrs)]))


def _col2im(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    image, block = (_constant(t) for t in inputs[1:3])
    if image is None or block is None:
        raise Refused("its image_shape and block_shape are known only at run time")
    rank = len(image)
    return col2im(
        builder,
        inputs[0],
        [int(d) for d in image],
        [int(d) for d in block],
        [int(d) for d in attrs.get("strides", [1] * rank)],
        [int(d) for d in attrs.get("pads", [0] * (2 * rank))],
        [int(d) for d in attrs.get("dilations", [1] * rank)],
    )


def _quantization(rule: Override) -> Override:
    """The rule of :mod:`gtco.frontend.operators.linear_quantization`, with its error as ours."""

    def apply(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
        try:
            return rule(builder, inputs, attrs)
        except UnsuitableQuantization as reason:
            raise Refused(str(reason)) from reason

    return apply


def _pow(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Pow with base and exponent of different types; the result has the base's type."""
    base, exponent = inputs
    if not isinstance(base.ty, relax.TensorType) or base.ty.dtype == exponent.ty.dtype:
        return None
    floats = [str(t.ty.dtype) for t in inputs if "float" in str(t.ty.dtype)]
    wide = floats[0] if floats else str(base.ty.dtype)
    a, b = (
        t if str(t.ty.dtype) == wide else builder.emit(relax.op.astype(t, wide)) for t in inputs
    )
    result = builder.emit(relax.op.power(a, b))
    return (
        result
        if wide == str(base.ty.dtype)
        else builder.emit(relax.op.astype(result, base.ty.dtype))
    )


def _eye_like(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """EyeLike. Its ``dtype`` is a number of ONNX's; TVM reads it as a name."""
    dtype = inputs[0].ty.dtype
    if "dtype" in attrs:
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(attrs["dtype"]))
    rows, columns = _shape(inputs[0])
    return relax.const(numpy.eye(rows, columns, attrs.get("k", 0)), str(dtype))


def _one_hot(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """``values[int(indices[..., None] == range(depth))]``. TVM accepts neither floats nor negative
    indices.
    """
    indices, depth, values = inputs[0], _constant(inputs[1]), inputs[2]
    if depth is None:
        return None
    count, rank = int(depth.reshape(())), len(_shape(indices))
    axis = attrs.get("axis", -1) % (rank + 1)
    places = builder.emit(relax.op.expand_dims(relax.op.astype(indices, "int64"), axis))
    negative = relax.op.less(places, relax.const(0, "int64"))
    wrapped = relax.op.add(places, relax.const(count, "int64"))
    places = builder.emit(relax.op.where(negative, wrapped, places))
    shape = [count if i == axis else 1 for i in range(rank + 1)]
    hot = relax.op.equal(places, relax.const(numpy.arange(count).reshape(shape), "int64"))
    off, on = (relax.op.strided_slice(values, [0], [i], [i + 1]) for i in range(2))
    return builder.emit(relax.op.where(hot, on, off))


def _prelu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """PRelu, element-wise also if the slope varies along one axis. Later passes cannot look into
    TVM's operator for that, and only the fallback compiled it.
    """
    x, slope = inputs
    if len(_shape(slope)) > len(_shape(x)):
        return None  # no valid PRelu; TVM's importer reports it
    below = builder.emit(relax.op.less(x, relax.const(0, x.ty.dtype.dtype)))
    return relax.op.where(below, builder.emit(relax.op.multiply(x, slope)), x)


def _without_elements(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Of Max, Min, Mean and Sum, where an input has no elements: TVM broadcasts to the larger size,
    also where that is 1 and the other is 0.
    """
    shapes = [_shape(x) for x in inputs if x.ty.shape is not None]
    if len(shapes) < len(inputs) or all(map(all, shapes)):
        return None
    return relax.op.zeros(numpy.broadcast_shapes(*map(tuple, shapes)), inputs[0].ty.dtype)


OVERRIDES: dict[str, Override] = {
    "LayerNormalization": layer_normalization,
    "SkipLayerNormalization": skip_layer_normalization,
    "ConvInteger": _quantization(conv_integer),
    "DequantizeLinear": _quantization(dequantize_linear),
    "MatMulInteger": _quantization(matmul_integer),
    "QuantizeLinear": _quantization(quantize_linear),
    "Dropout": _dropout,
    "BatchNormalization": _batch_normalization,
    "IsInf": _is_inf,
    "Constant": _constant_node,
    "CumSum": cumsum,
    "ConvTranspose": _conv_transpose,
    "Celu": _celu,
    "Einsum": _einsum,
    "LpNormalization": _lp_normalization,
    "Pad": _pad,
    "Tile": _tile,
    "Clip": _clip,
    "Expand": _expand,
    "GatherElements": _gather_elements,
    "Slice": _slice,
    "TopK": _top_k,
    "ScatterND": _scatter,
    "ScatterElements": _scatter,
    "SpaceToDepth": _space_to_depth,
    "Resize": _resize,
    "Attention": _attention,
    "Col2Im": _col2im,
    "Upsample": _upsample,
    "Pow": _pow,
    "EyeLike": _eye_like,
    "OneHot": _one_hot,
    "PRelu": _prelu,
    **REDUCTIONS,
    **dict.fromkeys(("Max", "Min", "Mean", "Sum"), _without_elements),
}
