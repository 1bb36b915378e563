"""The inputs on which a model is tried.

Friendly inputs find few errors. Large activations make exp and variances overflow. Zeros and
constants give a variance of zero. A single spike is a row that dominates a softmax or a maximum.
A float whose elements index a table, as the first two of each of Kosmos's patches, stays in it.
Masks are tried with everything kept, everything masked, at random, and with a whole row masked; a
mask that is added to scores also with -inf and with the lowest finite number. Ids cover the whole
table that they index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from ml_dtypes import finfo
from numpy.typing import NDArray

from gtco.support.dtypes import is_float, numpy_dtype
from gtco.verification.roles import Mask, Role

Array = NDArray[Any]
Range = tuple[int, int]  # of integers: the lowest, and one more than the highest

LARGE, SPIKE = 30.0, 100.0  # scale of large inputs, height of the spike
VALUES = 1000  # integers that are values, not ids, are drawn from [-VALUES, VALUES]
WIDEST = 16  # ids of a table of unknown size are tried up to 2^WIDEST, then up to half as many


class Spec(Protocol):
    """An input or output of a compiled model."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def cases(
    inputs: Sequence[Spec],
    seed: int = 0,
    roles: Mapping[str, Role] | None = None,
    ranges: Mapping[str, Range] | None = None,
) -> dict[str, dict[str, Array]]:
    """Inputs by case:

    - ``random``: always;
    - ``large``, ``zeros``, ``constant`` and ``spike``, with nothing masked: if an input is a float;
    - ``runs`` and ``narrow``: if an input is an integer and no mask (:func:`_patterned`);
    - those of :func:`_masks`: if an input is a mask.

    ``roles`` has the known roles of the inputs (:func:`gtco.verification.roles.onnx_roles`);
    without them names and types decide. Integers are drawn from ``ranges``, or from the widest of
    :func:`ranges_to_try`.
    """
    rng = np.random.default_rng(seed)
    masks = {s.name: m for s in inputs if (m := mask_of(s, roles)) is not None}
    base = usual(inputs, rng, roles, ranges)
    values = [s.name for s in inputs if is_float(base[s.name].dtype)]
    values = [name for name in values if masks.get(name) in (None, "additive")]

    kept = {name: np.ones_like(base[name]) for name, m in masks.items() if m != "additive"}

    def changed(change: Callable[[Array], Array]) -> dict[str, Array]:
        # numpy turns a product of tensors without axes into a bare number
        new = {name: np.asarray(change(base[name]), base[name].dtype) for name in values}
        return base | kept | {name: _inside(x, (roles or {}).get(name)) for name, x in new.items()}

    result = {"random": base}
    if values:
        result["large"] = changed(lambda x: x * LARGE)
        result["zeros"] = changed(np.zeros_like)
        result["constant"] = changed(np.ones_like)
        result["spike"] = changed(_spike)
    data = [s for s in inputs if base[s.name].dtype.kind in "iu" and s.name not in masks]
    for pattern in ("runs", "narrow") if data else ():
        result[pattern] = (
            base
            | kept
            | {
                s.name: _patterned(rng, base[s.name], (roles or {}).get(s.name, Role()), pattern)
                for s in data
            }
        )
    for name, case in _masks(rng, base, masks).items():
        result[name] = base | case
    return result


def usual(
    inputs: Sequence[Spec],
    rng: np.random.Generator,
    roles: Mapping[str, Role] | None,
    ranges: Mapping[str, Range] | None,
) -> dict[str, Array]:
    """Standard normal floats, integers from their ranges, masks of zeros and ones."""
    result: dict[str, Array] = {}
    for spec in inputs:
        role, dtype = (roles or {}).get(spec.name), numpy_dtype(spec.dtype)
        if mask_of(spec, roles) in ("binary", "either"):
            result[spec.name] = _filled(_random_keep(rng, spec.shape, True), dtype, "binary")
        elif is_float(dtype):
            drawn = np.asarray(rng.standard_normal(spec.shape)).astype(dtype)
            result[spec.name] = _inside(drawn, role)
        else:
            range_ = (ranges or {}).get(spec.name) or ranges_to_try(spec, role)[0]
            told = [int(v) for v in role.told if v.is_integer()] if role else []
            result[spec.name] = integers(rng, spec, range_, told)
    return result


def table_of(role: Role | None) -> Range | None:
    """The places of the table that all or some elements of an input index; None if none does, or if
    its size is not known.
    """
    if role is None or not role.index or role.bound is None:
        return None
    return max(0, role.low), role.bound


def _inside(x: Array, role: Role | None) -> Array:
    """Floats as they are, or within the table that some of them index."""
    table = table_of(role)
    return x if table is None else np.clip(np.abs(x), table[0], table[1] - 1).astype(x.dtype)


def _masks(
    rng: np.random.Generator, base: Mapping[str, Array], masks: Mapping[str, Mask]
) -> dict[str, dict[str, Array]]:
    """The values of the masks by case. All masks of the model have the same pattern."""
    patterns: dict[str, Callable[[tuple[int, ...]], NDArray[np.bool_]]] = {
        "ones": lambda shape: np.ones(shape, np.bool_),
        "zeros": lambda shape: np.zeros(shape, np.bool_),
        "random": lambda shape: _random_keep(rng, shape, False),
        "row": lambda shape: _whole_row(rng, shape),
    }
    result: dict[str, dict[str, Array]] = {}

    def add(case: str, pattern: str, styles: Mapping[Mask, str]) -> None:
        result[case] = {
            name: _filled(patterns[pattern](base[name].shape), base[name].dtype, styles[kind])
            for name, kind in masks.items()
        }

    kinds = set(masks.values())
    plain: dict[Mask, str] = {"binary": "binary", "either": "binary", "additive": "lowest"}
    for pattern in patterns if kinds else ():
        add(f"mask {pattern}", pattern, plain)
    for style, used in (("lowest", {"either"}), ("-inf", {"either", "additive"})):
        for pattern in ("zeros", "random", "row") if kinds & used else ():
            add(f"mask {pattern} {style}", pattern, {**plain, "either": style, "additive": style})
    return result


def mask_of(spec: Spec, roles: Mapping[str, Role] | None) -> Mask | None:
    """The kind of mask that an input is, by the graph, or else by its type and name."""
    role = (roles or {}).get(spec.name, Role())
    dtype = numpy_dtype(spec.dtype)
    if dtype.kind == "b":
        return "binary"
    if role.index:
        return None
    named = "mask" in spec.name.lower()
    if (role.data or (role.told and is_float(dtype))) and not (role.mask and named):
        return None  # a float that is compared with 0 may have any sign
    if role.mask is not None:
        return role.mask if is_float(dtype) else "binary"
    if named:
        return "either" if is_float(dtype) else "binary"
    return None


def ranges_to_try(spec: Spec, role: Role | None) -> list[Range]:
    """Ranges of an integer input, the widest first, because the reference may refuse ids that are
    too large.

    ``role`` comes from the graph; None if no graph is known.
    """
    kind = np.iinfo(numpy_dtype(spec.dtype))
    ladder = [(0, 2**power) for power in range(WIDEST, -1, -1)]
    if role is not None and role.bound is not None:
        ladder = [(role.low, role.bound), *(r for r in ladder if r[1] < role.bound)]
    elif role is not None and not role.index:
        ladder = [(-VALUES, VALUES + 1), *ladder]
    low, high = int(kind.min), int(kind.max) + 1
    fitting = [(max(low, a), min(high, b)) for a, b in ladder]
    return list(dict.fromkeys(fitting))


def integers(
    rng: np.random.Generator, spec: Spec, range_: Range, told: Sequence[int] = ()
) -> Array:
    """Integers from the range. They include both ends, and some small values, because padding and
    class tokens are small ids. Values that the model distinguishes (``told``) are frequent.
    """
    low, high = range_
    dtype = numpy_dtype(spec.dtype)
    drawn = rng.integers(low, high, spec.shape)
    small = rng.integers(low, high, spec.shape) if low < 0 else rng.integers(0, 4, spec.shape)
    drawn = np.where(
        rng.random(spec.shape) < 0.2, np.maximum(low, np.minimum(small, high - 1)), drawn
    )
    if known := [v for v in told if low <= v < high]:
        drawn = np.where(rng.random(spec.shape) < 0.2, rng.choice(known, spec.shape), drawn)
    if drawn.size > 1:
        drawn.flat[0], drawn.flat[-1] = high - 1, low
    return np.asarray(drawn).astype(dtype)


def _patterned(rng: np.random.Generator, drawn: Array, role: Role, pattern: str) -> Array:
    """Rows whose values repeat, as in tokens and bytes: ``runs`` of one value each, or ``narrow``:
    an eighth of all values. The second half of the first row is a value that the model
    distinguishes, such as padding.
    """
    if not drawn.ndim or not drawn.size:
        return drawn
    rows = drawn.reshape(-1, drawn.shape[-1]).copy()
    order = np.sort(drawn, axis=None)
    width = 1 if pattern == "runs" else max(1, order.size // 8)
    for row in rows:
        start = rng.integers(order.size - width + 1)
        row[:] = rng.choice(order[start : start + width], row.shape)
    told = [int(v) for v in role.told if v.is_integer()]
    known = [v for v in told if order[0] <= v <= order[-1]]
    if known:
        rows[0, rows.shape[1] // 2 :] = known[-1]
    return rows.reshape(drawn.shape)


def nudged(
    inputs: Mapping[str, Array], masks: Sequence[str], rng: np.random.Generator, by: float
) -> dict[str, Array]:
    """The inputs with every float moved at random, by at most ``by`` times its magnitude or the
    root of the mean square, whichever is larger (so a spike among zeros moves the zeros too).
    Masks, infinities and integers stay.
    """
    result = dict(inputs)
    for name, value in inputs.items():
        if name in masks or not is_float(value.dtype):
            continue
        x = value.astype(np.float64)
        finite = np.isfinite(x)
        usual = float(np.sqrt(np.square(x[finite]).mean())) if finite.any() else 0.0
        usual = usual if 0 < usual < np.inf else 1.0
        step = by * np.maximum(np.abs(x), usual) * rng.uniform(-1, 1, x.shape)
        result[name] = np.where(finite, x + step, x).astype(value.dtype)
    return result


def _filled(keep: NDArray[np.bool_], dtype: np.dtype[Any], style: str) -> Array:
    """A mask of the dtype from the elements that it keeps. ``binary`` is 1 for kept and 0 for
    masked. ``lowest`` and ``-inf`` are 0 for kept and that number for masked.
    """
    if style == "binary":
        return keep.astype(dtype)
    lowest = float(finfo(dtype if dtype.itemsize == 2 else np.float32).min)
    return np.where(keep, 0.0, -np.inf if style == "-inf" else lowest).astype(dtype)


def _random_keep(
    rng: np.random.Generator, shape: tuple[int, ...], never_all: bool
) -> NDArray[np.bool_]:
    """Keeps half of the elements at random. With ``never_all`` it always keeps the first of each
    row, so that no row is wholly masked.
    """
    keep = np.asarray(rng.random(shape) < 0.5)
    if never_all and keep.ndim:
        keep[..., 0] = True
    return keep


def _whole_row(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """The first row is masked, the second kept whole, every other row is random."""
    keep = _random_keep(rng, shape, True)
    if keep.ndim:
        rows = keep.reshape(-1, shape[-1])
        rows[0] = False
        if len(rows) > 1:
            rows[1] = True
    return keep


def _spike(x: Array) -> Array:
    spiked = np.zeros_like(x)
    if x.size:
        spiked.flat[x.size // 3] = SPIKE
    return spiked
