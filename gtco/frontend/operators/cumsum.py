"""CumSum from the end of an axis on, as Relax's flips around its sums.

The importer of TVM writes a function of its own for the flips, which nobody can fuse. The graph
makes one operator of the three (``graph/rewrites/running_sums.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax


def cumsum(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """The sums, if the node is reversed; else None, and TVM's importer takes the node. It also
    takes an axis that is not a constant, and refuses it.
    """
    axis = inputs[1]
    if not attrs.get("reverse", 0) or not isinstance(axis, tvm.ir.expr.GenericConst):
        return None
    along, exclusive = int(axis.value.numpy().reshape(-1)[0]), bool(attrs.get("exclusive", 0))
    turned = builder.emit(relax.op.flip(inputs[0], along))
    sums = builder.emit(relax.op.cumsum(turned, along, exclusive=exclusive))
    return builder.emit(relax.op.flip(sums, along))
