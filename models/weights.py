"""Seeded weights for models without a checkpoint, and checkpoints for models with one.

The seeded weights keep every stage of a network in use, so that a numerical comparison means
something: activations neither vanish nor explode through 32 layers, softmax is not uniform, no bias
is zero, no norm is the identity, and the outputs follow the input. Hence linear weights of
deviation 1 / sqrt(inputs) rather than the usual 0.02, with which the attention of an untrained ViT
is a plain mean.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from gtco.support.errors import ModelError

from .layers import LayerScale
from .resnet import Bottleneck, FrozenBatchNorm2d

_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
_SHOWN = 8


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter and norm statistic of ``model`` in place from ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                _initialise_projection(module, generator)
            elif isinstance(module, nn.Embedding):
                _normal(module.weight, 1.0, generator)
            elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d | FrozenBatchNorm2d):
                _initialise_norm(module, generator)
            elif isinstance(module, LayerScale):
                module.gamma.uniform_(0.1, 1.0, generator=generator)
            else:
                # Packed projections; tokens, positions and bias tables, held by a module directly.
                for name, parameter in module.named_parameters(recurse=False):
                    std = parameter.shape[-1] ** -0.5 if name == "in_proj_weight" else 0.1
                    _normal(parameter, std, generator)
        for module in model.modules():
            if isinstance(module, Bottleneck):
                # Sixteen residual branches at full strength would multiply the variance by 2**16.
                module.bn3.weight.mul_(0.25)
        if (size := getattr(model, "settles_on", None)) is not None:
            _settle_norms(model, torch.randn(2, 3, *size, generator=generator))


def _settle_norms(model: nn.Module, images: Tensor) -> None:
    """Gives the batch norms the statistics of what they see, as training does. Without that, little
    of the input is left behind twenty convolutions without a shortcut.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    training = model.training
    model.train()(images)
    model.train(training)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def _initialise_projection(module: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    """1 / sqrt(inputs), or Kaiming's sqrt(2 / inputs) for the convolutions before a ReLU."""
    gain = 2.0 if isinstance(module, nn.Conv2d) else 1.0
    weight = module.weight
    _normal(weight, math.sqrt(gain / weight[0].numel()), generator)
    if weight.shape[1] > 3:
        # A filter of zero mean ignores the offset that ReLU and GELU give to all channels; after
        # fifty convolutions it would drown what depends on the image.
        weight.sub_(weight.mean(dim=tuple(range(1, weight.ndim)), keepdim=True))
    if module.bias is not None:
        _normal(module.bias, 0.05, generator)


def _initialise_norm(
    module: nn.LayerNorm | nn.BatchNorm2d | FrozenBatchNorm2d, generator: torch.Generator
) -> None:
    """Near the identity, but not it."""
    _normal(module.weight, 0.05, generator).add_(1.0)
    _normal(module.bias, 0.05, generator)
    if not isinstance(module, nn.LayerNorm):
        assert module.running_mean is not None and module.running_var is not None
        _normal(module.running_mean, 0.05, generator)
        module.running_var.uniform_(0.8, 1.2, generator=generator)


def _normal(tensor: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Normal, clipped at two deviations, in place."""
    return tensor.normal_(0.0, std, generator=generator).clamp_(-2 * std, 2 * std)


def load_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Load the weights in ``path`` into ``model``: all of them, and nothing else.

    Takes ``.pt`` / ``.pth`` (read with ``weights_only=True``) and ``.safetensors``. A model may
    have ``adapt_state_dict(state) -> state``, which renames public keys. Raises :class:`ModelError`
    with the missing, unexpected and misshapen keys.
    """
    path = Path(path)
    state = read_state_dict(path)
    adapt = getattr(model, "adapt_state_dict", None)
    if adapt is not None:
        state = adapt(state)
    expected = model.state_dict()
    counters = {name for name in expected if name.endswith("num_batches_tracked")}
    missing = sorted(expected.keys() - state.keys() - counters)
    unexpected = sorted(state.keys() - expected.keys())
    misshapen = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & state.keys())
        if state[name].shape != expected[name].shape
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
    if any(keys for _, keys in problems):
        listed = "; ".join(f"{kind}: {_some(keys)}" for kind, keys in problems if keys)
        raise ModelError(
            f"checkpoint {path} does not fit {type(model).__name__}: {listed}. "
            "Give the checkpoint of this very model, at its image size"
        )
    model.load_state_dict(state, strict=False)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The name -> tensor table in a checkpoint file, out of the usual wrappers and prefixes."""
    if not path.is_file():
        raise ModelError(
            f"no checkpoint at {path}; give an existing .pt, .pth or .safetensors file"
        )
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
    if not isinstance(content, dict) or not content:
        raise ModelError(
            f"{path} holds {type(content).__name__}, not a state dict of named tensors"
        )
    strangers = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if strangers:
        raise ModelError(f"{path} is not a state dict: not a tensor: {_some(strangers)}")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


def _read_torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"cannot read {path} as a PyTorch checkpoint of plain tensors: {error}. "
            "Save the model's state_dict() with torch.save and give that file"
        ) from error


def _read_safetensors(path: Path) -> object:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ModelError(f"reading {path} needs safetensors: pip install safetensors") from error
    try:
        return load_file(path)
    except Exception as error:
        raise ModelError(f"cannot read {path} as safetensors: {error}") from error


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} ({len(names)})"
