"""What the tests of ``torch.compile(model, backend="gtco")`` share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # of float32 sums in another order


def check_same(found, wanted):
    """Equal structures, and tensors of equal values, dtypes and strides."""
    ours, structure = pytree.tree_flatten(found)
    theirs, expected = pytree.tree_flatten(wanted)
    assert structure == expected
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(mine, other, **TOLERANCE, check_stride=True)
        else:
            assert mine == other


def refused(kind, call):
    """The text of the error inside torch's."""
    with pytest.raises(BackendCompilerFailed) as failed:
        call()
    assert isinstance(failed.value.inner_exception, kind)
    return str(failed.value.inner_exception)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.inner(x))
