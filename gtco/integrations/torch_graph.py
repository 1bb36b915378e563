"""A graph that torch.compile hands to a backend, for inputs of one set of shapes: which of its
arguments are weights, which ones it writes to, and how its results lie in memory.

gtco computes values and has memory of its own, so a result that is a view in PyTorch must be made a
view again. :func:`examine` finds out by a run on tensors without data (FakeTensor).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gtco.frontend.pytorch.program_writes import arguments_of, written_of
from gtco.support.errors import ModelError, UnsupportedError


@dataclass(frozen=True)
class Place:
    """Where an element of a tensor lies in its storage: torch's size, stride and offset."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Any) -> Place:
        return Place(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def view(self, base: Any, start: int = 0) -> Any:
        """The view of ``base``'s storage, whose offset counts from ``start``."""
        return base.as_strided(self.size, self.stride, start + self.offset)

    @property
    def end(self) -> int:
        """Where the storage may end at the earliest."""
        if 0 in self.size:
            return self.offset
        steps = zip(self.size, self.stride, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in steps) + 1

    @property
    def dense(self) -> bool:
        """True if every element of a block of memory is used once."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Result:
    """One result of the graph.

    - ``value``: a number or None, which is the result itself;
    - ``argument``: the result is a view of this argument; the offset of its place counts from where
      the argument begins in its storage, which may be elsewhere in the next call;
    - ``computed``: it is this one of the values that the library computes, or a view of it;
    - ``place``: its place; of a computed value also the layout that it gets;
    - ``block``: results of one block overlap, and none has all of their memory. Each is computed,
      and they get their places in one new memory.
    """

    value: Any = None
    argument: int | None = None
    computed: int | None = None
    place: Place | None = None
    is_view: bool = False
    block: int | None = None


@dataclass(frozen=True)
class Facts:
    """What a graph does with its arguments.

    - ``written``: the arguments that it changes in place;
    - ``results``: its results in order;
    - ``computed``: the results whose values the library computes, by their number in ``results``.
    """

    written: tuple[int, ...]
    results: tuple[Result, ...]
    computed: tuple[int, ...]

    def items(self, block: int) -> int:
        """The elements of a block's memory."""
        places = [result.place for result in self.results if result.block == block]
        return max(place.end for place in places if place is not None)


def alike(one: Facts, other: Facts) -> bool:
    """True if a graph computes and writes the same, at sizes that may differ."""

    def roles(facts: Facts) -> list[tuple[int | None, int | None, bool, int | None]]:
        return [(r.argument, r.computed, r.is_view, r.block) for r in facts.results]

    same = (one.written, one.computed) == (other.written, other.computed)
    return same and roles(one) == roles(other)


def constants_of(graph_module: Any, arguments: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of the arguments that are parameters, buffers or other tensors of modules."""
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return tuple(
        number
        for number, (node, value) in enumerate(zip(nodes, arguments, strict=True))
        if isinstance(value, torch.Tensor)
        and (
            isinstance(value, torch.nn.Parameter)
            or node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        )
    )


def floats_of(graph_module: Any) -> tuple[int, ...]:
    """The numbers of the arguments that are floats of the traced program, such as the epsilon of a
    LayerNorm. With ``dynamic=True`` torch hands them over in tensors, and the graph reads each by
    ``item()``.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return tuple(
        number
        for number, node in enumerate(nodes)
        if getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False)
        and all(_reads(user) for user in node.users)
    )


def with_floats(graph_module: Any, values: Mapping[int, float]) -> Any:
    """The graph with these floats as constants, by the numbers of their arguments. It takes the
    same arguments, and does not read those of the floats.
    """
    graph = copy.deepcopy(graph_module.graph)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for number, value in values.items():
        for user in list(nodes[number].users):
            user.replace_all_uses_with(value)
            graph.erase_node(user)
    return torch.fx.GraphModule(graph_module, graph)


def _reads(node: Any) -> bool:
    return bool(node.op == "call_method" and node.target == "item")


def examine(graph_module: Any, arguments: Sequence[Any]) -> Facts:
    """What the graph does, for arguments of these shapes. Raises ModelError for a graph of a module
    in training mode, and UnsupportedError for results that gtco cannot give.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    shared = sharing(arguments)
    given = [_without_data(fake, value, n in shared) for n, value in enumerate(arguments)]
    seen = _Watch()
    try:
        with torch.inference_mode(False), torch.no_grad(), fake, seen:
            results = graph_module(*given)
    except DataDependentOutputException:
        raise UnsupportedError(
            "the graph reads a number out of a tensor (item()), which gtco does not know when it "
            "compiles: keep the number in a tensor, or compile the parts around it"
        ) from None
    if seen.random or any(m.training for m in graph_module.modules() if not _is_graph(m)):
        raise ModelError(
            f"the graph has {seen.random or 'a module in training mode'}, as modules have in "
            "training mode: gtco compiles for inference; call model.eval() first, and draw random "
            "numbers outside of the compiled function"
        )
    storages = [_storage(value) if isinstance(value, torch.Tensor) else None for value in given]
    written = tuple(n for n, storage in enumerate(storages) if storage in seen.written)
    if not shared.isdisjoint(written):
        raise UnsupportedError(WRITES_SHARED)
    return _facts(list(results), given, storages, written)


WRITES_SHARED = (
    "the graph writes into an argument that shares its memory with another one, which gtco cannot "
    "follow: give it copies (x.clone())"
)


def sharing(arguments: Sequence[Any]) -> set[int]:
    """The numbers of the arguments whose storage another argument has too."""
    found: dict[int, list[int]] = {}
    for number, value in enumerate(arguments):
        if isinstance(value, torch.Tensor):
            found.setdefault(_storage(value), []).append(number)
    return {number for numbers in found.values() if len(numbers) > 1 for number in numbers}


def _without_data(fake: Any, value: Any, alone: bool) -> Any:
    """A tensor as the graph is examined with. ``alone``: with a storage of its own, though it
    shares one in this call, so that a result is a view of the argument that the graph takes it of.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not alone:
        return fake.from_tensor(value, static_shapes=True)
    with fake:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _is_graph(module: Any) -> bool:
    return isinstance(module, torch.fx.GraphModule)


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _facts(
    results: list[Any], given: list[Any], storages: list[int | None], written: tuple[int, ...]
) -> Facts:
    computed: list[int] = []
    found: list[Result] = []
    bases, blocks = _bases(results)
    numbers: dict[int, int] = {}
    for base in bases.values():
        if base not in numbers and _storage(results[base]) not in storages:
            numbers[base] = len(computed)
            computed.append(base)
    for number, value in enumerate(results):
        if not isinstance(value, torch.Tensor):
            found.append(Result(value=value))
            continue
        if value.is_complex():
            raise UnsupportedError(
                "a result of the graph is complex, and gtco's results are real: return "
                "torch.view_as_real(result)"
            )
        storage = _storage(value)
        place = Place.of(value)
        if storage in storages:
            argument = storages.index(storage)
            owner = given[argument]
            place = replace(place, offset=place.offset - owner.storage_offset())
            result = Result(argument=argument, place=place)
        else:
            base, block = bases[number], blocks.get(number)
            owner = results[base if block is None else block]
            is_view = base != number
            result = Result(computed=numbers[base], place=place, is_view=is_view, block=block)
        if owner.dtype != value.dtype:
            raise UnsupportedError(
                f"a result is a view of {owner.dtype} as {value.dtype}, and gtco's views have the "
                "type of what they are of: reinterpret it outside of the compiled model"
            )
        found.append(result)
    return Facts(written, tuple(found), tuple(computed))


def _bases(results: list[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Two answers for each result that is a tensor. The first is the result that covers all of the
    memory in which it lies; without one it is the result itself. The second is its block. Results
    form a block if they overlap and none covers their memory; the first of them gives its number.
    """
    sharing: dict[int, list[int]] = {}
    for number, value in enumerate(results):
        if isinstance(value, torch.Tensor):
            sharing.setdefault(_storage(value), []).append(number)
    found, blocks = {}, {}
    for together in sharing.values():
        whole = [n for n in together if _is_whole(results[n])]
        for number in together:
            found[number] = whole[0] if whole else number
        if len(together) > 1 and not whole and _overlap([results[n] for n in together]):
            blocks.update(dict.fromkeys(together, together[0]))
    return found, blocks


def _is_whole(tensor: Any) -> bool:
    """True if the tensor has every element of its storage once."""
    place = Place.of(tensor)
    nbytes = tensor.untyped_storage().nbytes()
    return place.dense and place.offset == 0 and tensor.numel() * tensor.itemsize == nbytes


def _overlap(tensors: list[Any]) -> bool:
    """True if tensors of one storage have an element in common."""
    used = torch.zeros(tensors[0].untyped_storage().nbytes(), dtype=torch.bool)
    for tensor in tensors:
        size, item = tensor.shape, tensor.itemsize
        place = Place.of(tensor)
        steps = tuple(stride * item for stride in place.stride)
        mine = Place((*size, item), (*steps, 1), place.offset * item).view(used)
        if mine.any():
            return True
        mine.fill_(True)
    return False


class _Watch(TorchDispatchMode):
    """Sees every operator of a run.

    - ``written``: the storages that are written to;
    - ``random``: an operator that a module has in training mode, in words.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int | None] = set()
        self.random = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # torch.cond, whose branches write to nothing
            return func(*args, **kwargs)
        arguments = arguments_of(func._schema, args, kwargs)
        given = {argument.name: value for argument, value in arguments}
        for value in written_of(arguments):
            if isinstance(value, torch.Tensor):
                self.written.add(_storage(value))
        if _draws(func, given):
            self.random = f"a random operator ({func})"
        elif given.get("training", given.get("train")) is True and (
            given.get("running_mean") is not None
        ):
            self.random = "BatchNorm that updates its statistics"
        return func(*args, **kwargs)


def _draws(operator: Any, given: dict[str, Any]) -> bool:
    """True for an operator that draws random numbers. Attention is said to, and does so only with
    dropout.
    """
    if "dropout_p" in given or "scaled_dot_product" in str(operator):
        return bool(given.get("dropout_p"))
    return torch.Tag.nondeterministic_seeded in operator.tags
