"""Operators that ONNX defines by simpler ones, written out."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx.helper
import onnx.inliner


def written_out(model: onnx.ModelProto, operators: Sequence[tuple[str, str]]) -> onnx.ModelProto:
    """The model with these operators, (domain, type), by their definitions. ``model`` itself is
    given the types of its initializers, which ONNX's inliner does not know otherwise. Raises
    what the inliner raises where a definition depends on more than is known.
    """
    for t in model.graph.initializer:
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        )
    return onnx.inliner.inline_selected_functions(
        model, list(operators), exclude=False, inline_schema_functions=True
    )
