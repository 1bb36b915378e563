"""LSTM, GRU and RNN written out, one copy of a step for each position of the sequence.

    LSTM(x, w, r, b)  ->  g = x w^T + b for the whole sequence, one product;
                          step t: g[t] + h r^T -> i, o, f, c -> c, h

Lengths of single sequences (``sequence_lens``) have to be constants that are all the whole length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import onnx

from gtco.frontend.expansion.control_flow import MAX_NODES, attributes
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer

Activation = Callable[[str], str]
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ACTIVATIONS = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
# the attributes that an activation takes, with ONNX's defaults; None: it takes none of that name
_DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "Relu": (None, None),
    "Tanh": (None, None),
    "Sigmoid": (None, None),
    "Softsign": (None, None),
    "Softplus": (None, None),
    "LeakyRelu": (0.01, None),
    "ThresholdedRelu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "Elu": (1.0, None),
}


@dataclass(frozen=True)
class _Direction:
    """One direction's tensors: ``r`` [hidden, gates * hidden], ``b`` [gates * hidden] and ``peep``
    [hidden] each, "" where it has none.
    """

    kind: str
    hidden: int
    r: str
    b: str  # of the hidden state's product alone
    peep: tuple[str, ...]
    activations: tuple[Activation, ...]
    couples: bool  # LSTM's input_forget
    resets_behind: bool  # GRU's linear_before_reset
    clip: float | None


def recurrent(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """LSTM, GRU or RNN: the sequence of hidden states [length, directions, batch, hidden], the last
    hidden state, and of an LSTM the last cell.
    """
    writer, attrs, kind = walk.writer, attributes(node), node.op_type
    given = [*node.input, *[""] * 8]
    x, w, r, bias, lengths, hidden_state, cell, peepholes = given[:8]
    if attrs.get("layout", 0):
        x = writer.transpose(x, [1, 0, 2])
        hidden_state, cell = (s and writer.transpose(s, [1, 0, 2]) for s in (hidden_state, cell))
    length, batch, _ = writer.shape(x)
    directions, rows, hidden = writer.shape(r)
    if rows != _GATES[kind] * hidden or directions not in (1, 2):
        raise Unsuitable(f"its recurrent weights have the shape {writer.shape(r)}")
    _check_lengths(writer, lengths, length)
    if length * directions * 12 + len(writer.nodes) > MAX_NODES:
        raise Unsuitable(
            f"it has {length} steps, and gtco writes them out: the model would have more than "
            f"{MAX_NODES} nodes. Make the sequence shorter"
        )
    zero = writer.constant(numpy.zeros((batch, hidden)), writer.dtype(x), "zero")
    states: list[list[str]] = []  # of each direction, in the sequence's order
    last_hidden, last_cell = [], []
    for place in range(directions):
        part = _direction(writer, kind, attrs, place, r, bias, peepholes)
        inputs = _inputs(writer, kind, x, _row(writer, w, place), bias, place)
        h = _row(writer, hidden_state, place) if hidden_state else zero
        c = _row(writer, cell, place) if cell else zero
        backwards = place == 1 or _text(attrs.get("direction", "forward")) == "reverse"
        made = []
        for t in reversed(range(length)) if backwards else range(length):
            gates = writer.reshape(writer.slice(inputs, 0, t, t + 1), (batch, rows))
            h, c = _STEPS[kind](writer, part, gates, h, c)
            made.append(h)
        states.append(made[::-1] if backwards else made)
        last_hidden.append(h)
        last_cell.append(c)
    batch_first = bool(attrs.get("layout", 0))
    whole = ""
    if node.output and node.output[0]:
        apart = [writer.reshape(h, (1, 1, batch, hidden)) for steps in states for h in steps]
        whole = writer.add("Concat", *apart, axis=0) if len(apart) > 1 else apart[0]
        whole = writer.reshape(whole, (directions, length, batch, hidden))
        whole = writer.transpose(whole, [2, 1, 0, 3] if batch_first else [1, 0, 2, 3])
    ends = [_ends(writer, last, batch_first) for last in (last_hidden, last_cell)]
    return [whole, *ends[: 2 if kind == "LSTM" else 1]]


def _ends(writer: Writer, last: Sequence[str], batch_first: bool) -> str:
    """The last states of all directions, as one tensor."""
    shape = (1, *writer.shape(last[0]))
    apart = [writer.reshape(state, shape) for state in last]
    ends = writer.add("Concat", *apart, axis=0) if len(apart) > 1 else apart[0]
    return writer.transpose(ends, [1, 0, 2]) if batch_first else ends


def _check_lengths(writer: Writer, lengths: str, length: int) -> None:
    if not lengths:
        return
    known = writer.values.get(lengths)
    if known is None or (known != length).any():
        raise Unsuitable(
            f"its sequences have lengths of their own ('{lengths}'): leave them out, and run each "
            "length by itself"
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _row(writer: Writer, tensor: str, place: int) -> str:
    """``tensor[place]``"""
    shape = writer.shape(tensor)
    return writer.reshape(writer.slice(tensor, 0, place, place + 1), shape[1:])


def _inputs(writer: Writer, kind: str, x: str, w: str, bias: str, place: int) -> str:
    """The part of all gates that does not depend on the state, for the whole sequence."""
    made = writer.add("MatMul", x, writer.transpose(w, [1, 0]))
    if not bias:
        return made
    rows = writer.shape(w)[0]
    both = _row(writer, bias, place)
    made = writer.add("Add", made, writer.slice(both, 0, 0, rows))
    # GRU's candidate adds the second half of the bias to the state's product, before the reset
    return made if kind == "GRU" else writer.add("Add", made, writer.slice(both, 0, rows, 2 * rows))


def _direction(
    writer: Writer, kind: str, attrs: dict[str, Any], place: int, r: str, bias: str, peepholes: str
) -> _Direction:
    weights = _row(writer, r, place)
    rows, hidden = writer.shape(weights)
    second = ""
    if kind == "GRU" and bias:
        second = writer.slice(_row(writer, bias, place), 0, rows, 2 * rows)
    peep: tuple[str, ...] = ("",) * 3
    if peepholes:
        row = _row(writer, peepholes, place)
        peep = tuple(writer.split(row, [hidden] * 3, 0))
    return _Direction(
        kind,
        hidden,
        writer.transpose(weights, [1, 0]),
        second,
        peep,
        _activations(writer, kind, attrs, place),
        bool(attrs.get("input_forget", 0)),
        bool(attrs.get("linear_before_reset", 0)),
        attrs.get("clip"),
    )


def _activations(
    writer: Writer, kind: str, attrs: dict[str, Any], place: int
) -> tuple[Activation, ...]:
    """The activations of one direction. ``activation_alpha`` and ``activation_beta`` list the
    values of those activations that take one, in their order.
    """
    count = len(_ACTIVATIONS[kind])
    names = [_text(name) for name in attrs.get("activations", ())] or list(_ACTIVATIONS[kind]) * 2
    known = {name.lower(): name for name in _DEFAULTS}
    alphas, betas = list(attrs.get("activation_alpha", ())), list(attrs.get("activation_beta", ()))
    made: list[Activation] = []
    for name in names:
        if name.lower() not in known:
            raise Unsuitable(f"the activation '{name}' is not supported")
        proper = known[name.lower()]
        options = {
            key: values.pop(0) if values else default
            for key, default, values in zip(
                ("alpha", "beta"), _DEFAULTS[proper], (alphas, betas), strict=True
            )
            if default is not None
        }
        made.append(partial(_activated, writer, proper, options))
    return tuple(made[place * count : (place + 1) * count])


def _activated(writer: Writer, kind: str, options: dict[str, Any], x: str) -> str:
    return writer.add(kind, x, **options)


def _clipped(writer: Writer, part: _Direction, gate: str) -> str:
    if part.clip is None:
        return gate
    dtype = writer.dtype(gate)
    least, most = (writer.constant(sign * part.clip, dtype, "clip") for sign in (-1, 1))
    return writer.add("Max", writer.add("Min", gate, most), least)


def _product(writer: Writer, part: _Direction, h: str, first: int, last: int) -> str:
    """The hidden state's product with the weights of gates ``first`` to ``last``, and its bias."""
    begin, end = first * part.hidden, last * part.hidden
    made = writer.add("MatMul", h, writer.slice(part.r, 1, begin, end))
    return writer.add("Add", made, writer.slice(part.b, 0, begin, end)) if part.b else made


def _lstm(writer: Writer, part: _Direction, gates: str, h: str, c: str) -> tuple[str, str]:
    """Gates i, o, f and c; peepholes of i, o and f."""
    f_gate, f_cell, f_out = part.activations
    total = writer.add("Add", gates, _product(writer, part, h, 0, 4))
    i, o, f, candidate = writer.split(total, [part.hidden] * 4, 1)

    def gate(x: str, peep: str, cell: str) -> str:
        if peep:
            x = writer.add("Add", x, writer.add("Mul", peep, cell))
        return f_gate(_clipped(writer, part, x))

    i = gate(i, part.peep[0], c)
    if part.couples:
        f = writer.add("Sub", writer.constant(1.0, writer.dtype(i), "one"), i)
    else:
        f = gate(f, part.peep[2], c)
    candidate = f_cell(_clipped(writer, part, candidate))
    c = writer.add("Add", writer.add("Mul", f, c), writer.add("Mul", i, candidate))
    return writer.add("Mul", gate(o, part.peep[1], c), f_out(c)), c


def _gru(writer: Writer, part: _Direction, gates: str, h: str, c: str) -> tuple[str, str]:
    """Gates z, r and h."""
    f_gate, f_candidate = part.activations
    n = part.hidden
    first = writer.slice(gates, 1, 0, 2 * n)
    both = writer.add("Add", first, _product(writer, part, h, 0, 2))
    z, r = writer.split(f_gate(_clipped(writer, part, both)), [n, n], 1)
    if part.resets_behind:
        rest = writer.add("Mul", r, _product(writer, part, h, 2, 3))
    else:
        rest = _product(writer, part, writer.add("Mul", r, h), 2, 3)
    candidate = writer.add("Add", writer.slice(gates, 1, 2 * n, 3 * n), rest)
    candidate = f_candidate(_clipped(writer, part, candidate))
    # (1 - z) * candidate + z * h
    moved = writer.add("Mul", z, writer.add("Sub", h, candidate))
    return writer.add("Add", candidate, moved), c


def _rnn(writer: Writer, part: _Direction, gates: str, h: str, c: str) -> tuple[str, str]:
    total = writer.add("Add", gates, _product(writer, part, h, 0, 1))
    return part.activations[0](_clipped(writer, part, total)), c


_STEPS = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}

__all__ = ["recurrent"]
