"""What each phase of a compile gives the next one, for one model at one size.

::

    read      the model           -> Lowered      its graph before any rewrite
    simplify  Lowered             -> Simplified   the canonical graph
    fuse      Simplified          -> Fused        stages; a Whole has the graph in its precision
    generate  Fused               -> Built        kernels
    tune      Built               -> Built        maybe other stages and kernels
    link      Built               -> the library

The first four are methods of :class:`gtco.driver.compilation.Compilation`. Graphs hold the
constants of a model, so whoever has a value lets go of it once the next one is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtco.codegen.generate import Generated
    from gtco.driver.linking.launching import Launching
    from gtco.graph.fusion.stages import Partition
    from gtco.graph.graph import Graph
    from gtco.runtime.plan import Batch
    from gtco.search.recorded import RecordedPolicy


@dataclass(frozen=True)
class Facts:
    """What the importer told of a model beside its graph, and the precision that follows.

    - ``precision``: that of products: what the options ask for, or bf16 for a bfloat16 file;
    - ``float16``: true for a float16 file on a CPU, whose weights are stored so;
    - ``identity``: which ONNX file it is; empty for a PyTorch module;
    - ``operators``: the operators of the model's file, by the names of their nodes.
    """

    precision: str = "fp32"
    float16: bool = False
    identity: str = ""
    operators: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """The model as it was read: its graph before any rewrite."""

    graph: Graph
    facts: Facts


@dataclass(frozen=True)
class Simplified:
    """The canonical graph of a model, channels last, in float32."""

    graph: Graph
    facts: Facts


@dataclass(frozen=True)
class Whole:
    """The model that is to be cut into stages: the canonical graph in its precision.

    - ``policy``: prices stages and picks their kernels;
    - ``plain``: the graph in float32, if stages are to be compared with it (``verify_layers``);
    - ``batch``: of a model that is run in parts, the batch that ``graph`` computes a part of.
    """

    graph: Graph
    facts: Facts
    policy: RecordedPolicy
    plain: Graph | None = None
    batch: Batch | None = None

    @property
    def times(self) -> int:
        """How often a run computes ``graph``."""
        return len(self.batch.firsts) if self.batch else 1


@dataclass(frozen=True)
class Fused:
    """The model cut into the stages of ``partition``. In ``graph`` some movement is copied into its
    readers. ``searched``: false if the stages are those of another size.
    """

    whole: Whole
    graph: Graph
    partition: Partition
    searched: bool = True

    @property
    def policy(self) -> RecordedPolicy:
        return self.whole.policy

    def predicted(self) -> float:
        """Seconds of the stages by the model of the machine alone. Models cut at different sizes
        are compared by it: few stages of any were measured, or all of one and none of another.
        """
        policy, partition = self.policy, self.partition
        if not policy.measured:
            return sum(partition.costs)  # priced so already
        return sum(map(policy.policy.predict, partition.stages))


@dataclass(frozen=True)
class CutModel:
    """A partition of ``graph`` with its kernels. ``key`` says how often it has each different
    stage.
    """

    graph: Graph
    partition: Partition
    generated: Generated

    @property
    def key(self) -> frozenset[tuple[str, int]]:
        return key_of(self.partition)

    @property
    def weights(self) -> dict[str, int]:
        """How often each stage of its kernels occurs; stages that could not be built are cut."""
        return dict(Counter(stage.key for stage in self.generated.stages))


def key_of(partition: Partition) -> frozenset[tuple[str, int]]:
    return frozenset(partition.weights().items())


@dataclass(frozen=True)
class Built:
    """The model with its kernels. ``launching``: of a model for a GPU, how it is launched."""

    whole: Whole
    model: CutModel
    launching: Launching | None = None

    @property
    def policy(self) -> RecordedPolicy:
        return self.whole.policy

    @property
    def generated(self) -> Generated:
        return self.model.generated

    def with_graph(self, graph: Graph) -> Built:
        """The same kernels for a graph with the same stages."""
        return replace(self, model=replace(self.model, graph=graph))
