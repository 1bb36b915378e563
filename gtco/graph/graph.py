"""Graph: a model as a DAG of canonical operators on named tensors.

Passes copy and change it. A rewrite starts with ``graph = graph.copy()`` (weights are shared,
nothing large is copied), edits through the methods below and ends with ``graph.prune()``. Operators
are frozen, so an edit puts a new operator in the place of an old one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx
import numpy

from gtco.graph.constants import Constants
from gtco.graph.infer import infer_type
from gtco.support.errors import InputError, ShapeError
from gtco.support.later import Later
from gtco.tensor.operators import OPERATORS
from gtco.tensor.reference import evaluate as evaluate_operator
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage


@dataclass
class Graph:
    """Operators by the tensor that they make, in topological order.

    ``types`` has the types of all tensors: inputs, constants and outputs of operators. Each output
    of the graph is made by an operator of its own (an ``identity`` if the output is an input or a
    constant) and has the name that the user gave it.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: dict[str, TensorType]
    constants: Constants = field(default_factory=Constants)
    operators: dict[str, Operator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants = Constants(self.constants)
        self._made_users: dict[str, dict[str, None]] | None = None
        self._counters: dict[str, int] = {}
        self._edits = 0
        self._pruned: tuple[object, ...] = ()  # the state that ``prune`` left

    @property
    def _users(self) -> dict[str, dict[str, None]]:
        """The outputs of the operators that read a tensor. Most passes over a graph change nothing,
        so it is made when it is needed first: by a question, or by the first edit.
        """
        if self._made_users is None:
            self._made_users = {}
            for op in self.operators.values():
                self._register(op)
        return self._made_users

    @property
    def _state(self) -> tuple[object, ...]:
        return self._edits, self.outputs, len(self.operators), len(self.constants)

    # -- queries -----------------------------------------------------------------------------------

    def dag(self) -> networkx.DiGraph:
        """The graph of operators: nodes are their output tensors, edges go from producer to
        consumer. Inputs and constants have no node.
        """
        dag = networkx.DiGraph()
        dag.add_nodes_from(self.operators)
        dag.add_edges_from(
            (source, op.output)
            for op in self.operators.values()
            for source in op.inputs
            if source in self.operators
        )
        return dag

    @property
    def key(self) -> str:
        """Hash of the program, 16 hex digits. The same model has the same key, whatever the names
        of its tensors and the values of its weights are.
        """
        whole = make_stage(self.operators.values(), self.types, self.constants).key
        places = {name: str(n) for n, name in enumerate(self.operators)}
        text = ",".join([whole, *(places[name] for name in self.outputs)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def producer(self, tensor: str) -> Operator | None:
        """The operator that makes ``tensor``; None for an input or a constant."""
        return self.operators.get(tensor)

    def consumers(self, tensor: str) -> list[Operator]:
        """The operators that read ``tensor``, each once."""
        return [self.operators[output] for output in self._users.get(tensor, ())]

    def is_constant(self, tensor: str) -> bool:
        return tensor in self.constants

    def only_user(self, tensor: str) -> Operator | None:
        """The only operator that reads ``tensor``; None if several or none read it, or if it is an
        output.
        """
        users = self._users.get(tensor, {})
        return (
            self.operators[next(iter(users))]
            if len(users) == 1 and tensor not in self.outputs
            else None
        )

    # -- edits -------------------------------------------------------------------------------------

    def copy(self) -> Graph:
        """A graph that can be edited without changing this one; constants' arrays are shared."""
        twin = Graph(
            self.inputs, self.outputs, dict(self.types), self.constants, dict(self.operators)
        )
        twin._counters = dict(self._counters)
        twin._edits, twin._pruned = self._edits, self._pruned
        return twin

    def fresh(self, hint: str) -> str:
        """A tensor name that is not used yet: ``hint`` itself if it is free."""
        name = hint
        while name in self.types:
            self._counters[hint] = self._counters.get(hint, 0) + 1
            name = f"{hint}_{self._counters[hint]}"
        return name

    def put(self, op: Operator) -> str:
        """Adds ``op``, or puts it in the place of the operator that makes the same tensor. Returns
        the tensor's name.
        """
        self._edits += 1
        _ = self._users  # made before the edit
        old = self.operators.get(op.output)
        if old is not None:
            self._unregister(old)
        self.operators[op.output] = op
        self.types[op.output] = op.type
        self._register(op)
        return op.output

    def add(
        self,
        kind: str,
        inputs: Iterable[str],
        type: TensorType | None = None,
        *,
        name: str = "",
        output: str | None = None,
        **attrs: Any,
    ) -> str:
        """Appends an operator. Its type is inferred if kind and inputs determine it. Its output's
        name is fresh unless ``output`` gives it; then an existing operator of that name is
        replaced. Returns the output's name.
        """
        sources = tuple(inputs)
        frozen = make_attrs(**attrs)
        made = type or infer_type(kind, [self.types[source] for source in sources], dict(frozen))
        return self.put(Operator(kind, sources, output or self.fresh(kind), made, frozen, name))

    def add_constant(self, value: numpy.ndarray | Later, hint: str = "constant") -> str:
        """Adds a constant with a fresh name."""
        name = self.fresh(hint)
        self.constants[name] = value if isinstance(value, Later) else numpy.asarray(value)
        self.types[name] = self.constants.type(name)
        return name

    def add_result(
        self, kind: str, inputs: Iterable[str], type: TensorType | None = None, **attrs: Any
    ) -> str:
        """Adds the constant that an operator makes of constants, without adding the operator. Its
        name is fresh, after the first input. Large cheap ones are computed when they are read.
        """
        sources, frozen = tuple(inputs), make_attrs(**attrs)
        made = type or infer_type(kind, [self.types[source] for source in sources], dict(frozen))
        return self.add_constant(
            self.constants.result(Operator(kind, sources, "", made, frozen)), sources[0]
        )

    def replace_uses(self, old: str, new: str) -> None:
        """Makes every reader of ``old`` read ``new``. If ``old`` is an output it stays, as
        ``identity(new)``.
        """
        if old == new:
            return
        for op in self.consumers(old):
            inputs = tuple(new if source == old else source for source in op.inputs)
            self.put(Operator(op.kind, inputs, op.output, op.type, op.attrs, op.name))
        if old in self.outputs:
            name = self.operators[old].name if old in self.operators else ""
            self.put(Operator("identity", (new,), old, self.types[old], (), name))

    def remove(self, output: str) -> None:
        """Removes an operator that nobody reads."""
        assert not self._users.get(output) and output not in self.outputs, (
            f"{output} is still in use"
        )
        self._edits += 1
        self._unregister(self.operators[output])
        del self.operators[output], self.types[output]

    def drop_dead(self, output: str) -> None:
        """Removes the operator and, in turn, the operators that only it read (constants stay until
        ``prune``).
        """
        stack = [output]
        while stack:
            tensor = stack.pop()
            if (
                tensor in self.operators
                and not self._users.get(tensor)
                and tensor not in self.outputs
            ):
                stack.extend(self.operators[tensor].inputs)
                self.remove(tensor)

    def drop_constants(self, names: Iterable[str]) -> None:
        """Removes those of these constants that nobody reads."""
        for name in names:
            if not self._users.get(name):
                del self.constants[name], self.types[name]

    def prune(self) -> Graph:
        """Drops operators and constants that no output needs, and sorts topologically. Returns the
        graph itself.
        """
        if self._pruned == self._state:
            return self
        live: set[str] = set()
        stack = list(self.outputs)
        while stack:
            tensor = stack.pop()
            if tensor not in live:
                live.add(tensor)
                if tensor in self.operators:
                    stack.extend(self.operators[tensor].inputs)
        for output in [o for o in self.operators if o not in live]:
            self._unregister(self.operators[output])
            del self.operators[output], self.types[output]
        for name in [c for c in self.constants if c not in live]:
            del self.constants[name], self.types[name]
        self._sort()
        self._pruned = self._state
        return self

    def _sort(self) -> None:
        """Sorts topologically, the smallest old position first, so a correct order stays as it is.
        A cycle raises ``NetworkXUnfeasible``.
        """
        position = {output: index for index, output in enumerate(self.operators)}
        if all(
            position.get(source, -1) < here
            for here, op in enumerate(self.operators.values())
            for source in op.inputs
        ):
            return
        order = networkx.lexicographical_topological_sort(self.dag(), key=position.__getitem__)
        self.operators = {output: self.operators[output] for output in order}

    def _register(self, op: Operator) -> None:
        users = self._users
        for source in op.inputs:
            users.setdefault(source, {})[op.output] = None

    def _unregister(self, op: Operator) -> None:
        users = self._users
        for source in op.inputs:
            users.get(source, {}).pop(op.output, None)

    # -- whole-graph -------------------------------------------------------------------------------

    def check(self) -> Graph:
        """Checks the invariants (an ``AssertionError`` is a bug of gtco's). Returns the graph
        itself.
        """
        known = set(self.inputs) | set(self.constants)
        assert not set(self.inputs) & set(self.constants), "an input cannot be a constant"
        for name in known:
            assert name in self.types, f"{name} has no type"
        for name in self.constants:
            assert self.types[name] == self.constants.type(name), (
                f"constant {name} has a wrong type"
            )
        for output, op in self.operators.items():
            where = f"{op.kind} {op.name or output}"
            assert output == op.output, f"{where}: keyed as {output}"
            assert output not in known, f"{where}: {output} is made twice"
            assert self.types.get(output) == op.type, (
                f"{where}: type {self.types.get(output)} is not {op.type}"
            )
            info = OPERATORS[op.kind]
            assert info.inputs[0] <= len(op.inputs) <= info.inputs[1], (
                f"{where}: {len(op.inputs)} inputs"
            )
            given = tuple(key for key, _ in op.attrs if key not in info.optional)
            assert tuple(sorted(info.attrs)) == given, f"{where}: attributes {op.attrs}"
            for source in op.inputs:
                assert source in known, f"{where}: reads {source}, which nothing before it makes"
            inferred = infer_type(
                op.kind, [self.types[s] for s in op.inputs], dict(op.attrs), op.type
            )
            assert inferred == op.type, f"{where}: type {op.type}, inferred {inferred}"
            known.add(output)
        for output in self.outputs:
            assert output in self.operators, f"output {output} is made by no operator"
        assert len(set(self.outputs)) == len(self.outputs), "an output is named twice"
        return self

    def evaluate(
        self, inputs: Mapping[str, numpy.ndarray], dtype: str | None = None
    ) -> dict[str, numpy.ndarray]:
        """Outputs by name, computed with numpy (``gtco.tensor.reference``).

        ``dtype="float64"`` computes every float tensor in double precision: the reference for
        numerical tests. Raises InputError for a missing input and ShapeError for one of the wrong
        shape.
        """
        values: dict[str, numpy.ndarray] = {}
        for name in self.inputs:
            if name not in inputs:
                raise InputError(f"input '{name}' is missing; the model takes {list(self.inputs)}")
            value = numpy.asarray(inputs[name])
            if tuple(value.shape) != self.types[name].shape:
                raise ShapeError(
                    f"input '{name}' has shape {value.shape}, "
                    f"the model wants {self.types[name].shape}"
                )
            values[name] = _widen(value, dtype)
        remaining = {tensor: len(users) for tensor, users in self._users.items()}
        for op in self.operators.values():
            arrays = [
                values[s] if s in values else _widen(self.constants[s], dtype) for s in op.inputs
            ]
            values[op.output] = evaluate_operator(op, *arrays, dtype=dtype)
            # tensors without later readers are dropped, so that large models fit
            for source in set(op.inputs):
                remaining[source] -= 1
                if remaining[source] == 0 and source not in self.outputs:
                    values.pop(source, None)
        return {name: values[name] for name in self.outputs}

    def histogram(self) -> dict[str, int]:
        """The number of operators of each kind, the most frequent first."""
        counts: dict[str, int] = {}
        for op in self.operators.values():
            counts[op.kind] = counts.get(op.kind, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def dump(self) -> str:
        """One readable line per input, operator and output."""
        lines = [f"input  %{name}: {self.types[name]}" for name in self.inputs]
        for op in self.operators.values():
            sources = ", ".join(self._label(source) for source in op.inputs)
            attrs = ", ".join(f"{key}={_short(value)}" for key, value in op.attrs)
            note = f"  # {op.name}" if op.name else ""
            lines.append(
                f"%{op.output}: {op.type} = {op.kind}({sources})"
                + (f" {{{attrs}}}" if attrs else "")
                + note
            )
        lines += [f"output %{name}: {self.types[name]}" for name in self.outputs]
        return "\n".join(lines) + "\n"

    def _label(self, tensor: str) -> str:
        if tensor not in self.constants:
            return f"%{tensor}"
        known = self.types[tensor]
        return f"{self.constants[tensor].item():g}" if known.size == 1 else f"@{tensor}:{known}"


def _widen(value: numpy.ndarray, dtype: str | None) -> numpy.ndarray:
    return value.astype(dtype, copy=False) if dtype and value.dtype.kind == "f" else value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
