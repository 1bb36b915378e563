"""ONNX's Attention (opset 23 to 25) written out in Relax: grouped heads, caches, masks, soft cap.

::

    scores = q * scale @ k^T;  scores = softcap * tanh(scores / softcap)
    bias   = mask + causal + window + padding        each 0 where a key may be seen, else -inf
    y      = softmax(scores + bias) @ v;  rows of y whose bias is -inf throughout are 0

The known parts of the bias (causal, windows, constant masks) are one constant, so that the rewrite
that finds attention sees one addition. For the same reason the rows of zeros are put into the
result and not into the softmax.

16-bit types are multiplied and normalised in float32. They are rounded where the operator's
definition has a value of that type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import onnx
import tvm
from tvm import relax

AFTER_CAP, AFTER_BIAS, AFTER_SOFTMAX = 1, 2, 3  # qk_matmul_output_mode; 0 is the bare product
_WIDE = ("float32", "float64")


@dataclass
class Bias:
    """The sum of all that is added to the scores: a known part and one that is computed at run
    time.

    The known parts are numpy arrays in float64 that broadcast together; ``later`` is a Relax
    tensor.
    """

    builder: Any
    dtype: str
    known: numpy.ndarray | None = None
    later: Any = None

    def add(self, part: Any) -> None:
        """Adds a part: a numpy array or a Relax tensor of ``dtype``."""
        if isinstance(part, numpy.ndarray):
            self.known = part if self.known is None else self.known + part
        else:
            self.later = (
                part if self.later is None else self.builder.emit(relax.op.add(self.later, part))
            )

    def forbid(self, allowed: Any) -> None:
        """Adds -inf where ``allowed`` (booleans, numpy or Relax) is false."""
        if isinstance(allowed, numpy.ndarray):
            self.add(numpy.where(allowed, 0.0, -numpy.inf))
        else:
            zero, never = (relax.const(v, self.dtype) for v in (0.0, -numpy.inf))
            self.add(self.builder.emit(relax.op.where(allowed, zero, never)))

    @property
    def tensor(self) -> Any:
        """The whole bias as a Relax tensor; None if nothing is added."""
        if self.known is None:
            return self.later
        known = relax.const(self.known, self.dtype)
        return known if self.later is None else self.builder.emit(relax.op.add(self.later, known))

    @property
    def hidden_rows(self) -> Any:
        """Booleans [..., rows, 1]: true where no key may be seen; None if there is no such row."""
        if self.later is None:
            if self.known is None:
                return None
            rows = numpy.isneginf(self.known.max(axis=-1, keepdims=True))
            return relax.const(rows, "bool") if rows.any() else None
        highest = self.builder.emit(relax.op.max(self.tensor, axis=-1, keepdims=True))
        never = relax.const(-numpy.inf, self.dtype)
        return self.builder.emit(relax.op.equal(highest, never))


def attention(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Relax tensors: y, present key, present value, and the scores that ``qk_matmul_output_mode``
    asks for.
    """
    q, k, v, mask, past_key, past_value, lengths = inputs
    flat = len(q.ty.shape) == 3
    if flat:
        heads, groups = int(attrs["q_num_heads"]), int(attrs["kv_num_heads"])
        q, k, v = (_split(builder, t, h) for t, h in ((q, heads), (k, groups), (v, groups)))
    if past_key is not None:
        k = builder.emit(relax.op.concat([past_key, k], axis=2))
        v = builder.emit(relax.op.concat([past_value, v], axis=2))
    present = (k, v)
    repeats = _shape(q)[1] // _shape(k)[1]
    if repeats > 1:
        k, v = (builder.emit(relax.op.repeat(t, repeats, 1)) for t in (k, v))
    dtype = str(q.ty.dtype)
    bias = Bias(builder, dtype)
    _mask(bias, mask, _shape(k)[2])
    _places(bias, attrs, _shape(q)[2], _shape(k)[2], past_key, lengths)

    scores = _scores(builder, q, k, attrs.get("scale"))
    mode = int(attrs.get("qk_matmul_output_mode", 0))
    seen = scores
    if cap := float(attrs.get("softcap", 0.0)):
        bent = builder.emit(relax.op.tanh(relax.op.divide(scores, relax.const(cap, dtype))))
        scores = builder.emit(relax.op.multiply(bent, relax.const(cap, dtype)))
        # mode 0 is the bare product, in the operator's text and in ONNX Runtime
        seen = scores if mode == AFTER_CAP else seen
    added = bias.tensor
    if added is not None:
        scores = builder.emit(relax.op.add(scores, added))
    if mode == AFTER_BIAS:
        seen = scores
    weights = _softmax(builder, scores, attrs.get("softmax_precision"), dtype)
    hidden = bias.hidden_rows
    if mode == AFTER_SOFTMAX:
        seen = _zero(builder, weights, hidden)
    y = _zero(builder, _product(builder, weights, v), hidden)
    if flat:
        batch, heads, rows, depth = _shape(y)
        y = builder.emit(relax.op.permute_dims(y, [0, 2, 1, 3]))
        y = builder.emit(relax.op.reshape(y, (batch, rows, heads * depth)))
    return y, *present, seen


def _shape(tensor: Any) -> list[int]:
    return [int(d) for d in tensor.ty.shape]


def _split(builder: Any, x: Any, heads: int) -> Any:
    """[B, N, heads * d] -> [B, heads, N, d]."""
    batch, tokens, width = _shape(x)
    apart = builder.emit(relax.op.reshape(x, (batch, tokens, heads, width // heads)))
    return builder.emit(relax.op.permute_dims(apart, [0, 2, 1, 3]))


def _mask(bias: Bias, mask: Any, keys: int) -> None:
    """Adds the mask input: booleans or an addend. A mask that is too short hides the last keys."""
    if mask is None:
        return
    builder, shape = bias.builder, _shape(mask)
    boolean = str(mask.ty.dtype) == "bool"
    missing = keys - shape[-1]
    if isinstance(mask, tvm.ir.expr.GenericConst):
        value = mask.value.numpy()
        if boolean:
            value = numpy.where(value, 0.0, -numpy.inf)
        widths = [(0, 0)] * (value.ndim - 1) + [(0, missing)]
        bias.add(numpy.pad(numpy.asarray(value, numpy.float64), widths, constant_values=-numpy.inf))
        return
    if boolean:
        zero, never = (relax.const(v, bias.dtype) for v in (0.0, -numpy.inf))
        mask = builder.emit(relax.op.where(mask, zero, never))
    if missing:
        hidden = relax.const(numpy.full((*shape[:-1], missing), -numpy.inf), bias.dtype)
        mask = builder.emit(relax.op.concat([mask, hidden], axis=-1))
    bias.add(mask)


def _places(
    bias: Bias, attrs: Mapping[str, Any], rows: int, keys: int, past_key: Any, lengths: Any
) -> None:
    """Adds causality, windows and padding, which depend only on places.

    The place of a query is its row plus the length of the cache. It is known now, unless the cache
    is outside the operator: then ``lengths`` [batch] gives it.
    """
    builder = bias.builder
    left, right = (int(attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    causal = bool(attrs.get("is_causal", 0))
    key = numpy.arange(keys)[None, :]
    row = numpy.arange(rows)[:, None]
    ahead = key - row  # without the offset: how far a key is ahead of the query's place
    # the (lowest, highest) allowed difference; None without a bound
    lowest = -left if left >= 0 else None
    bounds = [b for b in (right if right >= 0 else None, 0 if causal else None) if b is not None]
    highest = min(bounds, default=None)
    if lengths is None or past_key is not None:
        offset = 0 if past_key is None else _shape(past_key)[2]
        difference = ahead - offset
        allowed = numpy.ones((rows, keys), bool)
        if lowest is not None:
            allowed &= difference >= lowest
        if highest is not None:
            allowed &= difference <= highest
        if not allowed.all():
            bias.forbid(allowed)
    elif lowest is not None or highest is not None:
        batch = _shape(lengths)[0]
        per_batch = builder.emit(relax.op.reshape(lengths, (batch, 1, 1, 1)))
        offset = builder.emit(relax.op.subtract(per_batch, relax.const(rows, "int64")))
        place = relax.const(ahead[None, None], "int64")
        difference = builder.emit(relax.op.subtract(place, offset))
        if lowest is not None:
            bias.forbid(
                builder.emit(relax.op.greater_equal(difference, relax.const(lowest, "int64")))
            )
        if highest is not None:
            bias.forbid(
                builder.emit(relax.op.less_equal(difference, relax.const(highest, "int64")))
            )
    if lengths is not None:
        batch = _shape(lengths)[0]
        per_batch = builder.emit(relax.op.reshape(lengths, (batch, 1, 1, 1)))
        place = relax.const(key[None, None], "int64")
        bias.forbid(builder.emit(relax.op.less(place, per_batch)))


def _scores(builder: Any, q: Any, k: Any, scale: float | None) -> Any:
    dtype = str(q.ty.dtype)
    factor = _shape(q)[3] ** -0.5 if scale is None else float(scale)
    if dtype in _WIDE:
        q = builder.emit(relax.op.multiply(q, relax.const(factor, dtype)))
    else:  # half of it on either side, as in the definition, so that q * k does not overflow
        root = relax.const(factor**0.5, dtype)
        q, k = (builder.emit(relax.op.multiply(t, root)) for t in (q, k))
    return _product(builder, q, builder.emit(relax.op.permute_dims(k, [0, 1, 3, 2])))


def _product(builder: Any, a: Any, b: Any) -> Any:
    dtype = str(a.ty.dtype)
    if dtype in _WIDE:
        return builder.emit(relax.op.matmul(a, b))
    wide = [_cast(builder, t, "float32") for t in (a, b)]
    return _cast(builder, builder.emit(relax.op.matmul(*wide)), dtype)


def _softmax(builder: Any, scores: Any, precision: int | None, dtype: str) -> Any:
    wanted = dtype
    if precision is not None:
        wanted = str(onnx.helper.tensor_dtype_to_np_dtype(int(precision)))
    x = _cast(builder, scores, wanted)
    if wanted in _WIDE:
        return _cast(builder, builder.emit(relax.op.nn.softmax(x, -1)), dtype)

    def rounded(operator: Any, *operands: Any) -> Any:
        wide = [_cast(builder, operand, "float32") for operand in operands]
        return _cast(builder, builder.emit(operator(*wide)), wanted)

    highest = rounded(lambda t: relax.op.max(t, axis=-1, keepdims=True), x)
    powers = rounded(relax.op.exp, rounded(relax.op.subtract, x, highest))
    total = rounded(lambda t: relax.op.sum(t, axis=-1, keepdims=True), powers)
    return _cast(builder, rounded(relax.op.divide, powers, total), dtype)


def _cast(builder: Any, x: Any, dtype: str) -> Any:
    return x if str(x.ty.dtype) == dtype else builder.emit(relax.op.astype(x, dtype))


def _zero(builder: Any, x: Any, rows: Any) -> Any:
    if rows is None:
        return x
    return builder.emit(relax.op.where(rows, relax.const(0.0, str(x.ty.dtype)), x))
