"""Who decides where a compiled model and its reference differ: the same model in float64.

A judge also says what the precision of the compiled model can give at best on the same inputs, by
evaluating once more with that precision's roundings. The distance of the two is what arithmetic
costs there, whatever the reference's own kernels make of it: ONNX Runtime's float32 logistic, for
one, is off by 6e-8 and 0 below -18.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Unjudged(Exception):
    """The judge cannot say: why, as part of a sentence."""


class Judge(Protocol):
    """``name`` says who it is. Both give the model's outputs in order, and raise
    :class:`Unjudged`: :meth:`exact` in float64, :meth:`rounded` as ``precision`` rounds."""

    @property
    def name(self) -> str: ...
    def exact(self, inputs: Mapping[str, Array]) -> Sequence[Array]: ...
    def rounded(self, inputs: Mapping[str, Array], precision: str) -> Sequence[Array]: ...


class TorchJudge:
    """A PyTorch module with its parameters and inputs in float64.

    ``run(inputs, change)`` gives its outputs with ``change`` applied to every float tensor.
    """

    name = "float64 (PyTorch)"

    def __init__(self, run: Callable[[Mapping[str, Array], Any], Sequence[Array]]) -> None:
        self._run = run

    def exact(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of what the module makes itself
        try:
            found = self._run(inputs, lambda x: x.double())
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0][:200]
            raise Unjudged(f"PyTorch cannot run it in float64: {said}") from error
        finally:
            torch.set_default_dtype(before)
        if any(x.dtype in (np.float32, np.float16) for x in found):
            raise Unjudged("the module makes float32 of its own")
        return found

    def rounded(self, inputs: Mapping[str, Array], precision: str) -> Sequence[Array]:
        """float32; parameters and inputs of less are rounded to it, which is one of every product's
        operands at least."""
        import torch

        narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        try:
            return self._run(inputs, lambda x: x.to(narrow).float())
        except Exception as error:
            raise Unjudged(f"PyTorch cannot run it: {type(error).__name__}") from error
