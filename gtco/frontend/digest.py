"""A digest of everything that a model consists of: its graph and the values of its weights. Two
sources with one digest compile to the same library.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy

from gtco.frontend.onnx import OnnxSource
from gtco.frontend.pytorch.export import Exported
from gtco.support import later

# Operators of these namespaces mean the same in every process; a user's own may be other code.
NAMESPACES = ("aten", "prim", "prims", "higher_order")
MODULES = ("torch", "operator", "_operator", "math", "builtins")


def digest_of(source: OnnxSource | Exported) -> str | None:
    """The digest. None for a program with operators that are not torch's own, because then their
    names do not say what they compute.
    """
    if isinstance(source, OnnxSource):
        return _of_onnx(source)
    return _of_program(source.program, source.names, source.autocast)


def _of_onnx(read: OnnxSource) -> str:
    digest = hashlib.sha256(read.skeleton.SerializeToString(deterministic=True))
    digest.update(read.identity.encode())
    for name, array in sorted(read.weights.items()):
        _add(digest, name, later.read(array))
    return digest.hexdigest()


def _of_program(program: Any, names: list[str] | None, autocast: str) -> str | None:
    digest = hashlib.sha256(repr((names, autocast, str(program.graph_signature))).encode())
    for path, module in program.graph_module.named_modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            if node.op == "call_function" and not _is_known(node.target):
                return None
            value = node.meta.get("val") if node.op == "placeholder" else None
            if value is not None:
                kind = getattr(value, "dtype", ""), getattr(value, "shape", value)
                digest.update(repr((node.name, *map(str, kind))).encode())
        digest.update(repr((path, getattr(module, "code", ""))).encode())
    digest.update(str(sorted(map(str, program.range_constraints.items()))).encode())
    tensors = {**program.state_dict, **program.constants}
    for name, tensor in sorted(tensors.items()):
        if not hasattr(tensor, "untyped_storage"):
            return None  # an object of a user's class
        _add(digest, name, _bytes_of(tensor), f"{tensor.dtype} {tuple(tensor.shape)}")
    return digest.hexdigest()


def _add(digest: Any, name: str, array: numpy.ndarray, kind: str = "") -> None:
    data = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    label = repr((name, kind or f"{array.dtype} {array.shape}")).encode()
    digest.update(struct.pack("<QQ", len(label), len(data)) + label)
    digest.update(data.data)


def _bytes_of(tensor: Any) -> numpy.ndarray:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    found: numpy.ndarray = flat.view(torch.uint8).numpy() if flat.numel() else numpy.empty(0, "u1")
    return found


def _is_known(operator: Any) -> bool:
    namespace = getattr(operator, "namespace", None)
    if namespace is not None:
        return namespace in NAMESPACES
    module = getattr(operator, "__module__", None) or ""
    return module.partition(".")[0] in MODULES
