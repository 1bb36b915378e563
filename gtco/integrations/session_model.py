"""The ONNX model of a session: inputs, outputs and metadata, and the shapes that runs give it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gtco.integrations.session_values import ModelMetadata, NodeArg, type_of
from gtco.support.errors import InputError, OptionError, guarded


class SessionModel:
    """An ONNX model, and what is known of it before it is compiled.

    - ``source``: the file's path or its bytes;
    - ``sizes``: of dimensions that the session's options fix;
    - ``options``: of :func:`gtco.compile_model`.

    Raises :class:`gtco.support.errors.GtcoError` if the model cannot be read or has no such
    options.
    """

    def __init__(self, source: Any, sizes: Mapping[str, int], options: Mapping[str, Any]) -> None:
        with guarded("gtco.InferenceSession of a model"):  # onnx may not be installed
            from onnx import helper

            from gtco.frontend.onnx import not_a_tensor, read_onnx

        _check_options(options)
        own = isinstance(source, bytes | bytearray)  # a copy, which the caller does not change
        self.sizes, self.options = dict(sizes), dict(options)
        # Later sizes are compiled of what was read, whatever becomes of the file.
        self.model = read = read_onnx(bytes(source) if own else Path(source))
        graph = read.skeleton.graph
        known = {tensor.name for tensor in graph.initializer} | set(read.weights)

        def node(what: str, value: Any) -> NodeArg:
            kind = value.type.tensor_type
            if not kind.elem_type:
                raise not_a_tensor(what, value)
            shape: list[int | str | None] = []
            for dim in kind.shape.dim:
                known_size = dim.dim_value > 0  # some exporters write -1 for an open size
                given = dim.dim_value if known_size else dim.dim_param or None
                shape.append(self.sizes.get(given, given) if isinstance(given, str) else given)
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
            return NodeArg(value.name, type_of(dtype), shape)

        self.inputs = [node("input", value) for value in graph.input if value.name not in known]
        self.outputs = [node("output", value) for value in graph.output]
        file = read.skeleton
        self.meta = ModelMetadata(
            file.producer_name,
            graph.name,
            file.domain,
            file.doc_string,
            graph.doc_string,
            file.model_version,
            {entry.key: entry.value for entry in file.metadata_props},
        )

    @property
    def is_open(self) -> bool:
        """True if an input has a size that is not known yet."""
        return any(not isinstance(size, int) for node in self.inputs for size in node.shape)

    def shapes_of(self, feed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs. Raises InputError if they do not fit the model."""
        found = {}
        for node in self.inputs:
            if node.name not in feed:
                known = ", ".join(f"'{node.name}'" for node in self.inputs)
                raise InputError(f"missing input '{node.name}'; the inputs are {known}")
            shape = tuple(int(size) for size in np.shape(feed[node.name]))
            fits = len(shape) == len(node.shape) and all(
                not isinstance(wanted, int) or wanted == size
                for wanted, size in zip(node.shape, shape, strict=True)
            )
            if not fits:
                raise InputError(
                    f"input '{node.name}' has shape {shape}, and the model takes {node.shape}"
                )
            if 0 in shape:
                raise InputError(
                    f"input '{node.name}' has shape {shape}, which has no elements: gtco runs "
                    "models on one sample or more"
                )
            found[node.name] = shape
        return found


def _check_options(options: Mapping[str, Any]) -> None:
    for name in ("shapes", "dims", "dynamic_shapes", "example_inputs"):
        if name in options:
            raise OptionError(
                f"{name}: a session compiles the sizes that its runs have. "
                "SessionOptions.add_free_dimension_override_by_name fixes one, and "
                f"gtco.compile_to_file(model, 'model.so', {name}=...) makes a library that a "
                "session opens"
            )
    from gtco.compiler import checked

    checked(options)  # a model of open sizes would show a wrong one in its first run alone
