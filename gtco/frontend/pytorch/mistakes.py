"""Operators of PyTorch that torch's ONNX exporter writes as something else, without an error (torch
2.13, onnxscript 0.7). They are refused.

- ``avg_pool`` with a ``divisor_override``, which the exporter leaves out;
- ``batch_norm`` in training mode with running statistics, which it takes in place of the batch's;
- ``cross_entropy`` with ``label_smoothing``, which it leaves out, or of probabilities, which it
  takes for places of classes;
- shifts of bytes without a sign, of which it makes bytes with one;
- attention of grouped queries with a negative scale, of which it takes the square root; and with
  ``dropout_p``, which PyTorch applies in evaluation mode too, and which it leaves out;
- ``scatter_reduce`` by ``mean``, which it writes as another reduction;
- antialiased ``interpolate`` with ``align_corners``, or by a factor that gives no whole size. The
  exporter leaves both out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gtco.support.errors import UnsupportedError

SHIFTS = ("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift")


def refuse_mistakes(program: Any) -> None:
    """Raises UnsupportedError for the first operator of an ``ExportedProgram`` that the exporter
    gets wrong.
    """
    for node in program.graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        name = schema.name.removeprefix("aten::")
        if said := _mistake(name, given, node):
            raise UnsupportedError(
                f"node '{node.name}' ({name}): torch's ONNX exporter leaves out {said}, so what it "
                "writes would give other values. Write it with other operators"
            )


def _mistake(name: str, given: Mapping[str, Any], node: Any) -> str:
    """What the exporter leaves out, in words; "" if nothing."""
    if name.startswith("avg_pool") and given.get("divisor_override") is not None:
        return "divisor_override"
    if name.endswith("batch_norm") or "native_batch_norm_legit" in name:
        if given.get("training") and given.get("running_mean") is not None:
            return "the statistics of the batch (training=True; give no running_mean and _var)"
    if name == "scaled_dot_product_attention":
        if given.get("dropout_p"):
            return "dropout_p, which PyTorch applies here (give 0.0 unless self.training)"
        if given.get("enable_gqa") and (given.get("scale") or 0.0) < 0.0:
            return "the sign of the scale beside enable_gqa"
    if name == "cross_entropy_loss" and given.get("label_smoothing"):
        return "label_smoothing"
    if name == "cross_entropy_loss" and given["target"].meta["val"].dtype.is_floating_point:
        return "that the targets are probabilities"
    if name in SHIFTS and "uint8" in str(node.meta["val"].dtype):
        return "that the bytes have no sign (shift int32 instead)"
    if name.startswith("scatter_reduce") and given.get("reduce") == "mean":
        return "that the values are averaged (reduce='mean')"
    if name.startswith("_upsample_") and name.endswith("_aa"):
        if given.get("align_corners"):
            return "align_corners beside antialias"
        factors = given.get("scale_factors") or [given.get("scales_h"), given.get("scales_w")]
        sizes = (given.get("input", given.get("self"))).meta["val"].shape[2:]
        made = node.meta["val"].shape[2:]
        if any(
            f is not None and size * f != out
            for size, f, out in zip(sizes, factors, made, strict=True)
        ):
            return "the factor, of which antialias needs more than the size (give size=)"
    return ""
