"""The judge decides between a compiled model and its reference if they differ. It is the same model
in float64.

A judge also says how exact the precision of the compiled model can be on the same inputs: it
evaluates once more, with the roundings of that precision. The distance between the two evaluations
is the error of the arithmetic alone. It does not depend on the reference's own kernels: ONNX
Runtime's float32 logistic, for example, is off by 6e-8, and 0 below -18.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Unjudged(Exception):
    """The judge cannot decide. The message says why, as part of a sentence."""


class Judge(Protocol):
    """``name`` is the judge's name. Both methods give the model's outputs in order and may raise
    :class:`Unjudged`: :meth:`exact` computes in float64, :meth:`rounded` with the roundings of
    ``precision``. ``selects``: does the model select elements by their values, so that rounding
    decides which of two nearly equal ones it takes?
    """

    @property
    def name(self) -> str: ...
    @property
    def selects(self) -> bool: ...
    def exact(self, inputs: Mapping[str, Array]) -> Sequence[Array]: ...
    def rounded(self, inputs: Mapping[str, Array], precision: str) -> Sequence[Array]: ...


class TorchJudge:
    """A PyTorch module with its parameters and inputs in float64.

    ``run(inputs, change)`` gives its outputs with ``change`` applied to every float tensor.
    """

    name = "float64 (PyTorch)"
    selects = False  # not known

    def __init__(self, run: Callable[[Mapping[str, Array], Any], Sequence[Array]]) -> None:
        self._run = run

    def exact(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for tensors that the module makes itself
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
        """The outputs in float32. For a narrower precision, parameters and inputs are rounded to
        it: they are at least one operand of every product.
        """
        import torch

        narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        try:
            return self._run(inputs, lambda x: x.to(narrow).float())
        except Exception as error:
            raise Unjudged(f"PyTorch cannot run it: {type(error).__name__}") from error
