"""What the closed form knows of a stage: the class of its product and the sizes (DyGen, Section
III-A1: operators are classified, and each class has configs of its own).

Table II has one class for all products. Here a class is also what the micro-kernel reads, because
an operand that is packed while the model runs, or is half as wide, wants other blocks. Products of
few rows are classes of their own: they wait for their weights, and others for the multipliers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from gtco.tensor.analysis.chains import anchor
from gtco.tensor.analysis.contraction import MatmulView, contraction
from gtco.tensor.stage import ITEM_BYTES, Stage

FEW = 32  # a product of at most so many rows has few: it uses each weight once for each row
LINEAR = 4096.0  # the unit of a linear size, so that coefficients are of one magnitude
SIZES = ("batch", "m", "n", "k", "cores")


@dataclass(frozen=True)
class Product:
    """C[batch, m, n] = A[batch, m, k] x B[batch, k, n].

    ``kind`` says what is multiplied: the dtype of A, that of B if it is another, and "weights" if B
    is constant.
    """

    kind: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def operator_class(self) -> str:
        """The operator class: the kind, and whether there are few rows."""
        return f"{self.kind}, few rows" if self.m <= FEW else self.kind

    @property
    def nbytes(self) -> int:
        """Bytes of an element of B."""
        return ITEM_BYTES[self.kind.removesuffix(" weights").split()[-1]]

    def sizes(self, cores: int) -> tuple[int, ...]:
        """The numbers that :data:`SIZES` names."""
        return self.batch, self.m, self.n, self.k, cores


def product_of(stage: Stage) -> Product | None:
    """The product of a stage; None if it has none, if its weights have scales, or if a size is
    symbolic.
    """
    op = anchor(stage, "matmul")
    if op is None or len(op.inputs) != 2:
        return None
    types = [*(stage.types[x] for x in op.inputs), op.type]
    if any(isinstance(size, str) for type_ in types for size in type_.shape):
        return None
    view = contraction(stage, op)
    if not isinstance(view, MatmulView):
        return None
    dtypes = dict.fromkeys(stage.types[x].dtype for x in op.inputs)
    weights = ("weights",) if op.inputs[1] in stage.constants else ()
    return Product(" ".join((*dtypes, *weights)), view.batch, view.m, view.n, view.k)


def features(sizes: tuple[int, ...]) -> list[float]:
    """The terms of the polynomials that sizes alone decide, named by :func:`feature_names`: 1, the
    logarithms and the linear sizes as in Fig. 3, and products of two logarithms of m, n and k.
    """
    logs = [log2(size) for size in sizes]
    _, m, n, k, _ = logs
    linear = [size / LINEAR for size in sizes[1:4]]
    return [1.0, *logs, *linear, m * m, n * n, k * k, m * n, m * k, n * k]


def feature_names() -> list[str]:
    logs = [f"log {name}" for name in SIZES]
    pairs = ["m log m", "n log n", "k log k", "m log n", "m log k", "n log k"]
    return ["1", *logs, *SIZES[1:4], *(f"log {pair}" for pair in pairs)]
