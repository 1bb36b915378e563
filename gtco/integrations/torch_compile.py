"""``torch.compile(model, backend="gtco")``: the backend, which setup.py registers.

torch traces the model and hands over its graphs: one, or several around what it cannot trace. Each
graph is compiled as a module whose weights are constants. The tensors of modules are arguments of
the graph, so every call shows them, and a call with other weights, or with weights that were
changed, is noticed.

torch makes a graph for any size after it saw two, or where it is told to (``dynamic=True``,
``mark_dynamic``). Where the open size is a batch whose samples do not depend on each other, gtco
compiles one library for its range. Otherwise each new size is compiled when it is first seen.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from gtco.integrations.torch_batches import AnyBatch, any_batch
from gtco.integrations.torch_calls import with_calls
from gtco.integrations.torch_graph import (
    WRITES_SHARED,
    Facts,
    Result,
    alike,
    constants_of,
    examine,
    floats_of,
    sharing,
    with_floats,
)
from gtco.integrations.torch_sizes import Batch, batch_of
from gtco.support.errors import ModelError, OptionError, ShapeError, UnsupportedError, guarded

SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool
OF_OTHERS = ("shapes", "dims")  # options of compile_model that a traced graph has no use for
AGAIN = (
    "call torch.compiler.reset() after you changed weights, and the next call compiles again with "
    "the new ones"
)


def backend(
    graph_module: Any,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph for torch.compile. ``options`` are those of :func:`gtco.compile_model`
    without ``shapes`` and ``dims``. Raises a GtcoError, which torch puts into its
    ``BackendCompilerFailed``.
    """
    if mode is not None:
        raise OptionError(
            f"mode={mode!r} is for torch's own backend: give gtco options instead, such as "
            "torch.compile(model, backend='gtco', options={'tune': 'quick'})"
        )
    given = dict(options or {})
    for name in OF_OTHERS:
        if name in given:
            raise OptionError(
                f"{name} is for models with symbolic dimensions: with torch.compile the tensors of "
                "a call say the sizes, and dynamic=True or torch._dynamo.mark_dynamic(x, 0, min=1, "
                "max=64) which of them vary"
            )
    graph = Graph(graph_module, example_inputs, given)
    if not graph.is_dynamic:  # else the sizes are those of the first call
        graph.ready(example_inputs)
    return graph


class Graph:
    """A graph as torch.compile calls it: tensors in, a list of tensors out."""

    def __init__(
        self, graph_module: Any, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        self.graph_module, self.options = with_calls(graph_module), options
        self.constants = constants_of(graph_module, arguments)
        self.floats = floats_of(graph_module)
        self.is_dynamic = any(isinstance(value, SYMBOLS) for value in arguments)
        self.batch = batch_of(graph_module, self.constants) if self.is_dynamic else None
        if options.get("precision") == "int8":  # a quantized module has one shape
            self.batch = None
        self._made: dict[tuple[Any, ...], list[Specialized]] = {}
        self._ranged: dict[tuple[Any, ...], list[Specialized]] = {}
        self._graphs: dict[tuple[float, ...], Any] = {}  # by the values of the floats

    def __call__(self, *arguments: Any) -> list[Any]:
        return self.ready(arguments).run(arguments)

    def ready(self, arguments: Sequence[Any]) -> Specialized:
        """The library for these sizes and weights, which is compiled if it is not there yet."""
        key = self.key(arguments)
        for made in self._made.get(key, ()):
            if made.has_weights(arguments):
                return made
        with compile_lock:  # torch traces in one thread at a time
            same = [one for one in self._made.get(key, ()) if one.alive]
            for made in same:
                if made.has_weights(arguments):
                    return made
            _check_call(arguments)
            new = self._of_a_range(key, arguments) or self._specialized(arguments)
            for other, ones in self._made.items():
                self._made[other] = [one for one in ones if one.alive]
            for other, ones in self._ranged.items():
                self._ranged[other] = [one for one in ones if one.alive]
            self._made[key] = [*same, new]
            return new

    def key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The sizes and floats, where torch has not fixed them for this graph. Weights have
        None.
        """
        floats = tuple(float(arguments[number]) for number in self.floats)
        if not self.is_dynamic:
            return floats
        fixed = {*self.constants, *self.floats}
        sizes = (
            None
            if number in fixed
            else (tuple(value.shape) if isinstance(value, torch.Tensor) else value)
            for number, value in enumerate(arguments)
        )
        return (*sizes, floats)

    def _graph(self, arguments: Sequence[Any]) -> Any:
        """The graph with the floats of this call as constants."""
        if not self.floats:
            return self.graph_module
        values = {number: float(arguments[number]) for number in self.floats}
        key = tuple(values.values())
        if key not in self._graphs:
            self._graphs[key] = with_floats(self.graph_module, values)
        return self._graphs[key]

    def _specialized(self, arguments: Sequence[Any], batch: Batch | None = None) -> Specialized:
        known = (self.constants, self.floats)
        return Specialized(self._graph(arguments), arguments, *known, self.options, batch)

    def _of_a_range(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> Specialized | None:
        """The library of a range of batches, at these sizes; it is compiled if it is not there yet.
        None if there is none for them.
        """
        if self.batch is None or self.batch.of(arguments) not in self.batch.sizes:
            return None
        others = self.batch.without(key)
        made = [one for one in self._ranged.get(others, ()) if one.alive]
        for one in made:
            if one.has_weights(arguments):
                return one.at(self._graph(arguments), arguments, self.batch)
        try:
            new = self._specialized(arguments, self.batch)
        except ShapeError as error:  # samples depend on each other
            self.batch = None
            warnings.warn(
                f"torch leaves a batch open, and gtco compiles each size by itself: {error}",
                stacklevel=2,
            )
            return None
        self._ranged[others] = [*made, new]
        return new


class Specialized:
    """A graph for one set of sizes and one set of weights. Those that differ in a batch alone may
    have one library.
    """

    def __init__(
        self,
        graph_module: Any,
        arguments: Sequence[Any],
        constants: Sequence[int],
        floats: Sequence[int],
        options: Mapping[str, Any],
        batch: Batch | None = None,
    ) -> None:
        """``floats``: the arguments that the graph does not read. ``batch``: the library is for the
        range of its sizes. Then raises ShapeError if the model cannot be run in parts.
        """
        with _apart():
            self.facts = facts = _examined(graph_module, arguments)
            frozen = [n for n in constants if n not in facts.written]
            self._weights = [_Weight(n, arguments[n]) for n in frozen]
            self.fed = [
                n
                for n, value in enumerate(arguments)
                if isinstance(value, torch.Tensor) and n not in frozen and n not in floats
            ]
            self.model = self.alone = None
            if not self.fed:  # nothing depends on a call
                self.alone = graph_module
            elif facts.computed or facts.written:
                from gtco.compiler import compile_model

                module = TracedGraph(graph_module, arguments, self.fed, facts, batch)
                inputs = tuple(arguments[n] for n in self.fed)
                _check_sizes(inputs)
                chosen = dict(options)
                if batch is not None:
                    chosen["dims"] = {module.places(batch): batch.sizes}
                self.model = compile_model(module, inputs, **chosen)
            self._any: AnyBatch | None = None
            if batch is not None:
                with guarded("reading the graph of torch.compile"):
                    self._any = any_batch(graph_module, arguments, batch)

    def at(self, graph_module: Any, arguments: Sequence[Any], batch: Batch) -> Specialized | None:
        """The same library at another size of its range. None if the graph has other results
        there.
        """
        facts = self._any.at(batch.of(arguments)) if self._any is not None else None
        if facts is None:
            with _apart():
                facts = _examined(graph_module, arguments)
            if not alike(facts, self.facts):
                return None
        other = copy.copy(self)
        other.facts = facts
        return other

    @property
    def alive(self) -> bool:
        """False once a module that has one of the weights is gone."""
        return all(weight.tensor() is not None for weight in self._weights)

    def has_weights(self, arguments: Sequence[Any]) -> bool:
        """True if the arguments hold the weights of the library, and False if they hold other
        tensors. Raises ModelError for a weight that was changed.
        """
        if any(weight.tensor() is not arguments[weight.number] for weight in self._weights):
            return False
        for weight in self._weights:
            given = arguments[weight.number]
            if weight.state != _state(given):
                raise ModelError(
                    f"a weight of shape {tuple(given.shape)} was changed in place after the "
                    f"graph was compiled, and the library has its old values: {AGAIN}"
                )
        return True

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        if self.alone is not None:
            return list(self.alone(*arguments))
        if self.facts.written and not sharing(arguments).isdisjoint(self.facts.written):
            raise UnsupportedError(WRITES_SHARED)
        values: Sequence[Any] = ()
        if self.model is not None:
            given = (arguments[n] for n in self.fed)
            values = self.model(*(v.detach() if v.requires_grad else v for v in given))
            values = values if isinstance(values, tuple) else (values,)
        facts = self.facts
        count = len(facts.computed)
        for number, value in zip(facts.written, values[count:], strict=True):
            arguments[number].copy_(value)
        computed: dict[int, Any] = {}
        memory: dict[int, Any] = {}
        for number, value in zip(facts.computed, values, strict=False):
            result = facts.results[number]
            if result.block is not None and result.block not in memory:
                memory[result.block] = torch.empty(facts.items(result.block), dtype=value.dtype)
            computed[len(computed)] = _laid_out(result, value, memory)
        return [_result(result, arguments, computed) for result in facts.results]


@contextmanager
def _apart() -> Iterator[None]:
    """A context whose operations torch does not add to the graph that it is tracing."""
    with torch._guards.tracing(None), torch.inference_mode(False), torch.no_grad():
        yield


def _examined(graph_module: Any, arguments: Sequence[Any]) -> Facts:
    with guarded("reading the graph of torch.compile"):
        return examine(graph_module, arguments)


class _Weight:
    """A weight that a library holds, and how to notice that it was changed since."""

    __slots__ = ("number", "state", "tensor")

    def __init__(self, number: int, tensor: Any) -> None:
        self.number = number
        self.tensor: Any = weakref.ref(tensor)
        self.state = _state(tensor)


def _state(tensor: Any) -> tuple[int, int]:
    """What differs after a change in place: torch's count of writes, and the memory. Tensors that
    were made in inference mode have no such count.
    """
    return (-1 if tensor.is_inference() else tensor._version, tensor.data_ptr())


class TracedGraph(torch.nn.Module):
    """The graph as a module of its tensors that are not weights. It returns the results that have
    to be computed, and then the new values of what the graph writes to. With ``batch`` it takes
    that size from its inputs.
    """

    def __init__(
        self,
        graph_module: Any,
        arguments: Sequence[Any],
        fed: Sequence[int],
        facts: Facts,
        batch: Batch | None = None,
    ) -> None:
        super().__init__()
        self.graph_module, self.fed, self.facts = graph_module, tuple(fed), facts
        self.batch = batch
        self.arguments: list[Any] = [None] * len(arguments)
        for number, value in enumerate(arguments):
            if number in self.fed:
                continue
            if isinstance(value, torch.Tensor):
                self.register_buffer(f"weight_{number}", value.detach())
            else:
                self.arguments[number] = value

    def forward(self, *args: Any) -> tuple[Any, ...]:
        values = list(self.arguments)
        for number in range(len(values)):
            if hasattr(self, f"weight_{number}"):
                values[number] = getattr(self, f"weight_{number}")
        for number, value in zip(self.fed, args, strict=True):
            values[number] = value.clone() if number in self.facts.written else value
        if self.batch is not None:
            size = self.batch.of(values)
            for number in self.batch.numbers:
                values[number] = size
        results = self.graph_module(*values)
        return (
            *(results[n] for n in self.facts.computed),
            *(values[n] for n in self.facts.written),
        )

    def places(self, batch: Batch) -> str:
        """The inputs and axes that have the batch, as ``dims`` names them."""
        names = {number: f"args_{n}" for n, number in enumerate(self.fed)}
        return ",".join(f"{names[number]}.{axis}" for number, axis in batch.places)


def _check_call(arguments: Sequence[Any]) -> None:
    """Raises ModelError if PyTorch would record the call for gradients, or run it elsewhere."""
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ModelError(
            "gtco compiles for inference and computes no gradients, and this call needs them: call "
            "the model inside 'with torch.no_grad():' (or torch.inference_mode()), or call "
            "model.requires_grad_(False) first"
        )
    if other := {str(t.layout) for t in tensors if t.layout != torch.strided}:
        raise ModelError(
            f"tensors are of {', '.join(sorted(other))}, and gtco takes dense ones: convert them "
            "with x.to_dense()"
        )
    if elsewhere := {str(t.device) for t in tensors if t.device.type != "cpu"}:
        raise ModelError(
            f"tensors are on {', '.join(sorted(elsewhere))}, and gtco compiles for CPUs under "
            "torch.compile: move the model and its inputs with .to('cpu'). For GPUs there is "
            "gtco.compile_to_file(..., target='cuda:...') and gtco.load"
        )


def _check_sizes(inputs: Sequence[Any]) -> None:
    """Raises ShapeError for an empty tensor."""
    for value in inputs:
        if value.numel() == 0:
            raise ShapeError(
                f"a tensor of shape {tuple(value.shape)} is empty, and gtco compiles for sizes of "
                "1 or more: give such a call to the model that you gave torch.compile"
            )


def _laid_out(result: Result, value: Any, memory: Mapping[int, Any]) -> Any:
    """The value with the strides that PyTorch predicts for its own result, as its tracing does. In
    ``memory`` are those of the blocks.
    """
    place = result.place
    assert place is not None
    if result.block is not None:
        laid = place.view(memory[result.block])
        for axis, stride in enumerate(place.stride):
            if stride == 0:  # of an expanded axis every element is the first one
                value, laid = value.narrow(axis, 0, 1), laid.narrow(axis, 0, 1)
        laid.copy_(value)
        return place.view(memory[result.block])
    if value.stride() == place.stride or not place.dense:
        return value
    laid = torch.empty_strided(place.size, place.stride, dtype=value.dtype)
    return laid.copy_(value)


def _result(result: Result, arguments: Sequence[Any], computed: Mapping[int, Any]) -> Any:
    if result.argument is not None:
        assert result.place is not None
        base = arguments[result.argument]
        return result.place.view(base, base.storage_offset())
    if result.computed is None:
        return result.value
    value = computed[result.computed]
    if not result.is_view:
        return value
    assert result.place is not None
    return result.place.view(value)
