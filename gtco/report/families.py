"""The families of stages: what a stage's colour says."""

from __future__ import annotations

from gtco.report.facts import StageFacts

FAMILIES = {
    "gemm": "products",
    "strassen": "products",
    "dot": "products",
    "attention": "attention",
    "convolution": "convolutions",
    "winograd": "convolutions",
    "depthwise": "convolutions",
    "rows": "normalisation",
    "across": "normalisation",
    "moments": "normalisation",
    "merged_moments": "normalisation",
    "counts": "normalisation",
    "elementwise": "element-wise",
    "fallback": "fallback",
}


def family(stage: StageFacts) -> str:
    """The family of a stage. A convolution that is computed as a product is a convolution."""
    kinds = {op.kind for op in stage.operators}
    if stage.sketch != "fallback" and kinds & {"conv2d", "conv_transpose2d"}:
        return "convolutions"
    return FAMILIES.get(stage.sketch, "other")
