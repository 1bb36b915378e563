"""Which models ``end_to_end`` and the tables of docs/results.md are about."""

from __future__ import annotations

# the geometric mean is over these
FIVE = ("vit-ti-16", "vit-s-16", "vit-base-16", "dinov2-s-14", "swin-t")
MODELS = (*FIVE, "detr-resnet50-e6", "setr-naive-base", "segformer-b0")
# Other batches and resolutions, and models that need ``transformers`` (``bench/models/wide.py``).
WIDER = ("vit-ti-16-batch16", "vit-s-16-512", "beit-b-16", "swinv2-t", "mobilevit-s")
SUITES = {"readme": MODELS, "wide": (*MODELS, *WIDER)}
