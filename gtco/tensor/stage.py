"""Tensor types, operators and stages: the values that every layer above exchanges.

A model is a DAG of :class:`Operator`; a :class:`Stage` is a connected piece of it that becomes one
kernel (the ``(V', F)`` of GTCO, Section IV-B). All are frozen, hashable and go to JSON and back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any, NoReturn

Dim = int | str  # a number, or the name of a symbolic size
Attrs = tuple[tuple[str, Any], ...]

# The most elements that int32 indices count, with room for rounding up to whole blocks and for
# reading ahead. Kernels of larger tensors have int64 indices.
NARROW_INDICES = 2**30

ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}
# Weights alone have this dtype. Two lie in a byte; in numpy's arrays each has a byte of its own.
INT4 = "int4"


def item_bytes(dtype: str) -> float:
    """Bytes of an element in memory: half a byte for int4."""
    return 0.5 if dtype == INT4 else ITEM_BYTES[dtype]


@dataclass(frozen=True)
class TensorType:
    """Shape (integers, or names of symbolic sizes) and dtype (numpy's names) of a tensor."""

    shape: tuple[Dim, ...]
    dtype: str = "float32"

    @cached_property
    def size(self) -> int:
        """Number of elements; raises ``TypeError`` while a dimension is symbolic."""
        return prod(self.sizes)

    @cached_property
    def nbytes(self) -> int:
        return ceil(self.size * item_bytes(self.dtype))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape in numbers; raises ``TypeError`` while a dimension is symbolic."""
        return tuple(d if isinstance(d, int) else _symbolic(d) for d in self.shape)

    @cached_property
    def static(self) -> bool:
        """True if every dimension is a number."""
        return all(isinstance(d, int) for d in self.shape)

    @cached_property
    def text(self) -> str:
        """Shape and dtype in a stage's canonical JSON."""
        return f"{_json(list(self.shape))},{_json(self.dtype)}"

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"


def _symbolic(dim: str) -> NoReturn:
    raise TypeError(f"dimension '{dim}' is symbolic")


def make_attrs(**attrs: Any) -> Attrs:
    """Attributes as a sorted, hashable tuple; lists become tuples."""
    return tuple(sorted((key, _frozen(value)) for key, value in attrs.items()))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Operator:
    """One operator: ``output = kind(*inputs, **attrs)``. Tensors are named; ``type`` is the
    output's.

    ``kind`` is a row of ``gtco.tensor.operators.OPERATORS``, which gives its meaning and its
    attributes. ``name`` is for people (the ONNX node's, if there is one) and does not count in a
    stage's key.
    """

    kind: str
    inputs: tuple[str, ...]
    output: str
    type: TensorType
    attrs: Attrs = ()
    name: str = ""

    def __getitem__(self, key: str) -> Any:
        """The attribute's value; raises ``KeyError`` if it is missing."""
        for name, value in self.attrs:
            if name == key:
                return value
        raise KeyError(
            f"operator {self.name or self.output} ({self.kind}) has no attribute {key!r}"
        )

    def get(self, key: str, default: Any = None) -> Any:
        return next((value for name, value in self.attrs if name == key), default)

    @cached_property
    def text(self) -> tuple[str, str]:
        """The operator in a stage's canonical JSON: the parts before and after its tensors."""
        return self._text(self.attrs)

    @cached_property
    def text_anywhere(self) -> tuple[str, str]:
        """The same without where a slice begins."""
        return self._text(tuple(a for a in self.attrs if self.kind != "slice" or a[0] != "begin"))

    def _text(self, attrs: Attrs) -> tuple[str, str]:
        what = [list(self.type.shape), self.type.dtype, dict(attrs), ""]
        return f"[{_json(self.kind)},[", f"{_json(what)[1:]}"


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage reads. A constant's value is known at compile time, so it can be
    packed.
    """

    name: str
    type: TensorType
    constant: bool = False


@dataclass(frozen=True)
class Stage:
    """A connected piece of the graph that becomes one kernel: operators in topological order, one
    output.

    Every tensor but the last is used inside the stage alone, so a stage never needs a second output
    and a partition into stages never has a cycle.
    """

    inputs: tuple[StageInput, ...]
    operators: tuple[Operator, ...]

    @property
    def output(self) -> Operator:
        return self.operators[-1]

    @cached_property
    def wide(self) -> bool:
        """True if some tensor has more elements than kernels count in int32."""
        return any(t.static and t.size > NARROW_INDICES for t in self.types.values())

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every tensor in the stage, by name."""
        return {i.name: i.type for i in self.inputs} | {op.output: op.type for op in self.operators}

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of all inputs, each counted once."""
        return sum(i.type.nbytes for i in self.inputs)

    @cached_property
    def producers(self) -> Mapping[str, Operator]:
        return {op.output: op for op in self.operators}

    @cached_property
    def constants(self) -> frozenset[str]:
        return frozenset(i.name for i in self.inputs if i.constant)

    @cached_property
    def found(self) -> dict[tuple[object, ...], Any]:
        """Results about the stage that are needed again, by the question. They are not part of its
        value.
        """
        return {}

    def consumers(self, tensor: str) -> tuple[Operator, ...]:
        return tuple(op for op in self.operators if tensor in op.inputs)

    @cached_property
    def canonical(self) -> Stage:
        """The same stage with tensors named by position and without names for people. Equal
        programs give equal stages.
        """
        names = {i.name: f"p{n}" for n, i in enumerate(self.inputs)}
        names |= {op.output: f"t{n}" for n, op in enumerate(self.operators)}
        return Stage(
            tuple(StageInput(names[i.name], i.type, i.constant) for i in self.inputs),
            tuple(
                Operator(
                    op.kind, tuple(names[i] for i in op.inputs), names[op.output], op.type, op.attrs
                )
                for op in self.operators
            ),
        )

    @cached_property
    def key(self) -> str:
        """Hash of the canonical program, 16 hex digits: the same program has the same key in any
        model.
        """
        return self._key([op.text for op in self.operators])

    @cached_property
    def key_anywhere(self) -> str:
        """The key without where slices begin, which prices do not depend on: the steps of a loop
        that was written out have one, each of which takes its part of a sequence.
        """
        if all(op.kind != "slice" for op in self.operators):
            return self.key
        return self._key([op.text_anywhere for op in self.operators])

    def _key(self, texts: Sequence[tuple[str, str]]) -> str:
        # The JSON of the canonical stage is put together from its operators', because the search
        # needs thousands of keys of stages that share their operators.
        names = {i.name: f'"p{n}"' for n, i in enumerate(self.inputs)}
        names |= {op.output: f'"t{n}"' for n, op in enumerate(self.operators)}
        inputs = ",".join(
            f'["p{n}",{i.type.text},{_json(i.constant)}]'
            for n, i in enumerate(self.inputs)
        )
        operators = ",".join(
            f"{before}{','.join(names[i] for i in op.inputs)}],{names[op.output]},{behind}"
            for op, (before, behind) in zip(self.operators, texts, strict=True)
        )
        text = f'{{"inputs":[{inputs}],"operators":[{operators}]}}'
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Kinds of the operators, in order: ``matmul+add+gelu``."""
        return "+".join(op.kind for op in self.operators)

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [[i.name, list(i.type.shape), i.type.dtype, i.constant] for i in self.inputs],
            "operators": [
                [
                    op.kind,
                    list(op.inputs),
                    op.output,
                    list(op.type.shape),
                    op.type.dtype,
                    dict(op.attrs),
                    op.name,
                ]
                for op in self.operators
            ],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Stage:
        return Stage(
            tuple(StageInput(n, TensorType(tuple(s), d), c) for n, s, d, c in data["inputs"]),
            tuple(
                Operator(k, tuple(i), o, TensorType(tuple(s), d), make_attrs(**a), n)
                for k, i, o, s, d, a, n in data["operators"]
            ),
        )


def make_stage(
    operators: Iterable[Operator], types: Mapping[str, TensorType], constants: Iterable[str]
) -> Stage:
    """A stage of these operators (in topological order). Its inputs are the tensors that they read
    and do not make, in order of use.
    """
    ops = tuple(operators)
    made = {op.output for op in ops}
    read = dict.fromkeys(name for op in ops for name in op.inputs if name not in made)
    known = set(constants)
    return Stage(tuple(StageInput(name, types[name], name in known) for name in read), ops)
