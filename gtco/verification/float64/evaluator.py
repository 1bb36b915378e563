"""Evaluates ONNX models in numpy, in float64 or with the roundings of float32 and narrower formats.

The operators are those of ``onnx.reference``. gtco has its own (``operators.py``, ``spatial.py``,
``resizing.py``, ``quantized.py``) where those are slow, use only float32, or lack something.
Weights stay in their own format and are widened when they are used. A tensor is dropped after its
last reader has run. Time and memory are bounded: :class:`Unjudged` says which operator or bound
stopped an evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from gtco.support.dtypes import is_float
from gtco.support.onnx_messages import read_inside
from gtco.verification.float64.operators import OPERATORS, Arithmetic, arithmetic
from gtco.verification.float64.quantized import QUANTIZED
from gtco.verification.float64.resizing import RESIZING
from gtco.verification.float64.spatial import SPATIAL
from gtco.verification.judge import Unjudged

Array = NDArray[Any]

# Operators of onnx.reference that loop over elements in Python: microseconds an element.
LOOPS = frozenset(
    "AffineGrid CausalConvWithState Col2Im DFT DeformConv Det GRU LRN LSTM LinearAttention "
    "MaxUnpool NonMaxSuppression RNN ReverseSequence RoiAlign STFT TensorScatter Unique".split()
)
OURS = [*OPERATORS, *SPATIAL, *RESIZING, *QUANTIZED]
ELEMENTS = 100_000  # elements that an operator that loops may read and write
RANDOM = frozenset(
    "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)


@dataclass
class Limits:
    """The limits of evaluations: ``seconds`` for all of them together, ``bytes`` for the tensors of
    one at any time.
    """

    seconds: float
    bytes: int
    _spent: float = field(default=0.0, init=False)
    _since: float = field(default=0.0, init=False)

    def __enter__(self) -> Limits:
        self._since = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._spent += time.monotonic() - self._since

    def check(self, held: int) -> None:
        if self._spent + time.monotonic() - self._since > self.seconds:
            raise Unjudged(f"it takes more than {self.seconds:g} s")
        if held > self.bytes:
            raise Unjudged(f"it takes more than {self.bytes / 2**30:.2g} GB of memory")


class Evaluator:
    """Evaluates a ``ModelProto`` that has its local functions inlined and its weights in it.

    Raises :class:`Unjudged` if an operator has no meaning here.
    """

    def __init__(self, model: Any, limits: Limits) -> None:
        self.limits = limits
        kind = type("_Bounded", (_Bounded,), {"limits": limits})
        with np.errstate(all="ignore"):
            try:
                self._inner = kind(_plain_domains(model), new_ops=OURS)
            except Unjudged:
                raise
            except Exception as error:  # it raises exceptions of any type
                raise Unjudged(_said(error)) from error

    def run(self, inputs: Mapping[str, Array], rules: Arithmetic) -> list[Array]:
        """The outputs in order. Floats have the dtype of ``rules``."""
        given = {name: _in(value, rules.dtype) for name, value in inputs.items()}
        with self.limits, arithmetic(rules), np.errstate(all="ignore"):
            try:
                found = self._inner.run(None, given)
            except Unjudged:
                raise
            except MemoryError as error:
                raise Unjudged("memory does not suffice") from error
            except Exception as error:
                raise Unjudged(_said(error)) from error
        if not all(isinstance(value, np.ndarray | np.generic) for value in found):
            raise Unjudged("an output is a sequence or an optional, and no tensor")
        return [_in(np.asarray(value), rules.dtype) for value in found]


class _Bounded(ReferenceEvaluator):
    """Runs graphs, subgraphs and functions. It keeps only the tensors that are read again."""

    limits: Limits

    def _load_impl(self, node: Any, input_types: Any = None) -> Any:
        if node.op_type in RANDOM:
            raise Unjudged(f"{node.op_type} is random")
        try:
            return super()._load_impl(node, input_types)
        except (NotImplementedError, FileNotFoundError, RuntimeError) as error:
            from onnx.reference.op_run import RuntimeContextError

            if isinstance(error, RuntimeContextError) and input_types is None:
                raise  # the caller tries again with types
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise Unjudged(f"it has no {name}") from error

    def run(
        self,
        output_names: Any,
        feed_inputs: dict[str, Any],
        attributes: dict[str, Any] | None = None,
        intermediate: bool = False,
        **_: Any,
    ) -> Any:
        """Does the same as the base class, without its checks of annotated shapes."""
        wanted = list(self.output_names if output_names is None else output_names)
        dtype = arithmetic.rules.dtype
        values: dict[str, Any] = {"": None, **self.rt_inits_, **feed_inputs}
        last = {name: n for n, node in enumerate(self.rt_nodes_) for name in node.input}
        inner = () if self.onnx_graph_ is None else map(read_inside, self.onnx_graph_.node)
        kept = {"", *wanted}.union(*inner)
        held = sum(_bytes(value) for value in feed_inputs.values())
        for n, node in enumerate(self.rt_nodes_):
            given = [_in(values[name], dtype) for name in node.input]
            extra: dict[str, Any] = {}
            if node.has_linked_attribute and attributes:
                extra["linked_attributes"] = attributes
            if node.need_context():
                extra["context"] = values
            _refuse_loops(node, given)
            results = node.run(*given, **extra)
            for name, value in zip(node.output, results, strict=False):
                if not name:  # an output that the node leaves out; inputs are left out alike
                    continue
                values[name] = _in(value, dtype)
                held += _bytes(values[name])
            self.limits.check(held)
            for name in {*node.input, *node.output}:
                if last.get(name, n) == n and name not in kept and name in values:
                    held -= _bytes(values.pop(name)) if name not in self.rt_inits_ else 0
        return values if intermediate else [values[name] for name in wanted]


def _in(value: Any, dtype: Any) -> Any:
    """Floats in the format of the evaluation; all other values unchanged."""
    if isinstance(value, np.ndarray | np.generic) and is_float(value.dtype):
        return np.asarray(value).astype(dtype, copy=False)
    return value


def _bytes(value: Any) -> int:
    return int(getattr(value, "nbytes", 0))


def _refuse_loops(node: Any, given: Sequence[Any]) -> None:
    kind = node.onnx_node.op_type
    if kind in LOOPS:
        elements = sum(int(getattr(value, "size", 0)) for value in given)
        if elements > ELEMENTS:
            raise Unjudged(f"its {kind} would loop over {elements} elements in Python")


def _plain_domains(model: Any) -> Any:
    """A copy in which ONNX's own domain has only its short name."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in copy.opset_import:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
    for node in copy.graph.node:
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    return copy


def _said(error: Exception) -> str:
    """The first line of an error, shortened."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}"
