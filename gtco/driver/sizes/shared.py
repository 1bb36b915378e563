"""What the compilations of one library's variants share: it is read, built and kept once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from gtco.driver.sizes.forms import Forms
from gtco.driver.sizes.layouts import Layouts
from gtco.graph.fusion.repeat import Skeleton, skeleton

if TYPE_CHECKING:
    from gtco.codegen.jobs import Kernel
    from gtco.graph.fusion.stages import Partition
    from gtco.graph.graph import Graph
    from gtco.search.policy import Policy
    from gtco.tensor.space import Config, Pick
    from gtco.tensor.stage import Stage


FAR = 6.0  # from a size that was searched to another that takes its stages


class Shared:
    """- ``kernels``: by the key of the stage, the config and the kernel that was built for it;
    - ``policy``: it keeps the prices of the stages that it was asked for. A product with 4 images
      of 64 columns has the price of one with 1 image of 256;
    - the model as it was read (:meth:`read`);
    - constants with equal contents as one array (:meth:`unite`);
    - ``layouts``: those in which constants are kept so far;
    - ``forms``: the configs of each kind of stage so far, where there are many sizes;
    - ``picks``: the choices for ``kernels`` that several sizes have together
      (:mod:`gtco.driver.sizes.sharing`), by the stage's key;
    - ``passes``: the rewrites that changed a graph, by the graph as it was lowered without its
      sizes;
    - ``partitions``: those that were searched, by the graph without its sizes.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, tuple[Config, Kernel]] = {}
        self.policy: Policy | None = None
        self.layouts = Layouts()
        self.forms = Forms()
        self.picks: dict[str, Pick] = {}
        self.passes: dict[Skeleton, set[int]] = {}
        self.partitions: dict[Skeleton, list[Partition]] = {}
        self._searched: dict[Skeleton, list[float]] = {}  # how large those are
        self._source: Any = None
        self._arrays: dict[tuple[Any, ...], np.ndarray] = {}
        self._united: set[int] = set()  # the ids of these arrays

    def read(self, reader: Callable[[], Any]) -> Any:
        """What ``reader`` gives, which is called once."""
        if self._source is None:
            self._source = reader()
        return self._source

    def unite(self, graph: Graph) -> None:
        """Gives the graph's constants the arrays of other graphs where their contents are equal."""
        for name in graph.constants:
            if graph.constants.is_later(name):  # it has no array of its own
                continue
            if id(array := graph.constants[name]) not in self._united:
                contents = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                key = str(array.dtype), array.shape, hashlib.sha256(contents).digest()
                graph.constants[name] = one = self._arrays.setdefault(key, array)
                self._united.add(id(one))

    def near_one_that_was_searched(self, graph: Graph, scale: float) -> bool:
        """True if stages were searched for a graph that differs from this one in sizes alone, and
        that is neither much smaller nor much larger, or where hundreds of sizes are between those.
        ``scale``: the product of its sizes.
        """
        if self.forms.settled:
            return skeleton(graph) in self._searched
        return any(
            max(scale / other, other / scale) <= FAR
            for other in self._searched.get(skeleton(graph), ())
        )

    def note_search(
        self, graph: Graph, scale: float, policy: Policy, stages: Collection[Stage]
    ) -> None:
        """These stages were searched for the graph. Their configs are tried first at others."""
        self._searched.setdefault(skeleton(graph), []).append(scale)
        for stage in {stage.key: stage for stage in stages}.values():
            self.forms.learn(policy, stage)

    def forget(self) -> None:
        """Lets go of everything, so that it takes no memory while the library is written."""
        self.kernels.clear()
        self.policy = None
        self.layouts = Layouts()
        self.forms = Forms()
        self.picks.clear()
        self.passes.clear()
        self._searched.clear()
        self.partitions.clear()
        self._source = None
        self._arrays.clear()
        self._united.clear()
