"""From a seed to a graph: light operators, a kernel family, light operators, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from tests.random.builder import MOST, Builder, Drawn, Tensor
from tests.random.families import FAMILIES, small
from tests.random.indexing import INDEXING
from tests.random.light import light
from tests.random.qdq import QDQ
from tests.random.quantized import QUANTIZED

# In 17, which TorchScript's exporter writes, the axes of reductions are attributes.
OPSETS = (17, 18, 20, 21)
SPECIAL = (18, 21)  # with NaN and infinities, and without onnxsim, which ignores them
PRODUCTS = ("MatMul", "Gemm", "Conv", "Einsum", "MatMulNBits")
BETWEEN = frozenset(
    "Add Identity Reshape Squeeze Transpose Unsqueeze Gather GatherElements GatherND Slice".split()
)
SMALL = 6
RANKS = (1, 2, 3, 3, 4, 4, 5)


def draw(seed: int, opset: int, batch: int = 0, last: Sequence[int] = ()) -> Drawn:
    """The graph of this seed. With ``batch``, its first input has that size on its first axis, and
    small ones on the others (:mod:`tests.random.batches`). ``last``: the sizes of its last axes
    (:mod:`tests.random.sizes`).
    """
    random = Random(seed)
    b = Builder(random, opset, f"g{seed}_")
    shape = [b.size() for _ in range(b.pick(RANKS))]
    if batch:
        shape = [batch, *(min(size, SMALL) for size in shape[1:])]
    if last:
        shape = [min(size, SMALL) for size in shape[: 4 - len(last)]] + [*last]
    x = b.input(shape)
    inner: list[Tensor] = []
    # their own choices, so that a graph without them stays what it was
    apart, beside, around = (Random(seed + n) for n in (3, 5, 7))
    for _ in range(b.pick([1, 1, 1, 2, 3])):
        x = _some_light(b, x)
        inner.append(x)
        family = b.pick(FAMILIES)
        if apart.random() < 0.15:
            family = apart.choice(INDEXING)
        if beside.random() < 0.15:
            family = beside.choice(QUANTIZED)
        if around.random() < 0.1:
            family = around.choice(QDQ)
        x = family(b, small(b, x, MOST))
        inner.append(x)
    x = _some_light(b, x)
    outputs = b.outputs(x, inner, 0.15)
    if b.special and opset in SPECIAL and b.chance(0.5) and not _composed(b):
        _specials(b)
    return Drawn(seed, opset, tuple(b.nodes), b.constants, b.used(), outputs, b.smooth)


def _some_light(b: Builder, x: Tensor) -> Tensor:
    for _ in range(b.pick([0, 0, 1, 1, 2, 3])):
        x = light(b, x)
    return x


def _composed(b: Builder) -> bool:
    """True if a product by constants reads another one, with only movement and sums between. gtco
    may make one product of them. An infinity then stays infinite, where the second product would
    make it NaN (``docs/limits.md``).
    """
    products: set[str] = set()
    for node in b.nodes:
        read = not products.isdisjoint(node.input[:1] if node.op_type in PRODUCTS else node.input)
        constant = node.op_type in PRODUCTS and node.input[1] in b.constants
        if read and constant:
            return True
        if constant or (read and node.op_type in BETWEEN):
            products.update(node.output)
    return False


def _specials(b: Builder) -> None:
    """Puts a few NaN and infinities into the float inputs."""
    for array in b.feeds.values():
        if array.dtype == np.float32 and array.size and b.chance(0.6):
            for _ in range(b.random.randint(1, 3)):
                array.flat[b.random.randrange(array.size)] = b.pick([np.nan, np.inf, -np.inf])
