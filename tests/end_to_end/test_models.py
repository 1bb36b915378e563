"""Small instances of every family, by every way into the compiler, against PyTorch in float64.

Worker processes compile each once for two threads, as a user's call does. It is saved, and loaded
with 1, 2 and 5 threads. Some inputs are random, and others are 30 times as large, at which a
careless exp or variance overflows or cancels.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import gtco
from models import export_onnx
from models.detr import Detr
from models.segformer import SegFormer
from models.setr import NaiveHead, PupHead, Setr
from models.swin import Swin
from models.vit import DinoV2, VisionTransformer
from models.weights import initialise

TOLERANCE = 1e-4  # of the output's largest magnitude
LARGE = 30.0

Size = tuple[int, int]


def vit(size: Size) -> nn.Module:
    return VisionTransformer(size, patch_size=16, width=48, depth=2, heads=3, classes=10)


def deit(size: Size) -> nn.Module:
    return VisionTransformer(size, patch_size=16, width=64, depth=2, heads=2, classes=7)


def dinov2(size: Size) -> nn.Module:
    return DinoV2(size, patch_size=14, width=64, depth=2, heads=2)


def swin(size: Size) -> nn.Module:
    return Swin(size, width=24, depths=(2, 2), heads=(2, 4), window=7, classes=10)


def setr(head: type[NaiveHead] | type[PupHead]) -> Callable[[Size], nn.Module]:
    return lambda size: Setr(size, head=head, width=48, depth=2, heads=3, mlp_dim=96, classes=5)


def segformer(size: Size) -> nn.Module:
    return SegFormer(
        size,
        widths=(16, 24, 40, 56),
        depths=(1, 1, 1, 1),
        heads=(1, 2, 5, 7),
        decoder_width=32,
        classes=9,
    )


def detr(size: Size) -> nn.Module:
    """The real ResNet-50 with all its 16 blocks, at a quarter of its width."""
    return Detr(
        size,
        encoder_depth=2,
        decoder_depth=2,
        width=64,
        heads=4,
        hidden=96,
        queries=11,
        classes=7,
        backbone_width=16,
    )


FAMILIES: dict[str, tuple[Callable[[Size], nn.Module], Size]] = {
    "vit": (vit, (48, 80)),
    "deit": (deit, (64, 32)),
    "dinov2": (dinov2, (70, 42)),
    "swin": (swin, (56, 112)),
    "setr-naive": (setr(NaiveHead), (48, 64)),
    "setr-pup": (setr(PupHead), (32, 48)),
    "segformer": (segformer, (67, 95)),
    "detr": (detr, (99, 130)),
}
# The way into the compiler, and its batch.
ROUTES = {"dynamo": 1, "torchscript": 2, "module": 3}


# Each family goes two ways, in turn; larger ones, and those that differ from another one in little,
# go one way. Hugging Face's go by TorchScript, in test_huggingface.py.
ONE_WAY = {
    "deit": ("dynamo",),
    "setr-naive": ("module",),
    "setr-pup": ("torchscript",),
    "segformer": ("dynamo",),
    "detr": ("module",),
}


def ways() -> list[tuple[str, str]]:
    pairs = itertools.cycle(itertools.combinations(ROUTES, 2))
    taken = [(f, ONE_WAY.get(f) or next(pairs)) for f in FAMILIES]
    return [(family, route) for family, routes in taken for route in routes]


@pytest.mark.parametrize(("family", "route"), ways())
def test_family(family: str, route: str, tmp_path: Path) -> None:
    make, size = FAMILIES[family]
    model = make(size).eval().requires_grad_(False)
    initialise(model, seed=len(family))
    image = torch.randn(
        (ROUTES[route], 3, *size), generator=torch.Generator().manual_seed(len(route))
    )
    check(model, (image,), route, tmp_path)


def test_a_full_size_backbone(tmp_path: Path) -> None:
    """DETR's ResNet-50 at its own width, 2048 channels deep."""
    model = Detr((64, 64), encoder_depth=1, decoder_depth=1, queries=10).eval()
    initialise(model.requires_grad_(False), seed=1)
    image = torch.randn((1, 3, 64, 64), generator=torch.Generator().manual_seed(1))
    check(model, (image,), "module", tmp_path)


def check(model: nn.Module, inputs: tuple[Tensor, ...], route: str, folder: Path) -> None:
    """Compiles by ``route``, and checks the outputs in every case and with every number of
    threads.
    """
    if route == "module":
        compiled = gtco.compile_model(model, inputs)
    else:
        path = export_onnx(
            model,
            inputs,
            folder / "model.onnx",
            opset=20 if route == "dynamo" else 17,
            exporter=route,
        )
        compiled = gtco.compile_model(path)
    assert not compiled.report.notes, compiled.report.notes
    library = compiled.save(folder / "model.so")
    results: dict[str, list[np.ndarray]] = {}
    for threads in (1, 2, 5):
        with gtco.load(library, threads=threads) as loaded:
            for case, scale in (("random", 1.0), ("large", LARGE)):
                given = [
                    (t * scale).numpy() if t.is_floating_point() else t.numpy() for t in inputs
                ]
                outputs = list(loaded.run(dict(zip(names(loaded), given, strict=True))).values())
                known = results.setdefault(case, outputs)
                for output, first in zip(outputs, known, strict=True):  # same sums, same order
                    np.testing.assert_array_equal(output, first)
    for case, scale in (("random", 1.0), ("large", LARGE)):
        given_tensors = [t * scale if t.is_floating_point() else t for t in inputs]
        compare(results[case], model, given_tensors, case)


def names(model: Any) -> list[str]:
    return [spec.name for spec in model.inputs]


def compare(
    outputs: Sequence[np.ndarray], model: nn.Module, inputs: Sequence[Tensor], case: str
) -> None:
    """Compares with the module in float64. If PyTorch's own float32 has more than a third of the
    tolerance as its error, the model is badly conditioned, and three times PyTorch's error is
    allowed.
    """
    with torch.no_grad():
        single = [t.numpy() for t in flatten(model(*inputs))]
        wide = copy.deepcopy(model).double()
        exact = [
            t.numpy()
            for t in flatten(wide(*(t.double() if t.is_floating_point() else t for t in inputs)))
        ]
    assert len(outputs) == len(exact)
    for number, (got, wanted, torchs) in enumerate(zip(outputs, exact, single, strict=True)):
        assert got.shape == wanted.shape and got.dtype == torchs.dtype
        magnitude = np.abs(wanted).max()
        assert magnitude > 0 and np.isfinite(magnitude)
        error = np.abs(got - wanted).max() / magnitude
        allowed = max(TOLERANCE, 3 * np.abs(torchs - wanted).max() / magnitude)
        assert error <= allowed, f"output {number}, {case} inputs: {error:.2g} over {allowed:.2g}"


def flatten(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from flatten(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)


def test_dlpack_in_torch_out(tmp_path: Path) -> None:
    """A torch tensor in, a torch tensor out; also ONNX Runtime's result for the same file."""
    model = vit((48, 48)).eval().requires_grad_(False)
    initialise(model, seed=3)
    image = torch.randn((1, 3, 48, 48), generator=torch.Generator().manual_seed(0))
    path = export_onnx(model, (image,), tmp_path / "vit.onnx")
    compiled = gtco.compile_model(path.read_bytes(), threads=1, verify=True)
    assert compiled.report.verification.passed
    result = compiled(image)
    assert isinstance(result, Tensor)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"image": image.numpy()})
    np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-3, atol=1e-4)
