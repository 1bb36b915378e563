"""LSTMs with projections (``proj_size``, the recognizers of speech) in operators of ONNX, step by
step. ONNX's LSTM has no projection. torch's exporter leaves it out, and takes it for a weight of
the next layer or direction (torch 2.13, onnxscript 0.7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gtco.frontend.pytorch.missing import ints


def projected(torch: Any) -> dict[Any, Any]:
    """What ``torch.onnx.export`` takes as ``custom_translation_table``."""
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_lstm

    def product(x: Any, weight: Any) -> Any:
        return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))

    def direction(
        x: Any, h: Any, c: Any, weights: Sequence[Any], places: Sequence[int]
    ) -> tuple[Any, Any, Any]:
        """[steps, batch, features] and both states -> the projected states of all steps, in the
        order of x, and the last of both states. ``places``: the steps in the order of computation.
        """
        of_x, of_h, *biases, projection = weights
        x = product(x, of_x)
        for bias in biases:
            x = op.Add(x, bias)
        made = {}
        for place in places:
            now = op.Gather(x, op.Constant(value_int=place), axis=0)
            gates = op.Add(now, product(h, of_h))
            i, f, g, o = op.Split(gates, axis=-1, num_outputs=4)
            kept, new = op.Mul(op.Sigmoid(f), c), op.Mul(op.Sigmoid(i), op.Tanh(g))
            c = op.Add(kept, new)
            h = product(op.Mul(op.Sigmoid(o), op.Tanh(c)), projection)
            made[place] = op.Unsqueeze(h, ints(0))
        return op.Concat(*(made[place] for place in sorted(made)), axis=0), h, c

    def lstm(
        x: Any,
        hx: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        directions = 2 if bidirectional else 1
        count = len(params) // (num_layers * directions)  # the weights of one direction
        if count == (4 if has_biases else 2):
            return aten_lstm(
                x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
            )
        steps = x.shape[1 if batch_first else 0]
        if not isinstance(steps, int):
            raise NotImplementedError("an LSTM with proj_size needs a known number of steps")
        if batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        last: list[list[Any]] = [[], []]
        for layer in range(num_layers):
            results = []
            for number in range(layer * directions, (layer + 1) * directions):
                h, c = (op.Gather(s, op.Constant(value_int=number), axis=0) for s in hx)
                places = range(steps)[:: -1 if number % directions else 1]
                weights = params[number * count : (number + 1) * count]
                result, h, c = direction(x, h, c, weights, places)
                results.append(result)
                for states, one in zip(last, (h, c), strict=True):
                    states.append(op.Unsqueeze(one, ints(0)))
            x = op.Concat(*results, axis=-1)
        if batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        return x, *(op.Concat(*states, axis=0) for states in last)

    return {torch.ops.aten.lstm.input: lstm}
