"""Models whose mask is an input, as Hugging Face writes them, against ONNX Runtime: padding, random
masks, and rows that are entirely masked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import gtco  # noqa: E402
from models import export_onnx  # noqa: E402

BATCH, TOKENS, WIDTH = 2, 21, 48


class Encoder(nn.Module):
    """A BERT encoder of two layers on token ids, or on embeddings."""

    def __init__(self, embedded: bool) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=300,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=96,
            max_position_embeddings=40,
            attn_implementation="eager",
        )
        self.bert, self.embedded = transformers.BertModel(config, add_pooling_layer=False), embedded

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        given: dict[str, Any] = {"inputs_embeds" if self.embedded else "input_ids": x}
        return self.bert(**given, attention_mask=attention_mask).last_hidden_state


def build(mask: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The encoder for an int64 mask of tokens, or for a float mask that is added to the scores."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Encoder(mask == "float32").eval().requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():  # the usual 0.02 makes every softmax uniform
                if parameter.ndim > 1:
                    parameter.normal_(0, parameter[0].numel() ** -0.5)
        if mask == "float32":
            shape = (BATCH, 1, TOKENS, TOKENS)
            return model, (torch.randn(BATCH, TOKENS, WIDTH), torch.zeros(shape))
        ids = torch.randint(0, 300, (BATCH, TOKENS))
        return model, (ids, torch.ones(BATCH, TOKENS, dtype=torch.int64))


def masks(kind: str) -> dict[str, np.ndarray]:
    """Masks by name; in ``row`` a whole row is masked, either of the batch or of the scores."""
    keep = np.ones((BATCH, 1, 1 if kind == "int64" else TOKENS, TOKENS), np.bool_)
    padding, row, everything = keep.copy(), keep.copy(), np.zeros_like(keep)
    padding[0, ..., 13:], padding[1, ..., 4:] = False, False
    row[0, :, :2] = False
    scattered = np.random.default_rng(3).random(keep.shape) < 0.6
    found = {"ones": keep, "padding": padding, "scattered": scattered}
    found |= {"row": row, "zeros": everything}
    if kind == "int64":
        return {name: k[:, 0, 0].astype(np.int64) for name, k in found.items()}
    lowest = np.finfo(np.float32).min
    return {
        f"{name} {number}": np.where(k, np.float32(0), np.float32(number))
        for name, k in found.items()
        for number in (lowest, -np.inf)
    }


@pytest.mark.parametrize(("mask", "exporter"), [("int64", "dynamo"), ("float32", "torchscript")])
def test_an_encoder_with_a_mask_at_run_time(mask: str, exporter: str, tmp_path: Path) -> None:
    model, inputs = build(mask)
    path = export_onnx(model, inputs, tmp_path / "m.onnx", exporter=exporter, opset=18)
    compiled = gtco.compile_model(path, verify=True, threads=2, workers=1)
    report = compiled.report.verification
    assert report.passed and {"mask ones", "mask zeros", "mask row"} <= {
        d.case for d in report.differences
    }
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    results: dict[str, np.ndarray] = {}
    for case, values in masks(mask).items():
        given = dict(zip(names, (inputs[0].numpy(), values), strict=True))
        (wanted,) = session.run(None, given)
        (results[case],) = compiled.run(given).values()
        np.testing.assert_allclose(results[case], wanted, rtol=1e-4, atol=1e-5, err_msg=case)
    first = [name for name in results if name.startswith(("ones", "padding", "scattered"))]
    distinct = {results[name].tobytes() for name in first}
    assert len(distinct) >= 3, "the mask changes nothing: it is not in the graph"
