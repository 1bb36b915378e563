"""The constants of a graph by name. Those that are computed of a file's narrow weights are computed
again whenever a pass reads them (:mod:`gtco.support.later`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping

import numpy

from gtco.support.dtypes import numpy_dtype
from gtco.support.later import Later, read
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, TensorType

# Operators that cost no more than reading a few bytes for each element, and that have a value for
# every operand.
_CHEAP = frozenset("add cast concat identity multiply permute reshape slice subtract".split())
_LEAST = 1 << 14  # bytes of a result that is not kept


class Constants(MutableMapping[str, numpy.ndarray]):
    """A mapping of names to arrays, some of which are computed at each reading. Who asks only for
    names, shapes or types makes none of them.
    """

    def __init__(self, given: Mapping[str, numpy.ndarray | Later] | None = None) -> None:
        kept = given._kept if isinstance(given, Constants) else given or {}
        self._kept: dict[str, numpy.ndarray | Later] = dict(kept)

    def __getitem__(self, name: str) -> numpy.ndarray:
        return read(self._kept[name])

    def __setitem__(self, name: str, value: numpy.ndarray | Later) -> None:
        self._kept[name] = value

    def __delitem__(self, name: str) -> None:
        del self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def type(self, name: str) -> TensorType:
        """The type of a constant, without its values."""
        kept = self._kept[name]
        return TensorType(tuple(kept.shape), str(kept.dtype))

    def nbytes(self, name: str) -> int:
        """The bytes of a constant's array, without its values."""
        return self._kept[name].nbytes

    def is_later(self, name: str) -> bool:
        """True for a constant that is computed at each reading."""
        return isinstance(self._kept[name], Later)

    def result(self, op: Operator) -> numpy.ndarray | Later:
        """What an operator makes of constants. It is computed later if it is cheap, and if its
        operands take less memory.
        """
        sources = [self._kept[name] for name in op.inputs]
        given = sum(s.nbytes for s in {id(s): s for s in sources}.values())
        wider = op.type.nbytes > given or any(isinstance(s, Later) for s in sources)
        if op.kind in _CHEAP and op.type.nbytes >= _LEAST and wider:
            dtype = numpy_dtype(op.type.dtype)
            return Later(op.type.sizes, dtype, lambda: evaluate(op, *map(read, sources)))
        return evaluate(op, *map(read, sources))

    def mapped(
        self,
        name: str,
        function: Callable[[numpy.ndarray], numpy.ndarray],
        shape: tuple[int, ...] | None = None,
    ) -> numpy.ndarray | Later:
        """What a function makes of a constant, an array of the same dtype and of this shape, by
        default the same one. It is computed later if the constant is.
        """
        kept = self._kept[name]
        if isinstance(kept, Later):
            return Later(shape or kept.shape, kept.dtype, lambda: function(kept.array()))
        return function(kept)

    def same(self, other: Constants) -> bool:
        """True if both have the same arrays by the same names; equal copies do not count."""
        mine, its = self._kept, other._kept
        return mine.keys() == its.keys() and all(mine[name] is its[name] for name in mine)

    def settle(self) -> None:
        """Computes all that were left for later, once and for all."""
        for name, kept in self._kept.items():
            self._kept[name] = read(kept)
