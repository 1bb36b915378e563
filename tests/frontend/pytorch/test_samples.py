"""torch's own samples of its operators (its OpInfo database): gtco computes each as torch does, or
refuses it in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.lower.walk import lower
from gtco.support.errors import GtcoError, InternalError

PARTS = 16
REAL = "float64 float32 float16 int64 int32 int16 int8 uint8 bool"
ARRAYS = [getattr(torch, name) for name in REAL.split()]  # types that numpy has
MOST = 6  # samples of an operator, spread over all of them
# They draw, give memory that nobody wrote, or look at the memory behind a view.
OTHERS = (
    "as_strided bernoulli cauchy dropout empty exponential geometric log_normal multinomial normal "
    "rand randint randn randn_like rand_like randint_like uniform new_empty"
).split()
# One step of a range between tensors loses its axis in torch's exporter.
KNOWN = {"linspace.tensor_overload", "logspace.tensor_overload"}
FAMILIES = ("_refs", "ops.", "sparse", "torch.ops", "linalg.", "special.", "fft.", "signal")


def _named(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def _is_judged(op: Any) -> bool:
    words = op.name.split(".")[-1]
    drawn = any(words == other or words.startswith(f"{other}_") for other in OTHERS)
    drawn = drawn or "dropout" in words
    return not (drawn or op.name.startswith(FAMILIES) or _named(op) in KNOWN)


class Call(nn.Module):
    """An operator with the sample's numbers and texts; its tensors are the inputs."""

    def __init__(self, op: Any, sample: tuple[Any, ...]) -> None:
        super().__init__()
        self.op, self.sample = op, sample

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        first, args, kwargs = pytree.tree_map(
            lambda value: next(left) if isinstance(value, Tensor) else value, self.sample
        )
        return tuple(pytree.tree_leaves(self.op(first, *args, **kwargs)))


def _calls(op: Any) -> Iterator[tuple[Call, list[Tensor], list[Tensor]]]:
    """Calls on dense tensors of real numbers, their tensors, and what torch gives."""
    found = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        given = sample.input, sample.args, sample.kwargs
        tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
        if not tensors:
            continue
        call = Call(op.op, given)
        try:
            wanted = call(*(t.clone() for t in tensors))
        except Exception:
            continue  # a sample of an error
        every = [*tensors, *wanted]
        if all(isinstance(t, Tensor) and t.numel() and t.dtype in ARRAYS for t in every):
            found.append((call, tensors, list(wanted)))
    step = max(1, len(found) // MOST)
    yield from found[::step][:MOST]


def _check(op: Any) -> None:
    """Within 1e-4, and 1e-3 of each value; all but floats are equal."""
    for call, tensors, wanted in _calls(op):
        inputs = [t.detach().clone() for t in tensors]
        try:
            graph = lower(load_pytorch(call, tuple(inputs), simplify=False))
        except InternalError:
            raise
        except GtcoError:
            continue
        arrays = [t.numpy() for t in inputs]
        got = graph.evaluate(dict(zip(graph.inputs, arrays, strict=True))).values()
        for ours, value in zip(got, wanted, strict=True):
            theirs = value.numpy()
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), call.sample
            rtol, atol = (1e-3, 1e-4) if theirs.dtype.kind == "f" else (0, 0)
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.scheduled
@pytest.mark.parametrize("part", range(PARTS))
def test_samples_of_torch(part: int) -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    judged = [op for op in op_db if torch.float32 in op.dtypes and _is_judged(op)]
    assert len(judged) > 300
    wrong = {}
    for op in judged[part::PARTS]:
        try:
            _check(op)
        except Exception as error:
            wrong[_named(op)] = str(error)
    assert not wrong
