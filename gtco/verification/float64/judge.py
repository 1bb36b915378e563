"""An ONNX model as a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gtco.machine.memory import memory_left
from gtco.support.onnx_messages import nodes
from gtco.verification.judge import Unjudged

Array = NDArray[Any]

SECONDS = 120.0  # of all evaluations of one verification
BYTES = 4 * 2**30  # of the tensors of one evaluation; less if less memory is free
SELECTING = frozenset({"TopK", "ArgMax", "ArgMin"})
OPERANDS: Mapping[str, Any] = {"fp32": None, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


class OnnxJudge:
    """The ONNX model that ``read`` gives, evaluated by :mod:`gtco.verification.float64.evaluator`.
    It is read at the first question.
    """

    name = "float64 (ONNX's reference operators)"

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._evaluator: Any = None

    @cached_property
    def selects(self) -> bool:
        return any(node.op_type in SELECTING for node in nodes(self._read().graph))

    def exact(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        return self._run(inputs, np.float64, None)

    def rounded(self, inputs: Mapping[str, Array], precision: str) -> Sequence[Array]:
        return self._run(inputs, np.float32, OPERANDS[precision])

    def _run(self, inputs: Mapping[str, Array], dtype: Any, operands: Any) -> Sequence[Array]:
        from gtco.verification.float64.evaluator import Evaluator, Limits
        from gtco.verification.float64.operators import Arithmetic

        if isinstance(self._evaluator, Unjudged):
            raise self._evaluator
        try:
            if self._evaluator is None:
                room = memory_left()
                limits = Limits(SECONDS, BYTES if room is None else min(BYTES, room // 2))
                self._evaluator = Evaluator(self._read(), limits)
            found: Sequence[Array] = self._evaluator.run(inputs, Arithmetic(dtype, operands))
            return found
        except Unjudged as why:
            self._evaluator = why  # the next case would end in the same way
            raise
